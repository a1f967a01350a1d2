"""Stop flag: real signals, each sent to a process of its own or to this one."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.signals import STOP_SIGNALS, StopFlag

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def stop() -> Iterator[StopFlag]:
    """An installed flag; this process's own handlers come back afterwards."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


def run_code(code: str) -> str:
    """What a Python process of its own prints; the code finds an installed `stop`."""
    head = "import os, signal; from cluster.signals import STOP_SIGNALS, StopFlag; stop = StopFlag()\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_flag_without_a_signal_is_not_set_and_knows_no_deadline(stop: StopFlag) -> None:
    assert (stop.is_set(), stop.name()) == (False, "")
    assert stop.maybe_deadline_s(kill_wait_s=30.0, lead_s=120.0) is None


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_every_stop_signal_sets_the_flag(stop: StopFlag, number: signal.Signals) -> None:
    signal.raise_signal(number)
    assert (stop.is_set(), stop.name()) == (True, number.name)


def test_repeats_and_later_signals_change_neither_time_nor_name(stop: StopFlag) -> None:
    began = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    first = dict(stop.first_s)
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2):
        signal.raise_signal(number)
    assert list(first) == [signal.SIGTERM]
    assert began <= first[signal.SIGTERM] <= stop.first_s[signal.SIGUSR2] <= time.monotonic()
    assert stop.first_s[signal.SIGTERM] == first[signal.SIGTERM]
    assert stop.name() == "SIGTERM"


def test_signal_of_a_forked_child_is_not_its_own_nor_the_parents() -> None:
    code = """
stop.install()
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGTERM)
    os._exit(int(stop.is_set()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.is_set())
"""
    assert run_code(code) == "0 False\n"


def test_blocked_signal_that_is_pending_arrives_when_the_flag_is_installed() -> None:
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
signal.raise_signal(signal.SIGUSR2)
print(stop.name() or "pending")
stop.install()
print(stop.name(), [number.name for number in STOP_SIGNALS if number in signal.pthread_sigmask(signal.SIG_BLOCK, ())])
"""
    assert run_code(code) == "pending\nSIGUSR2 []\n"


def test_signal_that_a_library_took_is_taken_back_and_the_librarys_handler_is_named(stop: StopFlag) -> None:
    assert stop.take_back() == {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert stop.take_back() == {"SIGTERM": signal.default_int_handler}
    signal.raise_signal(signal.SIGTERM)
    assert stop.name() == "SIGTERM"


def test_installed_flag_is_not_inherited_by_a_program_that_is_started() -> None:
    code = """
import subprocess
stop.install()
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print(child.wait())
"""
    assert run_code(code) == "-15\n"


TERM, USR2 = signal.SIGTERM, signal.SIGUSR2


@pytest.mark.parametrize(
    ("first_s", "kill_wait_s", "lead_s", "deadline_s"),
    [
        pytest.param({TERM: 100.0}, 30.0, 120.0, 128.0, id="TERM and KillWait, with a margin"),
        pytest.param({USR2: 100.0}, 30.0, 120.0, 220.0, id="USR2 and the lead"),
        pytest.param({USR2: 100.0, TERM: 110.0}, 30.0, 120.0, 138.0, id="the earlier of the two"),
        pytest.param({TERM: 100.0}, None, 120.0, None, id="KillWait is not known"),
        pytest.param({USR2: 100.0}, 30.0, None, None, id="nothing ends the allocation"),
        pytest.param({signal.SIGINT: 100.0}, 30.0, 120.0, None, id="Ctrl-C has no deadline"),
    ],
)
def test_deadline_is_counted_from_the_first_signal(
    first_s: dict[int, float], kill_wait_s: float | None, lead_s: float | None, deadline_s: float | None
) -> None:
    stop = StopFlag()
    stop.first_s = first_s
    assert stop.maybe_deadline_s(kill_wait_s=kill_wait_s, lead_s=lead_s) == deadline_s
