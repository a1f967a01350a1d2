"""Verdicts: srun's lines as Slurm 22.05.8 prints them, and records as failing ranks leave them."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from cluster.job_end import JobRecord
from cluster.launch import RanksEnd
from cluster.verdict import Evidence, Verdict, judge

TERMINATING = "srun: launch/slurm: _step_signal: Terminating StepId=4.0"
CANCELLED = "slurmstepd-n1: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-30T03:45:49 ***"
STOPPED = {"event": "stopped", "step": 40, "signal": "SIGUSR2"}


def failure(rank: int, kind: str = "exception", time: str = "2026-01-02T03:04:05.000Z") -> dict[str, Any]:
    """What a failing rank records."""
    exception = {
        "exception": "ValueError: loss is NaN",
        "usage": "DataError: no data",
        "connection": "RuntimeError: gloo",
        "hang": "HangError: no answer",
    }
    return {
        "rank": rank, "host": f"n{rank // 2 + 1}", "time": time, "kind": kind, "exception": exception[kind],
        "exit_code": {"usage": 2, "hang": 76}.get(kind, 1),
    }  # fmt: skip


def srun(*lines: str, code: int = 1) -> RanksEnd:
    """How srun ended."""
    return RanksEnd({}, launcher_lines=lines, launcher_code=code)


def local(*codes: int, ended: tuple[int, ...] = ()) -> RanksEnd:
    """How local ranks ended."""
    return RanksEnd(dict(enumerate(codes)), frozenset(ended))


def killed(rank: int, how: str) -> Verdict:
    """A rank that a signal ended."""
    return Verdict("failed", "killed", f"rank {rank} was ended by a signal: {how}", 1, rank)


def hang(rank: int, reporter: int, time: str = "2026-01-02T03:04:05.000Z") -> dict[str, Any]:
    """What one rank records of another that does not answer."""
    return {**failure(rank, "hang", time), "reporter": reporter}


HANG = Verdict("failed", "hang", "rank 2 on n2: HangError: no answer", 76, 2)
NAN = Verdict("failed", "exception", "rank 3 on n2: ValueError: loss is NaN", 1, 3)
EXITED_3 = srun("srun: error: n2: task 3: Exited with exit code 1", TERMINATING, "srun: error: n1: tasks 0-1: Killed")
KILLED_2 = srun(
    "srun: error: n2: task 2: Killed",
    TERMINATING,
    CANCELLED,
    "srun: error: n2: task 3: Terminated",
    "srun: error: n1: tasks 0-1: Exited with exit code 1",
)


UNSTARTABLE = Verdict(
    "failed",
    "usage",
    "rank 2 could not be started (exit code 127): its interpreter, or what enters its container, is not on its node; "
    "see the attempt's log",
    2,
    2,
    "n2",
)


@pytest.mark.parametrize(
    ("failures", "end"),
    [
        ([], srun("srun: error: n2: task 2: Exited with exit code 127", "srun: error: n1: tasks 0-1: Terminated")),
        ([failure(0, "connection")], srun("srun: error: n2: task 2: Exited with exit code 127")),
        ([], local(-15, -15, 127, ended=(0, 1))),
    ],
    ids=["srun", "another rank lost it", "local"],
)
def test_rank_whose_interpreter_is_not_on_its_node_is_told_in_words(
    failures: list[dict[str, Any]], end: RanksEnd
) -> None:
    node = "n2" if end.launcher_lines else None
    assert judge(Evidence(False, None, failures, end)) == replace(UNSTARTABLE, node=node)


def test_srun_without_the_plugin_for_containers_is_told_in_words() -> None:
    end = srun("srun: unrecognized option '--container-image=x'", 'Try "srun --help" for more information', code=255)
    reason = (
        "srun could not start the ranks: srun: unrecognized option '--container-image=x'; --container-* options need "
        "pyxis, a plugin of Slurm"
    )
    assert judge(Evidence(False, None, [], end)) == Verdict("failed", "usage", reason, 2)


@pytest.mark.parametrize(
    ("failures", "end", "verdict"),
    [
        pytest.param([failure(3)], EXITED_3, NAN, id="the rank that srun names first"),
        pytest.param(
            [failure(0, time="2026-01-02T03:04:04.000Z"), failure(3)], EXITED_3, NAN, id="srun outranks the clocks"
        ),
        pytest.param(
            [failure(1, time="2026-01-02T03:04:06.000Z"), failure(3)],
            srun(),
            NAN,
            id="the earliest where srun is silent",
        ),
        pytest.param(
            [failure(0, "connection", "2026-01-02T03:04:04.000Z"), failure(3)],
            srun("srun: error: n1: tasks 0-1: Exited with exit code 1", "srun: error: n2: task 3: Killed"),
            NAN,
            id="a connection error is a consequence",
        ),
        pytest.param(
            [failure(0, "usage")],
            srun("srun: error: n1: task 0: Exited with exit code 2"),
            Verdict("failed", "usage", "rank 0 on n1: DataError: no data", 2, 0, "n1"),
            id="what the user can mend",
        ),
        pytest.param(
            [failure(1, "connection", "2026-01-02T03:04:06.000Z"), failure(0, "connection")],
            srun("srun: error: n1: task 1: Exited with exit code 1"),
            Verdict("failed", "connection", "rank 1 on n1: RuntimeError: gloo", 1, 1),
            id="only connection errors",
        ),
        pytest.param([failure(0, "connection")], KILLED_2, killed(2, "Killed"), id="killed, as srun says first"),
        pytest.param(
            [failure(0, "connection"), failure(1, "connection")],
            srun("srun: error: n1: tasks 0-1: Exited with exit code 1", TERMINATING, "srun: error: n2: task 2: Killed"),
            killed(2, "Killed"),
            id="killed, though srun says so after those that lost their connection",
        ),
        pytest.param(
            [failure(0, "connection")],
            srun("srun: error: n1: task 0: Exited with exit code 1", "srun: error: n2: task 2: Terminated"),
            Verdict("failed", "connection", "rank 0 on n1: RuntimeError: gloo", 1, 0),
            id="srun's own TERM is no cause",
        ),
        pytest.param(
            [],
            srun("srun: error: n3: tasks 4-5,7: Segmentation fault (core dumped)"),
            killed(4, "Segmentation fault (core dumped)"),
            id="several tasks in a line",
        ),
        pytest.param(
            [],
            EXITED_3,
            Verdict(
                "failed",
                "unknown",
                "the ranks ended without a word; srun: error: n2: task 3: Exited with exit code 1",
                1,
            ),
            id="no record of the rank that srun names",
        ),
        pytest.param(
            [],
            srun(code=143),
            Verdict("failed", "unknown", "the ranks ended without a word; srun ended with 143", 1),
            id="srun says nothing",
        ),
        pytest.param(
            [failure(3)], local(-9, -9, -9, 1, ended=(0, 1, 2)), NAN, id="local: the others were ended for it"
        ),
        pytest.param(
            [failure(0, "connection")], local(1, -9), killed(1, "SIGKILL"), id="local: killed, the other lost it"
        ),
        pytest.param(
            [failure(0, "connection")],
            local(1, -9, ended=(1,)),
            Verdict("failed", "connection", "rank 0 on n1: RuntimeError: gloo", 1, 0),
            id="local: our own KILL is no cause",
        ),
        pytest.param(
            [],
            local(-9, 3, -signal.SIGTERM, ended=(0, 2)),
            Verdict("failed", "unknown", "the ranks ended without a word; rank 0: -9, rank 1: 3, rank 2: -15", 1),
            id="local: no record",
        ),
        pytest.param(
            [hang(2, 0), failure(1, "connection", "2026-01-02T03:04:04.000Z")],
            srun("srun: error: n1: task 0: Exited with exit code 76", TERMINATING, "srun: error: n2: task 2: Killed"),
            HANG,
            id="hang: the silent rank, not the one that told, nor those that lost their connection",
        ),
        pytest.param(
            [hang(2, 0)],
            srun("srun: error: n2: task 2: Killed", "srun: error: n1: task 0: Exited with exit code 76"),
            HANG,
            id="hang: srun killed the silent rank",
        ),
        pytest.param([hang(2, 0)], local(76, 76, -9, 1, ended=(2, 3)), HANG, id="hang: local"),
        pytest.param(
            [hang(0, 3, "2026-01-02T03:04:15.000Z"), hang(3, 0)],
            srun("srun: error: n1: task 0: Exited with exit code 76"),
            Verdict("failed", "hang", "rank 3 on n2: HangError: no answer", 76, 3),
            id="hang: two that do not reach each other; rank 0 is the first to speak",
        ),
        pytest.param(
            [{**hang(0, 0), "rank": None}],
            local(76, 76),
            Verdict("failed", "hang", "all ranks: HangError: no answer", 76),
            id="hang: nobody differs",
        ),
        pytest.param(
            [],
            srun("srun: error: n1: tasks 0-1: Exited with exit code 76"),
            Verdict("failed", "hang", "the watchdog ended the ranks, and could write no record", 76),
            id="hang: the storage, too",
        ),
        pytest.param(
            [],
            local(-signal.SIGALRM),
            Verdict(
                "failed",
                "hang",
                "rank 0 did not run its own watch past its deadline; its stacks are in the attempt's log",
                76,
                0,
            ),
            id="hang: a lone rank whose interpreter is held",
        ),
    ],
)
def test_first_cause_is_named(failures: list[dict[str, Any]], end: RanksEnd, verdict: Verdict) -> None:
    assert judge(Evidence(False, None, failures, end)) == verdict


@pytest.mark.parametrize("end", [srun(code=0), KILLED_2, local(0, 0)])
def test_run_with_a_summary_is_finished_however_its_ranks_ended(end: RanksEnd) -> None:
    assert judge(Evidence(True, None, [], end)) == Verdict("finished", "finished", "all steps done", 0)


UNLAUNCHED = (
    "srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure",
    "srun: error: Application launch failed: Communication connection failure",
    "srun: Job step aborted",
    "srun: error: n1: task 0: Killed",
)


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (
            UNLAUNCHED,
            Verdict(
                "failed",
                "launch",
                "Slurm could not start the ranks on n2: Communication connection failure",
                1,
                node="n2",
                nodes=("n2",),
            ),
        ),
        (
            (UNLAUNCHED[0], UNLAUNCHED[0].replace("n2", "n4"), *UNLAUNCHED[1:]),
            Verdict(
                "failed",
                "launch",
                "Slurm could not start the ranks on n2, n4: Communication connection failure",
                1,
                node="n2",
                nodes=("n2", "n4"),
            ),
        ),
        (
            ("srun: error: Task launch for 7.0 failed on node n2: Job credential expired",),
            Verdict(
                "failed",
                "launch",
                "Slurm could not start the ranks on n2: Job credential expired",
                1,
                node="n2",
                nodes=("n2",),
            ),
        ),
        (
            ("srun: error: task 3 launch failed: Job prolog failed", "srun: error: n1: task 0: Killed"),
            Verdict("failed", "launch", "Slurm could not start the ranks: Job prolog failed", 1, 3),
        ),
        (
            ("srun: error: Unable to create step for job 5: Socket timed out on send/recv operation",),
            Verdict("failed", "launch", "Slurm could not start the ranks: Socket timed out on send/recv operation", 1),
        ),
        (
            ("srun: error: Unable to create step for job 5: More processors requested than permitted",),
            Verdict("failed", "usage", "Slurm refused to start the ranks: More processors requested than permitted", 2),
        ),
        (("srun: error: n3: task 2: Killed", *UNLAUNCHED), killed(2, "Killed")),
    ],
    ids=["dead node", "two nodes", "older words", "by rank", "no step", "the job's own shape", "a rank was first"],
)
def test_node_that_cannot_start_ranks_is_at_fault_and_not_those_whose_ranks_srun_ends_for_it(
    lines: tuple[str, ...], verdict: Verdict
) -> None:
    assert judge(Evidence(False, None, [failure(0, "connection")], srun(*lines, code=233))) == verdict


def test_srun_that_is_killed_is_a_cause_of_its_own_whatever_the_ranks_say_of_lost_connections() -> None:
    expected = Verdict("failed", "srun killed", "srun was ended by SIGKILL, and with it all ranks", 1)
    assert judge(Evidence(False, None, [], srun(code=-9))) == expected
    assert judge(Evidence(False, None, [failure(1, "connection")], srun(code=-9))) == expected
    assert judge(Evidence(False, None, [failure(3)], srun(code=-9))) == NAN


def test_start_that_the_supervisor_gave_up_says_why() -> None:
    end = RanksEnd({}, launcher_lines=("srun: Cancelled pending step for job 5",), launcher_code=1, given_up="no rank")
    assert judge(Evidence(False, None, [], end)) == Verdict("failed", "launch", "no rank", 1)


@pytest.mark.parametrize(
    ("failures", "trained", "cause", "exit_code"),
    [
        ([failure(2, "usage")], False, "usage", 2),
        ([failure(2, "usage")], True, "unfit node", 1),
        ([failure(2, "usage"), failure(3, "usage")], True, "unfit node", 1),
        ([failure(0, "usage"), failure(3, "usage")], True, "usage", 2),
    ],
    ids=["never trained", "has trained", "all ranks of a node", "two nodes"],
)
def test_what_one_node_lacks_is_its_own_fault_once_the_run_has_trained_elsewhere(
    failures: list[dict[str, Any]], trained: bool, cause: str, exit_code: int
) -> None:
    lines = ("srun: error: n2: task 2: Exited with exit code 2", "srun: error: n1: tasks 0-1: Terminated")
    found = judge(Evidence(False, None, failures, srun(*lines), has_trained=trained))
    assert (found.cause, found.exit_code) == (cause, exit_code)
    assert cause == "usage" or (found.rank, found.node, found.reason) == (2, "n2", "rank 2 on n2: DataError: no data")


def test_interpreter_that_is_missing_on_one_node_is_its_fault_once_the_run_has_trained() -> None:
    end = srun("srun: error: n2: task 2: Exited with exit code 127")
    found = judge(Evidence(False, None, [], end, has_trained=True))
    assert (found.cause, found.rank, found.node, found.exit_code) == ("unfit node", 2, "n2", 1)


@pytest.mark.parametrize("end", [srun("srun: error: n1: task 0: Exited with exit code 75"), KILLED_2, local(75, 75)])
def test_saved_attempt_is_stopped_however_its_ranks_ended(end: RanksEnd) -> None:
    expected = Verdict("stopped", "stopped", "stopped (SIGUSR2), saved at step 40", 75)
    assert judge(Evidence(False, STOPPED, [failure(0, "connection")], end)) == expected


def test_slurms_word_about_the_job_outranks_everything() -> None:
    cancelled = JobRecord("COMPLETING", "None", is_preempted=False, is_requeued=False)
    saved = Evidence(False, STOPPED, [], KILLED_2, maybe_job=cancelled, is_on_slurm=True)
    assert judge(saved) == Verdict("stopped", "user cancel", "user cancel (SIGUSR2), saved at step 40", 75)
    unsaved = Evidence(False, None, [failure(0)], KILLED_2, maybe_job=cancelled, is_on_slurm=True)
    reason = "user cancel: the ranks were ended before they had saved"
    assert judge(unsaved) == Verdict("failed", "user cancel", reason, 1)


def test_log_of_the_job_is_believed_where_the_controller_does_not_answer() -> None:
    line = "slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-30T04:43:05 DUE TO PREEMPTION ***"
    saved = Evidence(False, STOPPED, [], KILLED_2, job_lines=(line,), is_on_slurm=True)
    assert judge(saved) == Verdict("stopped", "preempted", "preempted (SIGUSR2), saved at step 40", 75)


@pytest.mark.parametrize(
    ("signal_name", "time_left_s", "asked_by_user", "cause"),
    [
        ("SIGTERM", 5000.0, False, "preempted"),
        ("SIGUSR2", 5000.0, False, "preempted"),
        ("SIGUSR2", 150.0, False, "time limit"),
        ("SIGUSR2", None, False, "preempted"),
        ("SIGUSR2", 150.0, True, "stopped"),
    ],
)
def test_stop_that_slurm_says_nothing_about_is_named_by_signal_and_clock(
    signal_name: str, time_left_s: float | None, asked_by_user: bool, cause: str
) -> None:
    evidence = Evidence(
        False,
        {**STOPPED, "signal": signal_name},
        [],
        srun(),
        time_left_s=time_left_s,
        lead_s=120.0,
        is_on_slurm=True,
        asked_by_user=asked_by_user,
    )
    assert judge(evidence).cause == cause


def test_rank_that_the_kernel_ended_for_memory_is_called_so() -> None:
    end = srun("srun: error: n2: task 2: Out Of Memory")
    assert judge(Evidence(False, None, [], end)) == Verdict(
        "failed", "out of memory", "rank 2 was ended by a signal: Out Of Memory", 1, 2
    )


@pytest.mark.parametrize(
    "head", ["slurmstepd-n1: error: ", "[2026-01-02T03:04:05.678] error: "], ids=["22.05", "26.05"]
)
def test_rank_that_slurmstepd_ended_for_memory_is_called_so_though_srun_says_killed(head: str) -> None:
    end = srun("srun: error: n1: task 0: Killed")
    lines = (f"{head}Exceeded job memory limit", "2026-01-02T03:04:05.000Z super I out of memory")
    reason = "rank 0 was ended by a signal: Killed; slurmstepd: Exceeded job memory limit"
    assert judge(Evidence(False, None, [], end, job_lines=lines)) == Verdict("failed", "out of memory", reason, 1, 0)
    assert judge(Evidence(False, None, [], end, job_lines=lines[1:])) == killed(0, "Killed")


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("srun: error: Node failure on n2", "n2"),
        ("srun: error: Node failure on n[2-3]", None),
        ("srun: error: n2: task 2: Killed", None),
    ],
    ids=["one node", "several", "another line"],
)
def test_node_that_died_is_the_one_that_srun_names(line: str, node: str | None) -> None:
    job_line = (
        "slurmstepd-n1: error: *** JOB 20 ON n1 CANCELLED AT 2026-11-30T06:51:16 DUE TO NODE FAILURE, SEE SLURMCTLD"
    )
    evidence = Evidence(False, None, [], srun(line), job_lines=[job_line], is_on_slurm=True)
    reason = "node failure: the ranks were ended before they had saved"
    assert judge(evidence) == Verdict("failed", "node failure", reason, 1, node=node)
