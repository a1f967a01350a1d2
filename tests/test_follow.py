"""Following a run: when it is over, how it is told to have ended, and who counts as alive."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.follow import LocalWatch, RunWatch, is_running, tell_result
from cluster.reasons import explain
from cluster.run_state import RunState
from cluster.runs import RunFolder, write_json
from tests.executables import put_answer, put_executable
from tests.training import REPOSITORY

SUMMARY = {"test_accuracy": 0.91234, "epochs": 30, "steps": 960, "images_per_s": 512.4, "wall_s": 61.25}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / "a")
    folder.make()
    return folder


def test_process_runs_until_it_has_ended_even_if_nobody_has_waited_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(process.pid)
    process.communicate(b"\n")
    assert not is_running(process.pid)  # gone
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(zombie.pid)
    zombie.wait()


def test_local_run_is_over_with_its_verdict_or_when_nobody_is_left_to_write_one(run: RunFolder) -> None:
    controller = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = LocalWatch(run, controller.pid, previous_attempt=1)
    run.claim_attempt({"pid": 2**22})  # of an earlier submission
    assert (watch.is_over(), watch.supervisor_pid()) == (False, None)
    run.claim_attempt({"pid": os.getpid()})
    assert (watch.is_over(), watch.supervisor_pid()) == (False, os.getpid())
    write_json(run.verdict(2), {"outcome": "failed", "action": "restart"})
    assert not watch.is_over()
    write_json(run.verdict(2), {"outcome": "stopped", "action": "leave"})
    assert watch.is_over()
    run.verdict(2).unlink()
    assert not watch.is_over()
    run.claim_attempt({"pid": 2**22})  # no such process
    assert watch.is_over()
    watch.ask_to_stop()  # nobody is left to hear it
    controller.communicate(b"\n")
    assert LocalWatch(run, controller.pid, previous_attempt=3).is_over()


@pytest.mark.parametrize(
    ("answer", "exit_code", "over", "waits_for"),
    [
        (
            "17|17|PENDING|N/A|10:00|||Resources|RUN/job",
            0,
            False,
            "pending: Resources: it is next, once enough nodes are free",
        ),
        ("17|17|RUNNING|2026-01-02T03:04:05|9:00|n1||None|RUN/job", 0, False, "starting"),
        (
            "17|17|TIMEOUT|N/A|0:00|n1||TimeLimit|RUN/job",
            0,
            True,
            "failed: job 17 ended as TIMEOUT (TimeLimit) before it had started any rank: no such folder",
        ),
        (
            "17|17|PENDING|N/A|10:00|||DependencyNeverSatisfied|RUN/job",
            0,
            True,
            f"failed: DependencyNeverSatisfied: {explain('DependencyNeverSatisfied').text}",
        ),
        ("", 0, True, "failed: job 17 is gone before it had started any rank: no such folder"),
        ("", 1, False, "pending"),
    ],
    ids=["waiting", "running", "ended", "waiting in vain", "forgotten", "no answer"],
)
def test_slurm_job_is_over_only_when_slurm_says_so(
    tmp_path: Path, run: RunFolder, answer: str, exit_code: int, over: bool, waits_for: str
) -> None:
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    run.batch_log("17").write_text("no such folder\n")
    errors = "Socket timed out\n" * exit_code
    put_answer(tmp_path, "squeue", answer.replace("RUN/", f"{run.path}/"), errors, exit_code)
    watch = RunWatch(run, {"PATH": str(tmp_path)}, _asked_s=-1000.0)
    assert (watch.is_over(), watch.waits_for()) == (over, waits_for)


def test_finished_run_is_over_whatever_slurm_says(tmp_path: Path, run: RunFolder) -> None:
    run.summary.write_text("{}")
    assert RunWatch(run, {"PATH": str(tmp_path)}).is_over()


def test_slurm_is_asked_soon_after_news_and_then_less_and_less_often(tmp_path: Path, run: RunFolder) -> None:
    put_executable(
        tmp_path, "squeue", f"echo asked >> {tmp_path}/count; echo '17|17|RUNNING|N/A|1:00|n1||None|{run.path}'"
    )
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    watch = RunWatch(run, {"PATH": str(tmp_path)})
    pauses = []
    for _ in range(7):
        watch._asked_s = -1000.0
        assert not watch.is_over()
        pauses.append(watch._pause_s)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    assert not watch.is_over()  # it was asked just now
    assert (tmp_path / "count").read_text() == "asked\n" * 7
    run.claim_attempt({"job_id": "17"})
    assert not watch.is_over()
    assert watch._pause_s == 1


def test_slurm_is_asked_ever_less_often_while_it_does_not_answer(
    tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    put_answer(tmp_path, "squeue", errors="slurm_load_jobs error: Socket timed out\n", exit_code=1)
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    watch = RunWatch(run, {"PATH": str(tmp_path)}, _pause_s=50.0, _seen=(0, False))
    pauses = []
    for _ in range(3):
        watch._asked_s = -1000.0
        assert not watch.is_over()
        pauses.append(watch._pause_s)
    assert pauses == [100, 120, 120]
    said = "Slurm does not answer; asking again: exit code 1: slurm_load_jobs error: Socket timed out\n"
    assert capsys.readouterr().err == 3 * said


def test_job_that_never_starts_is_told_once(tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    put_answer(tmp_path, "squeue", f"17|17|PENDING|N/A|10:00|||PartitionTimeLimit|{run.path}/job")
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    watch = RunWatch(run, {"PATH": str(tmp_path)})
    for _ in range(2):
        watch._asked_s = -1000.0
        assert not watch.is_over()
    expected = (
        "job 17 never starts: PartitionTimeLimit: time_limit is above the partition's MaxTime\nto end it: scancel 17\n"
    )
    assert capsys.readouterr().err == expected


def tell(run: RunFolder) -> tuple[int, str]:
    """How the second attempt's submission is told to have ended."""
    out = io.StringIO()
    watch = RunWatch(run, {}, state=RunState("failed", "job 17 ended as FAILED (NonZeroExitCode)"))
    return tell_result(run, watch, 1, out), out.getvalue()


