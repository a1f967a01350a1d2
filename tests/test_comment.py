"""The job's comment: where the run is, for squeue; the user's own stays, and a slow Slurm holds nothing up."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.comment import Comment, find_comment
from cluster.identity import RunJob
from cluster.job import Job
from cluster.runs import RunFolder, write_json
from tests.executables import put_answer, put_executable, shown_job
from tests.test_launch import make_plan
from tests.training import wait_for

BEAT = {"phase": "training", "step": 120, "total_steps": 960, "steps_per_epoch": 32, "global_batch": 64, "loss": 1.25}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / "20260102-030405-0a1b")
    folder.make()
    folder.claim_attempt({"job_id": "17"})
    return folder


@pytest.fixture
def comment(tmp_path: Path, run: RunFolder) -> Comment:
    """A job whose scontrol writes down what it is asked, and that has no comment yet."""
    put_answer(tmp_path, "squeue", "(null)\n")
    put_executable(tmp_path, "scontrol", f'{shown_job(run.path)}; echo "$@" >> {tmp_path}/asked')
    return Comment(run, Job(RunJob("17", run.path), is_on_slurm=True, environ={"PATH": str(tmp_path)}), is_wanted=True)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_comment_says_where_the_run_is_and_which_it_is(tmp_path: Path, run: RunFolder, comment: Comment) -> None:
    comment.write()
    write_json(run.heartbeat, {"attempt": 1, **BEAT})
    comment.write()
    comment.write()  # nothing new
    comment.tell("stopped: preempted (SIGTERM), saved at step 120")
    comment.write()
    head = "update JobId=17 Comment="
    assert asked(tmp_path) == [
        f"{head}starting [{run.run_id}]",
        f"{head}training: step 120/960, epoch 4/30, loss 1.250 [{run.run_id}]",
        f"{head}stopped: preempted (SIGTERM), saved at step 120 [{run.run_id}]",
    ]


def test_heartbeat_of_an_earlier_attempt_is_not_told(tmp_path: Path, run: RunFolder, comment: Comment) -> None:
    write_json(run.heartbeat, {"attempt": 1, **BEAT})
    run.claim_attempt({"job_id": "17"})
    comment.write()
    assert asked(tmp_path) == [f"update JobId=17 Comment=starting [{run.run_id}]"]


def test_news_is_written_by_a_thread(tmp_path: Path, run: RunFolder, comment: Comment) -> None:
    comment.begin()
    wait_for("the first comment", lambda: len(asked(tmp_path)) == 1)
    comment.tell("requeued")
    wait_for("the news", lambda: len(asked(tmp_path)) == 2)
    assert asked(tmp_path) == [f"update JobId=17 Comment={said} [{run.run_id}]" for said in ("starting", "requeued")]


def test_update_is_due_with_each_change_of_stage_and_else_every_ten_minutes(run: RunFolder, comment: Comment) -> None:
    def beat(phase: str, step: int) -> None:
        write_json(run.heartbeat, {"attempt": 1, **BEAT, "phase": phase, "step": step})

    found = [comment.is_due(0.0), comment.is_due(10.0)]
    beat("training", 1)
    found += [comment.is_due(20.0), comment.is_due(30.0)]
    beat("saving", 2)
    found += [comment.is_due(40.0), comment.is_due(480.0)]  # 20 s + 480 s is the earliest
    beat("training", 3)
    found += [comment.is_due(741.0), comment.is_due(742.0)]  # 20 s + 720 s is the latest
    comment.tell("stopped")
    found += [comment.is_due(743.0), comment.is_due(744.0)]
    assert found == [True, False] * 2 + [False, False] + [True, False] * 2


def test_jobs_that_begin_together_do_not_write_in_step(run: RunFolder, comment: Comment) -> None:
    dues = set()
    for _ in range(20):
        comment._stage = ""
        comment.is_due(0.0)
        dues.add(comment._due_s)
    assert len(dues) == 20
    assert all(480.0 <= due_s <= 720.0 for due_s in dues)


@pytest.mark.parametrize(
    ("is_on_slurm", "flags", "is_wanted"),
    [(True, {}, True), (True, {"comment": "mine"}, False), (False, {}, False)],
    ids=["job", "own comment", "local"],
)
def test_comment_of_the_spec_and_of_a_local_run_are_left_alone(
    run: RunFolder, is_on_slurm: bool, flags: dict[str, Any], is_wanted: bool
) -> None:
    plan = dataclasses.replace(make_plan("true"), sbatch=flags)
    job = Job(RunJob("17", run.path), is_on_slurm=is_on_slurm, environ={})
    assert find_comment(run, plan, job).is_wanted == is_wanted


@pytest.mark.parametrize(
    ("found", "is_users"),
    [("(null)", False), ("", False), ("mine, for the paper", True), ("starting [20260102-030405-0a1b]", False)],
)
def test_comment_that_sbatch_was_given_is_told_from_that_of_the_attempt_before(
    tmp_path: Path, comment: Comment, found: str, is_users: bool
) -> None:
    put_answer(tmp_path, "squeue", f"{found}\n")
    assert comment._is_users() == is_users


def test_refusal_is_told_once_and_ends_nothing(
    tmp_path: Path, comment: Comment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    caplog.set_level(logging.INFO, logger="run")
    put_executable(tmp_path, "scontrol", f'{shown_job(comment.run.path)}; echo "Access/permission denied" >&2; exit 1')
    comment.write()
    comment.tell("else")
    comment.write()
    words = f"scontrol update JobId=17 Comment=starting [{comment.run.run_id}]: exit code 1: Access/permission denied"
    assert caplog.messages == [f"the job's comment does not say where the run is: {words}"]
