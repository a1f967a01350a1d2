"""Grace: when the supervisor tells the ranks that they have longer than KillWait.  On a real Slurm: tests/slurm."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cluster.grace import Grace
from cluster.identity import RunJob
from cluster.job import Job
from cluster.runs import RunFolder, seconds_between, utc_now, write_json
from tests.executables import put_answer
from tests.test_job_end import PREEMPTED, shown


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo" / "a")
    run.make()
    return run


def make_grace(run: RunFolder, text: str, *, ends_in_s: float) -> Grace:
    """Of attempt 2 of job 5, of which scontrol says this, with another end."""
    end = (datetime.now() + timedelta(seconds=ends_in_s)).isoformat(timespec="seconds")
    folder = run.path.parents[1] / "bin"
    put_answer(folder, "scontrol", text.replace("EndTime=2026-12-01T04:09:45", f"EndTime={end}"))
    job = Job(RunJob("5", run.path), is_on_slurm=True, environ={"PATH": str(folder)})
    return Grace(run, job, attempt=2, kill_wait_s=lambda: 30.0)


def beat(run: RunFolder, attempt: int, **fields: str) -> None:
    write_json(run.heartbeat, {"attempt": attempt, "phase": "training", **fields})


def test_preempted_ranks_are_told_when_their_grace_period_ends(run: RunFolder) -> None:
    log = run.batch_log("5")
    grace = make_grace(run, shown(preempted=PREEMPTED, log=log), ends_in_s=120)
    grace.look()
    beat(run, 2)
    grace.look()
    assert run.maybe_grace_end(2) is None
    beat(run, 2, stop_signal="SIGTERM")
    grace.look()
    end = run.maybe_grace_end(2)
    assert end is not None
    assert 100 < seconds_between(utc_now(), end) <= 120
    assert run.maybe_grace_end(3) is None


@pytest.mark.parametrize(
    ("preempted", "ends_in_s", "attempt", "signal"),
    [
        (PREEMPTED, 20, 2, "SIGTERM"),
        ("   PreemptEligibleTime=2026-12-01T04:09:43 PreemptTime=None\n", 120, 2, "SIGTERM"),
        (PREEMPTED, 120, 1, "SIGTERM"),
        (PREEMPTED, 120, 2, "SIGUSR2"),
    ],
    ids=["no longer than KillWait", "not preempted", "an earlier attempt's beat", "a time limit's warning"],
)
def test_kill_wait_stands_where_slurm_says_nothing_of_more(
    run: RunFolder, preempted: str, ends_in_s: float, attempt: int, signal: str
) -> None:
    grace = make_grace(run, shown(preempted=preempted, log=run.batch_log("5")), ends_in_s=ends_in_s)
    beat(run, attempt, stop_signal=signal)
    grace.look()
    assert not run.grace.exists()
