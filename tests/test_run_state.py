"""Where a run stands: what its folder, squeue and accounting say together, and the folder alone when Slurm is away."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.facts import Submission, read_facts, submissions_of
from cluster.queue import QueueJob
from cluster.reasons import explain
from cluster.run_state import RunState, judge
from cluster.runs import RunFolder, write_json

RUN_ID = "20260102-030405-0a1b"
JOB = QueueJob("17", "RUNNING", "", "2026-01-02T03:05:00.000Z", 600, "n[1-2]", "", f"/runs/{RUN_ID}/job.sh")
VERDICT = {"attempt": 1, "job_id": "17", "outcome": "failed", "cause": "exception", "reason": "rank 1: boom", "why": ""}
STOPPED = {"outcome": "stopped", "cause": "preempted", "reason": "preempted (SIGTERM), saved at step 40"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / RUN_ID)
    folder.make()
    folder.append_event("submitted", attempt=0, job_id="17", route="slurm")
    return folder


def begin(run: RunFolder, job_id: str = "17", **beat: Any) -> None:  # noqa: ANN401
    """A claimed attempt, with a heartbeat where there is something to say."""
    attempt = run.claim_attempt({"job_id": job_id, "host": socket.gethostname(), "pid": 2**22})
    if beat:
        write_json(run.heartbeat, {"attempt": attempt, "step": 3, "total_steps": 9, **beat})


def end(run: RunFolder, **verdict: Any) -> None:  # noqa: ANN401
    write_json(run.verdict(run.latest_attempt()), VERDICT | {"action": "stop"} | verdict)


def state(run: RunFolder, *jobs: QueueJob, **ends: str) -> tuple[str, str, str]:
    """State, reason and source, Slurm having answered."""
    found = judge(
        read_facts(run), {job.job_id: job for job in jobs}, {name.strip("_"): end for name, end in ends.items()}
    )
    return found.word, found.because, found.source


def state_without_slurm(run: RunFolder) -> tuple[str, str, str]:
    found = judge(read_facts(run), None, {})
    return found.word, found.because, found.source


def pending(reason: str) -> QueueJob:
    return replace(JOB, state="PENDING", reason=reason, nodes="")


def test_finished_run_needs_nobody(run: RunFolder) -> None:
    write_json(run.summary, {"attempts": 2})
    assert state(run) == state_without_slurm(run) == ("finished", "", "run folder")


@pytest.mark.parametrize("reason", ["Priority", "PartitionTimeLimit", "JobHeldUser"])
def test_waiting_job_that_has_not_begun_is_pending_with_slurms_reason(run: RunFolder, reason: str) -> None:
    assert state(run, pending(reason)) == ("pending", f"{reason}: {explain(reason).text}", "squeue")
    found = judge(read_facts(run), {"17": pending(reason)}, {})
    assert found.never_starts == (reason == "PartitionTimeLimit")


def test_job_whose_dependency_is_never_satisfied_has_failed(run: RunFolder) -> None:  # field report 30
    found = judge(read_facts(run), {"17": pending("DependencyNeverSatisfied")}, {})
    assert (found.word, found.is_over, found.never_starts) == ("failed", True, True)


def test_waiting_job_that_has_begun_before_is_requeued(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run, action="requeue", **STOPPED)
    assert state(run, pending("BeginTime"))[0] == "requeued"


def test_run_that_was_submitted_again_by_hand_is_pending(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run)
    time.sleep(0.002)
    run.append_event("submitted", attempt=1, job_id="18", route="slurm")
    assert state(run, replace(pending("Priority"), job_id="18"))[0] == "pending"


@pytest.mark.parametrize(
    ("beat", "word"),
    [
        ({}, "starting"),
        ({"phase": "starting"}, "starting"),
        ({"phase": "training"}, "training"),
        ({"phase": "saving"}, "saving"),
        ({"phase": "evaluating"}, "training"),
        ({"phase": "finished"}, "training"),
    ],
)
def test_running_job_is_where_its_heartbeat_says(run: RunFolder, beat: dict[str, str], word: str) -> None:
    begin(run, **beat)
    assert state(run, JOB) == (word, "", "squeue")


def test_heartbeat_of_an_earlier_attempt_says_nothing(run: RunFolder) -> None:
    begin(run, phase="training")
    begin(run)
    assert state(run, JOB) == ("starting", "", "squeue")


def test_silence_of_a_running_job_is_told(run: RunFolder) -> None:
    begin(run, phase="training")
    long_ago = time.time() - 310
    os.utime(run.heartbeat, (long_ago, long_ago))
    assert state(run, JOB) == ("training", "no sign of life for 5 min", "squeue")


def test_ranks_that_start_again_are_starting(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run, action="restart")
    assert state(run, JOB) == ("starting", "again after attempt 1: rank 1: boom", "squeue")


def test_suspended_job_says_so(run: RunFolder) -> None:
    begin(run, phase="training")
    assert state(run, replace(JOB, state="SUSPENDED")) == ("training", "the job is SUSPENDED", "squeue")


ENDS = pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ({}, ("failed", "rank 1: boom")),
        ({"why": "no progress"}, ("failed", "rank 1: boom (no progress)")),
        ({"action": "leave", "outcome": "stopped", "cause": "stopped", "reason": "saved"}, ("stopped", "saved")),
        ({"action": "leave", "outcome": "stopped", "cause": "user cancel", "reason": "saved"}, ("cancelled", "saved")),
        ({"action": "leave", "cause": "usage", "reason": "no data"}, ("failed", "no data")),
    ],
    ids=["failed", "why", "stopped", "cancelled", "usage"],
)


@ENDS
def test_run_has_ended_as_its_verdict_says(run: RunFolder, verdict: dict[str, str], expected: tuple[str, str]) -> None:
    begin(run, phase="training")
    end(run, **verdict)
    assert state(run, replace(JOB, state="FAILED", reason="NonZeroExitCode")) == (*expected, "squeue")
    assert state(run) == (*expected, "run folder")
    assert state_without_slurm(run) == (*expected, "run folder")
    assert state(run, replace(JOB, state="COMPLETING")) == (*expected, "squeue")


# Field report 24: a preempted run is requeued while its job is listed, and has ended when it no longer is.
def test_preempted_run_is_requeued_while_its_job_is_in_the_queue(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run, action="leave", **STOPPED)
    assert state(run, replace(JOB, state="COMPLETING"))[0] == "requeued"
    assert state(run, pending("BeginTime"))[0] == "requeued"
    assert state_without_slurm(run)[0] == "requeued"


def test_preempted_run_whose_job_is_gone_is_stopped(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run, action="leave", **STOPPED)
    because = f"{STOPPED['reason']}; job 17 ended as PREEMPTED, and no job of the run waits"
    assert state(run, replace(JOB, state="PREEMPTED")) == ("stopped", because, "squeue")
    assert state(run, _17="PREEMPTED") == ("stopped", because, "sacct")
    gone = f"{STOPPED['reason']}; job 17 is gone, and no job of the run waits"
    assert state(run) == ("stopped", gone, "run folder")


def test_requeued_job_that_was_cancelled_in_the_queue_is_cancelled(run: RunFolder) -> None:
    begin(run, phase="training")
    end(run, action="requeue", **STOPPED)
    assert state(run, replace(JOB, state="CANCELLED"))[0] == "cancelled"


@pytest.mark.parametrize("has_begun", [True, False])
def test_job_that_its_user_stopped_in_the_queue_is_stopped_and_can_go_on(run: RunFolder, has_begun: bool) -> None:
    write_json(run.stop_mark, {"requeue": False})
    if has_begun:
        begin(run, phase="training")
        end(run, action="requeue", **STOPPED)
    assert state(run, replace(JOB, state="CANCELLED"))[0] == "stopped"


# Field reports 27 and 28: jobs that end without a word of ours.
@pytest.mark.parametrize(
    ("job", "word", "because"),
    [
        ("CANCELLED", "cancelled", "job 17 ended as CANCELLED before it began"),
        (
            "FAILED",
            "failed",
            "job 17 ended as FAILED before it had started any rank: NO LOG",
        ),
        (
            "",
            "failed",
            "job 17 is gone before it had started any rank: NO LOG",
        ),
    ],
)
def test_job_that_ended_before_any_rank(run: RunFolder, job: str, word: str, because: str) -> None:
    jobs = [replace(JOB, state=job)] if job else []
    no_log = f"it left no log, so Slurm could not start it or not open {run.logs}"
    assert state(run, *jobs)[:2] == (word, because.replace("NO LOG", no_log))


@pytest.mark.parametrize("ended", ["COMPLETED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL"])
def test_job_that_ended_without_a_verdict_has_failed_whatever_slurm_calls_it(run: RunFolder, ended: str) -> None:
    begin(run, phase="training")
    expected = ("failed", f"job 17 ended as {ended}, and left no verdict", "squeue")
    assert state(run, replace(JOB, state=ended)) == expected


def test_mark_of_a_cancel_counts_at_once(run: RunFolder) -> None:
    begin(run, phase="training")
    run.cancel_mark.write_text("{}")
    assert state(run, JOB)[0] == state(run)[0] == state_without_slurm(run)[0] == "cancelled"
    still = ("cancelled", "by its user; to take its job away: scancel 17", "squeue")
    assert state(run, pending("Priority")) == still


# Field report 22: no answer is no absence.
def test_run_is_as_its_folder_says_while_slurm_does_not_answer(run: RunFolder) -> None:
    assert state_without_slurm(run) == ("pending", "as of its submission", "run folder")
    begin(run)
    assert state_without_slurm(run) == ("starting", "", "run folder")
    write_json(run.heartbeat, {"attempt": 1, "phase": "saving"})
    assert state_without_slurm(run) == ("saving", "", "run folder")
    end(run, action="restart")
    assert state_without_slurm(run)[0] == "starting"
    end(run, action="requeue", **STOPPED)
    assert state_without_slurm(run) == ("requeued", STOPPED["reason"], "run folder")


def test_end_of_a_job_is_kept_in_slurms_word(run: RunFolder) -> None:
    assert judge(read_facts(run), {"17": replace(JOB, state="TIMEOUT")}, {}).ended_as == "TIMEOUT"
    assert judge(read_facts(run), {}, {"17": "NODE_FAIL"}).ended_as == "NODE_FAIL"
    assert judge(read_facts(run), {}, {}).ended_as == ""


def test_job_of_the_same_number_that_is_not_ours_is_not_taken_for_it(run: RunFolder) -> None:
    stranger = replace(JOB, command="/home/other/train.sh")
    assert state(run, stranger)[0] == "failed"


def test_job_of_a_raw_run_is_known_by_its_number(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "demo" / "17")
    run.make()
    run.append_event("submitted", attempt=0, job_id="17", route="sbatch")
    assert state(run, replace(JOB, command="/home/me/sbatch/ddp.sbatch"))[0] == "starting"


def chain(run: RunFolder) -> None:
    run.append_event("submitted", attempt=1, job_id="18", route="successor")
    run.append_event("submitted", attempt=1, job_id="19", route="successor")


def test_job_of_a_submission_that_was_cut_short_is_known_by_its_script(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "demo" / RUN_ID)
    run.make()
    run.append_event("submitting", attempt=0, job_id="", route="slurm")
    other = replace(JOB, job_id="18", command="/runs/20260102-030405-ffff/job.sh")
    assert state(run, pending("Priority"), other)[0] == "pending"
    assert state(run, other)[:2] == ("failed", "its submission was cut short, and Slurm has no job of it")
    assert state_without_slurm(run)[:2] == ("pending", "as of its submission")


def test_of_a_chain_the_newest_job_that_has_started_counts(run: RunFolder) -> None:
    begin(run, "18", phase="training")
    chain(run)
    jobs = [replace(JOB, state="PREEMPTED"), replace(JOB, job_id="18"), replace(pending("Dependency"), job_id="19")]
    found = judge(read_facts(run), {job.job_id: job for job in jobs}, {})
    assert found == RunState("training", "", "squeue", "18", jobs[1], ("19",))


def test_successor_that_waits_alone_is_a_requeued_run(run: RunFolder) -> None:
    begin(run, phase="training")
    chain(run)
    jobs = [replace(JOB, state="PREEMPTED"), replace(pending("Priority"), job_id="18")]
    assert state(run, *jobs)[0] == "requeued"


def test_submissions_are_those_since_the_last_one_by_hand() -> None:
    lines = [{"job_id": job, "route": route} for job, route in (("1", "slurm"), ("2", "successor"), ("3", "slurm"))]
    assert submissions_of(lines) == (Submission("3", "slurm", ""),)
    assert submissions_of(lines[:2]) == (Submission("1", "slurm", ""), Submission("2", "successor", ""))


def local_run(folder: Path, route: str) -> RunFolder:
    run = RunFolder(folder / "demo" / "local")
    run.make()
    run.append_event("submitted", attempt=0, job_id=str(2**22), route=route)
    return run


@pytest.mark.parametrize("route", ["local", "direct"])
def test_local_run_is_where_its_process_is(tmp_path: Path, start_supervisor: Callable[[Path], Any], route: str) -> None:
    run = local_run(tmp_path, route)
    process = start_supervisor(run.path)
    run.claim_attempt({"job_id": "1", "host": socket.gethostname(), "pid": process.pid})
    assert state(run) == ("starting", "", "process")
    write_json(run.heartbeat, {"attempt": 1, "phase": "training"})
    assert state(run) == ("training", "", "process")
    process.kill()
    process.wait()
    assert state(run) == ("failed", "its process has ended", "run folder")
    run.append_event("stopped", attempt=1, job_id="1", step=40, signal="SIGTERM")
    assert state(run) == ("stopped", "SIGTERM, saved at step 40", "run folder")


def test_local_run_that_was_submitted_again_is_starting_before_its_first_claim(tmp_path: Path) -> None:
    run = local_run(tmp_path, "local")
    begin(run, phase="training")
    end(run)
    time.sleep(0.002)
    controller = subprocess.Popen([sys.executable, "-c", "input()", str(run.submitit)], stdin=subprocess.PIPE)
    run.append_event("submitted", attempt=1, job_id=str(controller.pid), route="local")
    while str(run.submitit).encode() not in Path(f"/proc/{controller.pid}/cmdline").read_bytes():
        pass  # between fork and exec it has our command line
    assert state(run) == ("starting", "", "process")
    controller.communicate(b"\n")
    assert state(run) == ("failed", "its process has ended", "run folder")


def test_failure_of_a_run_without_a_supervisor_is_told_by_its_first_record(tmp_path: Path) -> None:
    run = local_run(tmp_path, "direct")
    begin(run)
    for rank, moment in ((0, "2026-01-02T03:04:06.000Z"), (1, "2026-01-02T03:04:05.000Z")):
        write_json(run.failures / f"a0001_r{rank:05d}.json", {"rank": rank, "time": moment, "exception": f"E: {rank}"})
    assert state(run) == ("failed", "rank 1: E: 1", "run folder")


def test_local_run_of_another_machine_is_alive_while_its_heart_beats(tmp_path: Path) -> None:
    run = local_run(tmp_path, "local")
    run.claim_attempt({"job_id": "1", "host": "elsewhere", "pid": 1})
    write_json(run.heartbeat, {"attempt": 1, "phase": "training"})
    assert state(run) == ("training", "", "run folder")
    os.utime(run.heartbeat, (0, 0))
    assert state(run) == ("failed", "its process has ended; it ran on elsewhere: ask there", "run folder")
