"""Starting ranks: srun's whole command line, and local ranks that are small real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.early_signals import begun_blocked
from cluster.launch import (
    LocalRanks,
    Ranks,
    RanksEnd,
    Shape,
    SrunRanks,
    leave_terminal,
    local_variables,
    rank_variables,
    srun_command,
)
from cluster.plan import LaunchPlan
from cluster.start_watch import StartWatch

REPOSITORY = Path(__file__).parents[1]
PLACE = rank_variables("10.0.0.1", "23111,24112", "run.1", 1)


def make_plan(*rank: str, world_size: int = 2, cpus_per_task: int | None = None) -> LaunchPlan:
    """A plan whose ranks run this command."""
    return LaunchPlan(
        run_dir="/runs/demo/1",
        name="demo",
        cluster="local",
        sbatch={},
        preamble=(),
        supervisor=("/opt/python", "/code/cluster/start.py", "cluster.supervise", "/runs/demo/1"),
        rank=rank,
        num_nodes=1,
        num_tasks_per_node=world_size,
        cpus_per_task=cpus_per_task,
        signal_lead_s=120,
        time_limit_s=None,
        threads_per_rank=1,
        max_failures=0,
        policy={},
        requeue_mode="auto",
        num_successors=3,
        submit_from="job",
    )


UNBLOCK = "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRanks]]:
    """Starts local ranks that run some Python code and know their number as `rank`."""
    started: list[LocalRanks] = []

    def start_code(code: str, world_size: int = 2) -> LocalRanks:
        # Ranks begin with the stop signals blocked, and unblock them once they have handlers; these have none.
        head = "import os, signal, sys, time, pathlib; rank = int(os.environ['RANK'])\n"
        if "signal.signal" not in code:
            head += UNBLOCK
        plan = make_plan(sys.executable, "-c", head + code, world_size=world_size)
        started.append(LocalRanks.start(plan, {**os.environ, **PLACE}, tmp_path / "attempt_0001.log"))
        return started[-1]

    yield start_code
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()


def wait(ranks: Ranks) -> RanksEnd:
    """Wait as the supervisor does."""
    while not ranks.is_over():
        time.sleep(0.02)
    return ranks.end()


def wait_for(path: Path) -> None:
    """Wait until a process has said that it is ready."""
    while not path.exists():
        time.sleep(0.02)


def test_srun_line_is_whole_and_places_every_task() -> None:
    command = srun_command(
        make_plan("python", "-m", "x", cpus_per_task=4), Shape(2, 4, 2), Path("/runs/100%/a.log"), {}
    )
    assert command == [
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=4",
        "--mem=0",
        "--kill-on-bad-exit=1",
        "--wait=30",
        "--mpi=none",
        "--export=ALL",
        "--output=/runs/100%%/a.log",
        "--error=/runs/100%%/a.log",
        "--open-mode=append",
        *begun_blocked(("python", "-m", "x")),
    ]


def test_uneven_allocation_is_left_to_srun() -> None:
    command = srun_command(make_plan("python"), Shape(2, 3, None), Path("/a.log"), {})
    assert command[:5] == ["srun", "--nodes=2", "--ntasks=3", "--mem=0", "--kill-on-bad-exit=1"]


def test_ranks_are_told_where_to_meet_and_which_attempt_they_are() -> None:
    assert PLACE == {
        "CLUSTER_MASTER_ADDR": "10.0.0.1",
        "CLUSTER_MASTER_PORTS": "23111,24112",
        "CLUSTER_TOKEN": "run.1",
        "CLUSTER_ATTEMPT": "1",
    }
    assert local_variables(1, 2, PLACE) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "23111",
    }


def test_srun_ends_with_all_its_lines_its_code_and_without_an_export_filter(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.stderr.buffer.write(b'srun: error: gr\\xf6\\xdfer\\n'); "
        "sys.exit(3 if 'SLURM_EXPORT_ENV' in os.environ else 7)"
    )
    environ = {**os.environ, "SLURM_EXPORT_ENV": "NONE"}
    ranks = SrunRanks.start([sys.executable, "-c", code], environ, StartWatch(tmp_path / "log", 60))
    assert wait(ranks) == RanksEnd({}, launcher_lines=("srun: error: gr\ufffd\ufffder",), launcher_code=7)


def test_srun_is_asked_to_stop_by_usr2(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75)); "
        f"pathlib.Path({str(ready)!r}).touch(); signal.pause()"
    )
    ranks = SrunRanks.start([sys.executable, "-c", code], os.environ, StartWatch(tmp_path / "log", 60))
    wait_for(ready)
    ranks.ask_to_stop()
    assert wait(ranks).launcher_code == 75


def test_srun_that_starts_no_rank_is_ended_and_says_why(tmp_path: Path) -> None:
    words = "srun: Job 5 step creation still disabled"
    code = f"import sys, time; print({words!r}, file=sys.stderr, flush=True); time.sleep(60)"
    ranks = SrunRanks.start([sys.executable, "-c", code], os.environ, StartWatch(tmp_path / "log", 0.5))
    why = f"no rank has begun within 0.5 s (see train.start_timeout_s); {words}"
    assert wait(ranks) == RanksEnd({}, launcher_lines=(words,), launcher_code=-signal.SIGTERM, given_up=why)


def test_local_ranks_have_their_variables_and_one_log(start: Callable[..., LocalRanks], tmp_path: Path) -> None:
    code = """
