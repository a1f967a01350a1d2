"""Following a run: what is shown of it, and who counts as alive."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.follow import LocalWatch, LogCopy, OccasionalLines, SlurmWatch, is_running, progress_text, tell_result
from cluster.runs import RunFolder, write_json
from tests.executables import put_answer

BEAT = {"phase": "training", "step": 120, "total_steps": 960, "steps_per_epoch": 32, "global_batch": 64}
SUMMARY = {"test_accuracy": 0.91234, "epochs": 30, "steps": 960, "images_per_s": 512.4, "wall_s": 61.25}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / "a")
    folder.make()
    return folder


@pytest.mark.parametrize(
    ("beat", "text"),
    [
        (
            BEAT | {"loss": 1.2341, "accuracy": 0.65, "images_per_s": 512.4},
            "training: step 120/960, epoch 4/30, loss 1.234, accuracy 0.6500, 512 images/s, 1:44 left",
        ),
        (BEAT, "training: step 120/960, epoch 4/30"),
        (BEAT | {"step": 0, "phase": "saving"}, "saving: step 0/960, epoch 1/30"),
        (BEAT | {"step": 960, "phase": "evaluating"}, "evaluating: step 960/960, epoch 30/30"),
        (BEAT | {"step": 33, "total_steps": 40}, "training: step 33/40, epoch 2/2"),
        (BEAT | {"images_per_s": 0.0}, "training: step 120/960, epoch 4/30"),
        ({"phase": "starting", "step": 0}, "starting: step 0/0, epoch 0/0"),
    ],
    ids=[
        "all",
        "no figures yet",
        "first step",
        "last step",
        "part of an epoch",
        "very slow",
        "before the length is known",
    ],
)
def test_progress_is_one_line(beat: dict[str, Any], text: str) -> None:
    assert progress_text(beat) == text


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
        ("PENDING|Resources||10:00\n", 0, False, "PENDING (Resources)"),
        ("RUNNING|None|n1|9:00\n", 0, False, "RUNNING"),
        ("TIMEOUT|TimeLimit|n1|0:00\n", 0, True, "TIMEOUT (TimeLimit)"),
        ("", 0, True, "gone"),
        ("", 1, False, "PENDING"),
    ],
    ids=["waiting", "running", "ended", "forgotten", "no answer"],
)
def test_slurm_job_is_over_only_when_slurm_says_so(
    tmp_path: Path, run: RunFolder, answer: str, exit_code: int, over: bool, waits_for: str
) -> None:
    put_answer(tmp_path, "squeue", answer, "Socket timed out\n" * exit_code, exit_code)
    watch = SlurmWatch(run, "17", {"PATH": str(tmp_path)}, _asked_s=-1000.0)
    assert (watch.is_over(), watch.waits_for()) == (over, waits_for)


def test_finished_run_is_over_whatever_slurm_says(tmp_path: Path, run: RunFolder) -> None:
    run.summary.write_text("{}")
    assert SlurmWatch(run, "17", {"PATH": str(tmp_path)}).is_over()


def test_log_is_copied_once_from_the_first_new_attempt_on(run: RunFolder) -> None:
    out = io.StringIO()
    copy = LogCopy(run, previous_attempt=1, out=out)
    for text in ("old\n", "one\n", "two\n"):
        run.attempt_log(run.claim_attempt({})).write_text(text)
    copy.copy()
    with run.attempt_log(3).open("a") as log:
        log.write("three\n")
    copy.copy()
    assert out.getvalue() == "one\ntwo\nthree\n"


def test_line_without_a_terminal_is_printed_when_it_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    say = OccasionalLines(last_s=-1000.0)
    say("one")
    say("two")  # too soon
    say.last_s = time.monotonic() - 1000.0
    say("one")
    say("three")
    assert capsys.readouterr().out == "one\nthree\n"


def tell(run: RunFolder) -> tuple[int, str]:
    """How the second attempt's submission is told to have ended."""
    out = io.StringIO()
    watch = SlurmWatch(run, "17", {}, state="FAILED", reason="NonZeroExitCode")
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
            1,
            {},
            1,
            "failed: no rank left a word (job: FAILED (NonZeroExitCode))\nlog: {run}/submitit\nto go on: {resume}",
        ),
    ],
    ids=["stopped", "failed", "no attempt"],
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
