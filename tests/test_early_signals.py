"""Signals in a process's first seconds: none kills it, and none is lost once they are blocked.

Looked for beside `env --block-signal`, on nodes older than ours: bash (mapfile 4.0, BASH_EXECUTION_STRING 3, $(<file),
brace lists: nothing newer than 4.2 is used, but no such bash was there to try), `sh` (trap, if, exec of POSIX), python
(start.py is read by 3.6), git (a node without it gives a record without a commit), sleep with fractions (busybox has
them), node_check.sh (grep, sed, tac, sha256sum, cut, tr, date: coreutils of any age).  Nothing else is called on a node
but Slurm's own commands.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster.early_signals import begun_blocked, shell_function
from cluster.signals import held_back
from tests.executables import put_executable, put_old_env
from tests.training import REPOSITORY, command, environment, newest_run, wait_for, write_spec

SHORT = (0, 300, 1000, 2000)  # milliseconds after the start
ALL = range(0, 3001, 100)
STARTER = REPOSITORY / "cluster" / "start.py"
BLOCKED = "import signal as s; print(sorted(number.name for number in s.pthread_sigmask(s.SIG_BLOCK, ())))"
PENDING = "import signal as s, time; time.sleep(0.3); print(sorted(number.name for number in s.sigpending()))"
BOTH = "['SIGTERM', 'SIGUSR2']\n"
IGNORED = 1 << signal.SIGUSR2 - 1 | 1 << signal.SIGTERM - 1  # in /proc/PID/status


def in_script(words: Sequence[str]) -> list[str]:
    """As a batch script begins a command."""
    return ["bash", "-c", "\n".join([*shell_function(sys.executable, str(STARTER)), 'begin_blocked "$@"']), "-", *words]


def as_rank(words: Sequence[str]) -> list[str]:
    """As srun begins a rank."""
    return [*begun_blocked([sys.executable, str(STARTER), "--block", *words])]


@pytest.fixture
def environ(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """With a new `env`, or with coreutils 8.30's first on PATH, or with none that works."""
    if request.param == "old env":
        put_old_env(tmp_path / "bin")
    if request.param == "no env":
        put_executable(tmp_path / "bin", "env", "exit 127")
    return {**environment(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


every_env = pytest.mark.parametrize("environ", ["new env", "old env", "no env"], indirect=True)
every_way = pytest.mark.parametrize("begin", [in_script, as_rank], ids=["batch script", "rank"])


@every_env
@every_way
def test_command_begins_with_the_stop_signals_blocked(
    begin: Callable[[Sequence[str]], list[str]], environ: dict[str, str]
) -> None:
    words = begin([sys.executable, "-c", BLOCKED])
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, BOTH, "")


@every_env
@every_way
def test_no_signal_is_deadly_once_the_shell_has_begun_and_none_is_lost_once_they_are_blocked(
    begin: Callable[[Sequence[str]], list[str]], environ: dict[str, str]
) -> None:
    words = begin([sys.executable, "-c", PENDING])
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    wait_for("the shell to ignore them", lambda: is_past_the_shells_start(process.pid) or process.poll() is not None)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.0005)
    assert process.stdout is not None
    with process.stdout as told:
        assert (process.returncode, told.read()) == (0, BOTH)


def is_past_the_shells_start(pid: int) -> bool:
    """Whether both are ignored, or blocked already: a loaded machine may miss the one for the other."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn", "SigBlk"))]
    return any(mask & IGNORED == IGNORED for mask in masks)


def code_after_usr2(folder: Path, spec: Path, delay_ms: int) -> int:
    """Start one rank, send it USR2 after a delay; returns its exit code."""
    words = command("cluster.start", "jobs.train", spec, "train.epochs=1000", "train.warmup_epochs=0")
    with held_back():  # as the supervisor starts its local ranks
        rank = subprocess.Popen(words, env=environment(folder), cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    time.sleep(delay_ms / 1000)
    os.kill(rank.pid, signal.SIGUSR2)
    return rank.wait()


@pytest.mark.parametrize("delay_ms", SHORT)
def test_usr2_early_in_a_rank_stops_it_at_a_boundary(tmp_path: Path, staged_data: Path, delay_ms: int) -> None:
    assert code_after_usr2(tmp_path, write_spec(tmp_path, staged_data), delay_ms) == 75
    events = [event["event"] for event in newest_run(tmp_path).read_events()]
    events = [event for event in events if event != "checkpoint_saved"]  # one that was under way ends in between
    assert events[-2:] == ["stop_requested", "stopped"]


@pytest.mark.long
@pytest.mark.parametrize("delay_ms", [delay for delay in ALL if delay not in SHORT])
def test_usr2_at_every_tenth_of_a_second_stops_a_rank_at_a_boundary(
    tmp_path: Path, staged_data: Path, delay_ms: int
) -> None:
    assert code_after_usr2(tmp_path, write_spec(tmp_path, staged_data), delay_ms) == 75