import json
names = ("RANK", "WORLD_SIZE", "CLUSTER_TOKEN")
line = json.dumps([os.environ[name] for name in names] + [os.getsid(0) == os.getpid()])
os.write(1, line.encode() + bytes([10]))  # one write: the ranks share the log
"""
    assert wait(start(code)) == RanksEnd({0: 0, 1: 0})
    lines = (tmp_path / "attempt_0001.log").read_text().splitlines()
    assert sorted(json.loads(line) for line in lines) == [["0", "2", "run.1", True], ["1", "2", "run.1", True]]


def test_failed_rank_ends_the_others(start: Callable[..., LocalRanks]) -> None:
    ranks = start("sys.exit(3) if rank == 1 else time.sleep(600)", world_size=3)
    assert wait(ranks) == RanksEnd({0: -15, 1: 3, 2: -15}, frozenset((0, 2)))


def test_rank_that_ignores_term_is_killed(start: Callable[..., LocalRanks], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ranks = start(
        f"""
ready = pathlib.Path({str(ready)!r})
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and blocked, too
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert wait(ranks) == RanksEnd({0: -9, 1: -9}, frozenset((0,)))


@pytest.mark.parametrize("code", [0, 75])
def test_rank_that_is_done_or_saved_lets_the_others_go_on(
    start: Callable[..., LocalRanks], tmp_path: Path, code: int
) -> None:
    go_on = tmp_path / "go_on"
    ranks = start(
        f"""
if rank == 0:
    sys.exit({code})
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.02)
sys.exit({code})
"""
    )
    ranks.processes[0].wait()
    assert not ranks.is_over()
    assert ranks.processes[1].poll() is None
    go_on.touch()
    assert wait(ranks) == RanksEnd({0: code, 1: code})


def test_local_ranks_are_asked_to_stop_by_term(start: Callable[..., LocalRanks], tmp_path: Path) -> None:
    ranks = start(
        f"""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
{UNBLOCK}(pathlib.Path({str(tmp_path)!r}) / str(rank)).touch()
signal.pause()
"""
    )
    wait_for(tmp_path / "0")
    wait_for(tmp_path / "1")
    ranks.ask_to_stop()
    assert wait(ranks) == RanksEnd({0: 75, 1: 75})


DETACHED = f"""
import os, pathlib, signal, sys, time
from cluster.launch import {leave_terminal.__name__}
from cluster.start_watch import StartWatch
from cluster.runs import write_atomic
from cluster.start_watch import StartWatch
from cluster.signals import StopFlag

folder = pathlib.Path(sys.argv[1])
leave_terminal()
time.sleep(0.3)  # a signal that comes now waits for the flag
stop = StopFlag()
stop.install()
write_atomic(folder / "pid", str(os.getpid()))
while not stop.is_set() and not (folder / "go_on").exists():
    time.sleep(0.02)
write_atomic(folder / "said", f"{{stop.name()}} {{os.getsid(0) == os.getpid()}}")
sys.exit(75)
"""


def start_detached(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", DETACHED, str(folder)], cwd=REPOSITORY)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2], ids=lambda number: number.name)
def test_parent_of_a_detached_supervisor_hands_signals_on_and_takes_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    parent = start_detached(tmp_path)
    wait_for(tmp_path / "pid")
    parent.send_signal(number)
    assert parent.wait() == 75
    assert (tmp_path / "said").read_text() == f"{number.name} True"


def test_detached_supervisor_outlives_its_parent(tmp_path: Path) -> None:
    parent = start_detached(tmp_path)
    wait_for(tmp_path / "pid")
    parent.kill()
    assert parent.wait() == -9
    (tmp_path / "go_on").touch()
    wait_for(tmp_path / "said")
    assert (tmp_path / "said").read_text() == " True"
