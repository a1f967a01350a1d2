"""How Slurm ends a job: what scontrol shows and slurmstepd writes, recorded on 22.05.8, 24.11.5 and 26.05.5."""

import pytest

from cluster.job_end import STEPD, JobRecord, maybe_job_cause, maybe_said, read_record

RUNNING = JobRecord("RUNNING", "None", is_preempted=False, is_requeued=False)
PREEMPTION = "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-12-01T03:59:46 DUE TO PREEMPTION ***"
CANCELLED = "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-12-01T03:59:36 ***"
NODE_FAILURE = (
    "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-12-01T04:00:47 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR "
    "DETAILS ***"
)


def shown(
    state: str = "RUNNING",
    reason: str = "None",
    *,
    restarts: int = 0,
    preempted: str = "   PreemptEligibleTime=2026-12-01T04:09:43 PreemptTime=None\n",
    limit: str = "00:10:00",
    name: str = "demo",
) -> str:
    """`scontrol show job`; the lines that are read are alike on the three releases."""
    return (
        f"JobId=5 JobName={name}\n   UserId=root(0) GroupId=root(0) MCS_label=N/A\n"
        f"   Priority=1 Nice=0 Account=(null) QOS=(null)\n   JobState={state} Reason={reason} Dependency=(null)\n"
        f"   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0\n"
        f"   RunTime=00:00:10 TimeLimit={limit} TimeMin=N/A\n"
        f"   StartTime=2026-12-01T04:09:43 EndTime=2026-12-01T04:09:45 Deadline=N/A\n{preempted}"
        "   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-12-01T04:09:43 Scheduler=Backfill\n"
    )


PREEMPTED = "   PreemptEligibleTime=2026-12-01T04:09:52 PreemptTime=2026-12-01T04:09:55\n"


@pytest.mark.parametrize(
    ("text", "restart_count", "record"),
    [
        (shown(), 0, JobRecord("RUNNING", "None", False, False, 590)),
        (shown(preempted=PREEMPTED), 0, JobRecord("RUNNING", "None", True, False, 590)),
        (shown("COMPLETING", restarts=1, preempted=""), 0, JobRecord("COMPLETING", "None", False, True, 590)),
        (shown("COMPLETING", restarts=1), 1, JobRecord("COMPLETING", "None", False, False, 590)),
        (shown("COMPLETING", "TimeLimit", limit="00:00:01"), 0, JobRecord("COMPLETING", "TimeLimit", False, False, -9)),
        (shown(limit="UNLIMITED"), 0, JobRecord("RUNNING", "None", False, False, None)),
        (shown(name="JobState=FAILED Reason=x "), 0, JobRecord("RUNNING", "None", False, False, 590)),
        ("No job steps\n", 0, None),
    ],
    ids=["running", "in grace", "requeued", "cancelled", "time limit", "no limit", "a name like a field", "no job"],
)
def test_record_is_read_from_what_scontrol_shows(text: str, restart_count: int, record: JobRecord | None) -> None:
    assert read_record(text, restart_count) == record


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (shown(), None),
        (shown(preempted=PREEMPTED), "preempted"),
        (shown("COMPLETING", preempted=PREEMPTED), "preempted"),
        (shown("PREEMPTED", preempted=PREEMPTED), "preempted"),
        (shown("COMPLETING"), "user cancel"),
        (shown("CANCELLED"), "user cancel"),  # of salloc
        (shown("COMPLETING", "TimeLimit"), "time limit"),
        (shown("TIMEOUT", "TimeLimit"), "time limit"),
        (shown("COMPLETING", "NodeDown"), "node failure"),
        (shown("COMPLETING", restarts=1, preempted=""), "requeued"),
        (shown("COMPLETING", "job_requeued_in_held_state", restarts=1, preempted=""), "requeued"),
        (shown("COMPLETING", "AssocGrpCPUMinutesLimit"), None),  # whatever it is, it is no scancel
        (shown("SUSPENDED"), None),
    ],
)
def test_record_alone_tells_the_cause(text: str, cause: str | None) -> None:
    assert maybe_job_cause(read_record(text, 0), ()) == cause


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        (shown("COMPLETING", restarts=1, preempted=""), PREEMPTION, "preempted"),
        (shown("COMPLETING", restarts=1, preempted=""), NODE_FAILURE, "node failure"),
        (shown("COMPLETING", restarts=1, preempted=""), CANCELLED, "requeued"),
        (
            shown("COMPLETING", "AssocGrpCPUMinutesLimit"),
            CANCELLED.replace(" ***", " DUE TO TIME LIMIT ***"),
            "time limit",
        ),
        (shown("COMPLETING", "TimeLimit"), CANCELLED, "time limit"),
        (shown(), CANCELLED, None),  # scancel --full --signal=TERM
        (shown(preempted=PREEMPTED), CANCELLED, "preempted"),
    ],
)
def test_log_decides_only_what_the_record_leaves_open(text: str, line: str, cause: str | None) -> None:
    assert maybe_job_cause(read_record(text, 0), (line,)) == cause


@pytest.mark.parametrize("head", ["slurmstepd-n1: error: ", "[2026-12-01T04:01:40.824] error: ", "slurmstepd: error: "])
@pytest.mark.parametrize(
    ("sentence", "cause"),
    [
        ("CANCELLED AT 2026-12-01T04:01:40 ***", "user cancel"),
        ("CANCELLED AT 2026-12-01T04:01:40 DUE to SIGNAL Terminated ***", "user cancel"),  # 26.05
        ("CANCELLED AT 2026-12-01T04:01:40 DUE to SIGNAL Killed ***", "user cancel"),
        ("CANCELLED AT 2026-12-01T04:01:51 DUE TO PREEMPTION ***", "preempted"),
        ("CANCELLED AT 2026-12-01T04:05:07 DUE TO TIME LIMIT ***", "time limit"),
        ("CANCELLED AT 2026-12-01T04:02:54 DUE TO JOB REQUEUE ***", "requeued"),
        ("CANCELLED AT 2026-12-01T04:03:14 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "node failure"),
    ],
)
def test_sentence_of_each_release_tells_the_cause_where_the_controller_is_silent(
    head: str, sentence: str, cause: str
) -> None:
    step = f"{head}*** STEP 5.0 ON n1 CANCELLED AT 2026-12-01T04:01:40 ***"
    assert maybe_job_cause(None, (f"{head}*** JOB 5 ON n1 {sentence}", step)) == cause
    assert maybe_said((step,)) is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("slurmstepd-n1: error: Exceeded job memory limit", "Exceeded job memory limit"),
        ("slurmstepd: error: execve(): x", "execve(): x"),
        ("[2026-12-01T04:01:40.824] error: execve(): x", "execve(): x"),
        ("[2026-12-01T04:01:40.824] slurmstepd-n1: error: x", "x"),
        ("srun: error: n2: task 1: Killed", None),
        ("error: of a program", None),
        ("2026-12-01T04:01:40.824Z super E error: x", None),
    ],
)
def test_lines_of_slurmstepd_are_known_by_their_head(line: str, text: str | None) -> None:
    head = STEPD.match(line)
    assert (None if head is None else line[head.end() :]) == text