def test_finished_run_is_told_with_its_figures(run: RunFolder) -> None:
    write_json(run.summary, SUMMARY)
    expected = f"finished: test accuracy 0.9123, 30 epochs, 960 steps, 512 images/s, 61.2 s; {run.summary}\n"
    assert tell(run) == (0, expected)


@pytest.mark.parametrize(
    ("num_attempts", "verdict", "exit_code", "said"),
    [
        (
            2,
            {"outcome": "stopped", "reason": "stopped by SIGTERM, saved at step 40"},
            75,
            "stopped by SIGTERM, saved at step 40; to go on: {resume}",
        ),
        (
            2,
            {"outcome": "failed", "reason": "rank 1 on n1: ValueError"},
            1,
            "failed: rank 1 on n1: ValueError\nlog: {run}/logs/attempt_0002.log\nto go on: {resume}",
        ),
        (
            2,
            {"outcome": "failed", "reason": "rank 1 on n1: ValueError", "cause": "exception"},
            1,
            "failed: rank 1 on n1: ValueError\nlog: {run}/logs/attempt_0002.log\n"
            "once it is corrected: {resume} code=live",
        ),
        (
            1,
            {},
            1,
            "failed: no rank left a word (failed: job 17 ended as FAILED (NonZeroExitCode))\nlog: {run}/submitit\n"
            "to go on: {resume}",
        ),
    ],
    ids=["stopped", "failed", "exception", "no attempt"],
)
def test_unfinished_run_is_told_with_its_reason_and_the_way_on(
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    num_attempts: int,
    verdict: dict[str, str],
    exit_code: int,
    said: str,
) -> None:
    for _ in range(num_attempts):
        run.claim_attempt({})
    if verdict:
        write_json(run.verdict(num_attempts), verdict)
    assert tell(run) == (exit_code, "")
    resume = f"python -m cluster.submit --resume {run.path}"
    assert capsys.readouterr().err == said.format(resume=resume, run=run.path) + "\n"


def test_cancelled_run_is_not_told_how_to_go_on(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run.claim_attempt({})
    write_json(run.verdict(2), {"outcome": "stopped", "reason": "stopped by SIGTERM, saved at step 40"})
    write_json(run.cancel_mark, {})
    assert tell(run) == (75, "")
    said = "cancelled by its user: stopped by SIGTERM, saved at step 40; it stays ended\n"
    assert capsys.readouterr().err == said


FOLLOW = """
import dataclasses, os, sys
from pathlib import Path
from cluster.follow import follow
from cluster.runs import RunFolder
from tests.test_launch import make_plan
run = RunFolder(Path(sys.argv[1]))
plan = dataclasses.replace(make_plan("true"), cluster="slurm")
sys.exit(follow(run, plan, "17", os.environ, previous_attempt=0, show_log=False, quiet=False))
"""


def test_reader_who_leaves_leaves_the_job_alone_and_is_told_so(tmp_path: Path, run: RunFolder) -> None:
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    put_answer(tmp_path, "squeue", f"17|17|PENDING|N/A|10:00|||Resources|{run.path}/job\n")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed:
        done = subprocess.run(
            [sys.executable, "-c", FOLLOW, str(run.path)],
            env={**os.environ, "PATH": str(tmp_path)},
            cwd=REPOSITORY,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    expected = f"job 17 goes on; to end it: scancel 17; run folder: {run.path}\n"
    assert (done.returncode, done.stderr) == (130, expected)
