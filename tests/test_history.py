"""History: what an attempt left behind, what is written about its end, and what the policy reads of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.history import Verdicts, gather
from cluster.identity import RunJob
from cluster.job import Job
from cluster.job_end import JobRecord
from cluster.launch import RanksEnd
from cluster.requeue import Decision, Past
from cluster.runs import RunFolder, write_json
from cluster.signals import StopFlag
from cluster.verdict import Evidence, Verdict
from tests.executables import put_answer
from tests.test_job_end import shown
from tests.test_launch import make_plan

END = RanksEnd({0: 75, 1: 75})
LOCAL_JOB = Job(RunJob("17", Path("/runs/demo/a")), is_on_slurm=False, environ={})
KILLED = Verdict("failed", "killed", "rank 1 was ended by a signal: SIGKILL", 1, 1)
STOPPED = Verdict("stopped", "stopped", "stopped (SIGTERM), saved at step 40", 75)


@dataclass
class Ended:
    """Ranks that are gone."""

    def is_over(self) -> bool:
        return True

    def ask_to_stop(self) -> None:
        raise AssertionError("nobody is left")

    def end(self) -> RanksEnd:
        return END


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / "a")
    folder.make()
    return folder


def events(run: RunFolder) -> list[dict[str, Any]]:
    """The events without their times."""
    return [{key: value for key, value in event.items() if key != "time"} for event in run.read_events()]


def test_evidence_is_of_one_attempt_and_leaves_out_a_record_that_a_kill_cut_short(run: RunFolder) -> None:
    for name, text in (("a0001_r00000", '{"rank": 0}'), ("a0002_r00000", '{"ra'), ("a0002_r00001", '{"rank": 1}')):
        (run.failures / f"{name}.json").write_text(text)
    for attempt, step in ((1, 20), (2, 40)):
        run.append_event("stopped", attempt=attempt, job_id="17", step=step, signal="SIGTERM")
    found = gather(run, make_plan("true"), 2, Ended(), StopFlag(), LOCAL_JOB)
    assert found.maybe_stop is not None
    assert found.maybe_stop["step"] == 40
    assert found == Evidence(
        is_finished=False, maybe_stop=found.maybe_stop, failures=[{"rank": 1}], end=END, lead_s=120
    )


def leave_mark(run: RunFolder, stop: StopFlag) -> None:
    write_json(run.stop_mark, {"requeue": False})


def press_ctrl_c(run: RunFolder, stop: StopFlag) -> None:
    stop.first_s[2] = 0.0


def send_term(run: RunFolder, stop: StopFlag) -> None:
    stop.first_s[15] = 0.0


@pytest.mark.parametrize(("ask", "by_user"), [(leave_mark, True), (press_ctrl_c, True), (send_term, False)])
def test_mark_and_ctrl_c_are_the_users_and_term_is_not(
    run: RunFolder, ask: Callable[[RunFolder, StopFlag], None], by_user: bool
) -> None:
    stop = StopFlag()
    ask(run, stop)
    assert gather(run, make_plan("true"), 1, Ended(), stop, LOCAL_JOB).asked_by_user is by_user


def test_finished_run_and_slurms_words_are_part_of_the_evidence(run: RunFolder, tmp_path: Path) -> None:
    write_json(run.summary, {})
    (tmp_path / "log").write_text("slurmstepd: error\n")
    put_answer(tmp_path / "bin", "scontrol", shown())
    environ = {"PATH": str(tmp_path / "bin")}
    job = Job(RunJob("17", Path("/runs/demo/a")), is_on_slurm=True, environ=environ, maybe_error_path=tmp_path / "log")
    record = JobRecord("RUNNING", "None", is_preempted=False, is_requeued=False, time_left_s=590)
    assert gather(run, make_plan("true"), 1, Ended(), StopFlag(), job) == Evidence(
        is_finished=True,
        maybe_stop=None,
        failures=[],
        end=END,
        maybe_job=record,
        job_lines=("slurmstepd: error",),
        time_left_s=590,
        lead_s=120,
        is_on_slurm=True,
    )


def test_verdict_holds_the_end_its_cause_and_what_was_done(run: RunFolder) -> None:
    Verdicts(run).record(KILLED, Decision("restart", "for a reason"), Past("killed", 40), 1, "17")
    verdict = json.loads(run.verdict(1).read_text())
    assert verdict.pop("time")[-1] == "Z"
    assert verdict == {
        "format_version": 1,
        "attempt": 1,
        "job_id": "17",
        "outcome": "failed",
        "cause": "killed",
        "reason": "rank 1 was ended by a signal: SIGKILL",
        "rank": 1,
        "node": None,
        "nodes": [],
        "exit_code": 1,
        "action": "restart",
        "why": "for a reason",
        "checkpoint_step": 40,
    }


def test_events_of_an_end_are_those_that_rank_0_could_not_write(run: RunFolder) -> None:
    Verdicts(run).record(STOPPED, Decision("leave"), Past("stopped", 40), 1, "17")
    assert events(run) == []  # rank 0 has said it
    Verdicts(run).record(KILLED, Decision("restart"), Past("killed", 40), 2, "17")
    failed = {"attempt": 2, "job_id": "17", "cause": "killed"}
    assert events(run) == [
        {"event": "attempt_failed", **failed, "rank": 1, "reason": "rank 1 was ended by a signal: SIGKILL"},
        {"event": "restarted", **failed},
    ]


def test_history_is_read_from_the_verdicts_and_one_that_is_missing_is_lost(run: RunFolder) -> None:
    Verdicts(run).record(STOPPED, Decision("leave"), Past("preempted", 20), 1, "17")
    Verdicts(run).record(KILLED, Decision("restart"), Past("killed", 40), 3, "17")
    assert Verdicts(run).read(3) == [Past("stopped", 20), Past("lost", 0), Past("killed", 40)]
    assert Verdicts(run).read(0) == []


def test_lost_attempt_gets_a_verdict_with_its_own_job_and_the_newest_checkpoint(run: RunFolder) -> None:
    run.claim_attempt({"job_id": "16"})
    run.claim_attempt({"job_id": "17"})
    Verdicts(run).record(STOPPED, Decision("leave"), Past("stopped", 20), 1, "16")
    before = run.verdict(1).read_bytes()
    for step in (20, 40):
        write_json(run.checkpoints / f"step_{step:08d}.json", {})
    Verdicts(run).note_lost()
    Verdicts(run).note_lost()  # once is enough
    assert run.verdict(1).read_bytes() == before
    assert Verdicts(run).read(2) == [Past("stopped", 20), Past("lost", 40)]
    lost = json.loads(run.verdict(2).read_text())
    assert (lost["job_id"], lost["outcome"], lost["action"]) == ("17", "failed", "leave")
    assert events(run) == [
        {
            "event": "attempt_failed",
            "attempt": 2,
            "job_id": "17",
            "cause": "lost",
            "rank": None,
            "reason": "it left no verdict: its node or its supervisor died",
        }
    ]


def test_verdict_that_a_full_disk_refuses_is_logged_and_written_by_the_next_supervisor(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    run.claim_attempt({"job_id": "17"})
    run.verdict(1).mkdir()  # refuses the rename as root's full disk does the write
    verdicts = Verdicts(run)
    verdicts.record(KILLED, Decision("requeue", "for a reason"), Past("killed", 40), 1, "17")
    assert verdicts.read(1) == [Past("killed", 40)]
    (said,) = [record.getMessage() for record in caplog.records if "not written" in record.getMessage()]
    run.batch_log("17").write_text(f"noise\n2026-01-02T03:04:05.678Z super E {said}\n")
    run.verdict(1).rmdir()
    Verdicts(run).note_lost()
    kept = json.loads(run.verdict(1).read_text())
    assert (kept["cause"], kept["reason"], kept["action"], kept["checkpoint_step"]) == (
        "killed",
        "rank 1 was ended by a signal: SIGKILL",
        "requeue",
        40,
    )
    assert [event["event"] for event in run.read_events()] == ["attempt_failed"]


def test_verdict_that_could_not_be_written_is_written_when_the_ranks_start_again(run: RunFolder) -> None:
    run.claim_attempt({"job_id": "17"})
    run.verdict(1).mkdir()
    verdicts = Verdicts(run)
    verdicts.record(KILLED, Decision("restart"), Past("killed", 40), 1, "17")
    run.verdict(1).rmdir()
    verdicts.note_lost()
    assert (json.loads(run.verdict(1).read_text())["cause"], verdicts.unwritten) == ("killed", {})
