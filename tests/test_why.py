"""cluster.why: the first cause, Slurm's word and what to do in ten lines; why a job waits; what became of attempts."""

import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.attempts import Attempt
from cluster.causes import ADVICE, advise
from cluster.early_end import early_end
from cluster.reasons import explain
from cluster.requeue import POLICY
from cluster.runs import RunFolder, write_json
from cluster.slurm_word import by_accounting, by_controller, by_log, slurm_word
from cluster.why import answer
from tests.executables import put_answer
from tests.run_folders import answer_with, environment, make_run

# Recorded on Slurm 22.05.8: `scontrol show job`, its first lines.
SHOWN = """\
JobId=15 JobName=broken
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=1:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   Command=RUN/job.sbatch
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
  File "a.py", line 2, in g
    h()
E: x
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def why(environ: Mapping[str, str], *words: object) -> tuple[list[str], int]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = answer([*map(str, words)], environ)
    return [*out.getvalue().splitlines(), *errors.getvalue().splitlines()], code


def end(run: RunFolder, attempt: int, **verdict: Any) -> None:  # noqa: ANN401
    (run.attempts / f"{attempt:04d}").write_text(
        json.dumps({"job_id": run.run_id.removeprefix("run-00"), "host": "n1", "pid": 1})
    )
    said = {"attempt": attempt, "outcome": "failed", "cause": "exception", "reason": "rank 1 on n2: E: x", "rank": 1}
    write_json(run.verdict(attempt), {**said, "why": "", "action": "stop", "checkpoint_step": 7, **verdict})


def record(run: RunFolder, attempt: int, rank: int, exception: str = "E: x") -> None:
    said = {"rank": rank, "host": "n2", "step": 9, "exception": exception, "traceback": TRACEBACK}
    (run.failures / f"a{attempt:04d}_r{rank:05d}.json").write_text(json.dumps(said))


def test_failed_run_is_explained_in_ten_lines(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 15, "failed")
    put_answer(tmp_path / "bin", "scontrol", SHOWN.replace("RUN", str(run.path)))
    end(run, 1, action="restart")
    end(run, 2, why="2 failures since the last progress, requeue.max_failures is 1")
    record(run, 2, 0, "RuntimeError: gloo")
    record(run, 2, 1)
    run.attempt_log(2).touch()
    assert why(environ, "15") == (
        [
            "demo run-0015: failed, attempt 2",
            "why    rank 1 on n2: E: x",
            "           g()",
            '         File "a.py", line 2, in g',
            "           h()",
            "       E: x",
            "Slurm  job 15 is FAILED (NonZeroExitCode), exit code 1:0",
            "class  exception: an error of the program; 2 failures since the last progress, requeue.max_failures is 1",
            f"to do  correct it; then python -m cluster.submit --resume {run.path} code=live, since a run "
            "keeps its code; or submit it anew",
            f"see    {run.attempt_log(2)}",
        ],
        1,
    )


def test_attempts_before_the_last_are_told_where_there_is_room(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 15, "failed")
    for attempt, action in ((1, "restart"), (2, "restart"), (3, "stop")):
        end(run, attempt, cause="killed", reason="rank 0 was ended by a signal: Killed", rank=0, action=action)
    lines, code = why(environ, "15")
    assert (len(lines), code) == (8, 1)
    story = "job 15 on ?, step 0 to 7, failed: rank 0 was ended by a signal: Killed"
    assert lines[-3:] == [
        f"attempt 1: {story}; then restart",
        f"attempt 2: {story}; then restart",
        f"attempt 3: {story}",
    ]


def test_stacks_are_what_to_see_after_a_hang(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 15, "failed")
    end(run, 1, cause="hang", reason="rank 1 on n2: HangError: no answer")
    run.stacks_of(1).write_text("stacks")
    assert f"see    {run.stacks_of(1)}" in why(environ, "15")[0]


def test_object_has_the_whole_traceback_and_every_attempt(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 15, "failed")
    run.append_event("attempt_started", attempt=1, job_id="15", nodes=["n1", "n2"], world_size=4)
    end(run, 1)
    record(run, 1, 1)
    lines, code = why(environ, "15", "--json")
    assert json.loads(lines[0]) == {
        "run_dir": str(run.path),
        "run_id": "run-0015",
        "job_id": "15",
        "state": "failed",
        "cause": "rank 1 on n2: E: x",
        "class": "exception",
        "rank": 1,
        "node": None,
        "traceback": TRACEBACK.splitlines(),
        "slurm": "job 15 is no longer known",
        "never_starts": False,
        "to_do": f"correct it; then python -m cluster.submit --resume {run.path} code=live, since a run "
        "keeps its code; or submit it anew",
        "see": None,
        "attempts": [
            {
                "number": 1,
                "job_id": "15",
                "nodes": ["n1", "n2"],
                "from_step": 0,
                "to_step": 9,
                "outcome": "failed",
                "reason": "rank 1 on n2: E: x",
                "action": "stop",
            }
        ],
    }
    assert code == 1


@pytest.mark.parametrize(
    ("reason", "start", "kind", "to_do", "code"),
    [
        ("Priority", "2026-01-02T03:04:05", "that ends by itself; start expected at 2026-01-02 03:04", "", 0),
        ("BeginTime", "2026-01-02T03:04:05", "that ends by itself; may start at 2026-01-02 03:04", "", 0),
        ("Resources", "N/A", "that ends by itself", "", 0),
        ("JobHeldUser", "N/A", "that ends when you act", "scontrol release 16", 0),
        ("JobHeldAdmin", "N/A", "that ends when others act", "ask the administrators of the cluster", 0),
        (
            "PartitionTimeLimit",
            "N/A",
            "that does not end as the job and the cluster are now",
            "scancel 16, and ask for less, or for another partition (sinfo shows their limits)",
            1,
        ),
    ],
)
def test_waiting_run_says_why_and_whether_that_ends(
    tmp_path: Path, environ: dict[str, str], reason: str, start: str, kind: str, to_do: str, code: int
) -> None:
    run = make_run(tmp_path, environ, 16, "pending")
    answer_with(tmp_path, f"16|PENDING|{start}|1:00|||{reason}|{run.path}/s\n")
    lines = [
        "demo run-0016: pending",
        f"why    {reason}: {explain(reason).text}",
        "Slurm  job 16 is PENDING",
        f"class  {kind}",
        *([f"to do  {to_do}"] if to_do else []),
    ]
    assert why(environ, "16") == (lines, code)
    assert json.loads(why(environ, "16", "--json")[0][0])["class"] is None


def test_requeued_run_says_what_happened_and_why_it_waits(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 16, "training")
    said = "preempted (SIGTERM), saved at step 40"
    end(run, 1, outcome="stopped", cause="preempted", reason=said, action="requeue")
    answer_with(tmp_path, f"16|PENDING|N/A|1:00|||BeginTime|{run.path}/s\n")
    lines, code = why(environ, "16")
    assert (lines[0], lines[4], code) == ("demo run-0016: requeued, attempt 1", f"see    before that: {said}", 0)
    assert lines[5] == f"attempt 1: job 16 on ?, step 0 to 7, stopped: {said}; then requeue"


def test_finished_run_tells_its_story(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 17, "finished")
    said = "preempted (SIGTERM), saved at step 40"
    end(run, 1, outcome="stopped", cause="preempted", reason=said, action="requeue")
    end(run, 2, outcome="finished", cause="finished", reason="all steps done", action="leave")
    write_json(run.summary, {**run.read_json(run.summary), "attempts": 2})
    for number, nodes in ((1, ["n1", "n2"]), (2, [f"n{n}" for n in range(1, 17)])):
        run.append_event("attempt_started", attempt=number, job_id="17", nodes=nodes, world_size=2)
    run.append_event("stopped", attempt=1, job_id="17", step=40, signal="SIGTERM")
    run.append_event("resumed", attempt=2, job_id="17", from_step=40, lost_steps=0, last_beat="")
    run.append_event("finished", attempt=2, job_id="17", step=90, test_accuracy=0.5)
    assert why(environ, "17") == (
        [
            "demo run-0017: finished, attempt 2",
            f"attempt 1: job 17 on n1, n2, step 0 to 40, stopped: {said}; then requeue",
            "attempt 2: job 17 on 16 nodes (n1 ...), step 40 to 90, finished",
        ],
        0,
    )


def test_running_attempt_has_no_end_yet() -> None:
    attempt = Attempt(2, "17", ("n1",), 40, None, "running", "", "")
    assert attempt.text() == "attempt 2: job 17 on n1, step 40, running"


# Field report 27.
def test_job_without_any_log_says_where_slurm_looked_for_it(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 18, "pending")
    answer_with(tmp_path, f"18|FAILED|N/A|1:00|||NonZeroExitCode|{run.path}/s\n")
    no_log = f"it left no log, so Slurm could not start it or not open {run.logs}"
    assert why(environ, "18") == (
        [
            "demo run-0018: failed",
            f"why    job 18 ended as FAILED (NonZeroExitCode) before it had started any rank: {no_log}",
            "Slurm  job 18 is no longer known",
            f"to do  is {run.logs} on storage that the nodes see? then submit it anew",
        ],
        1,
    )


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("TIMEOUT", "time limit"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("NODE_FAIL", "node failure"),
        ("PREEMPTED", "preempted"),
        ("FAILED", "lost"),
    ],
)
def test_job_that_left_no_verdict_has_the_class_that_slurm_says(
    tmp_path: Path, environ: dict[str, str], state: str, kind: str
) -> None:
    run = make_run(tmp_path, environ, 18, "training")
    answer_with(tmp_path, f"18|{state}|N/A|1:00|||None|{run.path}/s\n")
    lines, code = why(environ, "18")
    assert lines[:5] == [
        "demo run-0018: failed, attempt 1",
        f"why    job 18 ended as {state}, and left no verdict",
        "Slurm  job 18 is no longer known",
        f"class  {kind}: {advise(kind).text}",
        f"to do  {advise(kind).to_do.replace('RUN_DIR', str(run.path))}",
    ]
    assert code == 1


def test_run_that_was_cancelled_for_good_is_not_to_be_resumed(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 18, "pending")
    run.cancel_mark.write_text("{}")
    lines, code = why(environ, "18")
    assert (lines[1], lines[-1], code) == (
        "why    by its user",
        "to do  submit it anew: cluster.cancel ends a run for good",
        1,
    )


def test_slurms_silence_is_told(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 16, "pending")
    put_answer(tmp_path / "bin", "squeue", errors="Unable to contact slurm controller\n", exit_code=1)
    lines, code = why(environ, "16")
    error = "exit code 1: Unable to contact slurm controller"
    assert (lines, code) == (
        [
            "demo run-0016: pending",
            "why    as of its submission",
            f"Slurm was not reached, and this is what the run folder says: {error}",
        ],
        4,
    )


def test_no_such_run_is_usage(environ: dict[str, str]) -> None:
    assert why(environ, "nobody")[1] == 2


def test_every_cause_of_the_policy_has_its_advice() -> None:
    assert set(ADVICE) == set(POLICY)
    assert advise("of a later release") == ADVICE["unknown"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        (
            "/tmp/x: line 3: cd: /nosuch: No such file or directory\n",
            "/tmp/x: line 3: cd: /nosuch: No such file or directory",
        ),
        (
            "submitit INFO\nsetup: line 2 of 3 (cd x) ended with exit code 1\nmore\n",
            "setup: line 2 of 3 (cd x) ended with exit code 1",
        ),
        ("2026-01-02T03:04:05.678Z super E n7 is unknown\n2026-01-02T03:04:05.678Z super I bye\n", "n7 is unknown"),
        ("slurmstepd-n1: error: execve(): No such file\nmore\n", "slurmstepd-n1: error: execve(): No such file"),
        ("[2026-01-02T03:04:05.678] error: execve(): x\nmore\n", "[2026-01-02T03:04:05.678] error: execve(): x"),
    ],
    ids=["nothing", "last line", "setup", "supervisor", "slurmstepd", "slurmstepd of 26.05"],
)
def test_early_end_is_told_by_the_newest_log(tmp_path: Path, environ: dict[str, str], log: str, expected: str) -> None:
    run = make_run(tmp_path, environ, 1, "pending")
    run.batch_log("0").write_text("old\n")
    os.utime(run.batch_log("0"), (0, 0))
    run.batch_log("1").write_text(log)
    assert early_end(run) == expected


def test_event_of_a_failing_setup_line_counts_most(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1, "pending")
    run.batch_log("1").write_text("something else\n")
    run.append_event("setup_failed", attempt=0, job_id="1", line="cd x", number=2, exit_code=1)
    assert early_end(run) == "setup: line 2 (cd x) ended with exit code 1"


def test_slurms_word_comes_from_who_knows_the_job_still(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 15, "failed")
    assert slurm_word("15", run, environ) == "job 15 is no longer known"
    put_answer(tmp_path / "bin", "sacct", "CANCELLED by 0|0:15\n")
    assert (
        by_accounting("15", environ)
        == slurm_word("15", run, environ)
        == "job 15 was CANCELLED, exit code 0:15 (accounting)"
    )
    put_answer(tmp_path / "bin", "scontrol", SHOWN.replace("RUN", str(run.path)))
    assert by_controller("15", run, environ) == "job 15 is FAILED (NonZeroExitCode), exit code 1:0"
    run.batch_log("15").write_text(
        "slurmstepd-n1: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-30T10:06:33 DUE TO TIME LIMIT, SEE SLURMCTLD LOG "
        "FOR DETAILS ***\nmore\n"
    )
    said = "JOB 15 ON n1 CANCELLED AT 2026-11-30T10:06:33 DUE TO TIME LIMIT"
    assert by_log("15", run) == said
    run.batch_log("15").write_text(f"[2026-11-30T10:06:33.678] error: *** {said} ***\nmore\n")  # 26.05
    assert by_log("15", run) == said
    assert slurm_word("15", run, environ) == f"job 15 is FAILED (NonZeroExitCode), exit code 1:0; its log: {said}"
