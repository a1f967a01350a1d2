"""Policy: what is done after an attempt, as a table."""

from typing import Any, get_args

import pytest

from cluster.requeue import POLICY, Decision, Past, back_off_s, is_over, settle, unasked, wish, without_queue
from cluster.slurm import JobState
from cluster.spec import Cause

RUNNING = JobState("RUNNING", "None", "n1", 5000)
TIMED_OUT = JobState("COMPLETING", "TimeLimit", "n1", 0)
COMPLETING = JobState("COMPLETING", "None", "n1", 5000)


def after(*history: tuple[str, int], job: JobState | None = RUNNING, **changes: Any) -> Decision:  # noqa: ANN401
    """The decision after attempts, each (cause, newest checkpoint), once Slurm has said where the job is."""
    wanted = {"max_failures": 0, "overrides": {}, "maybe_mark": None, "stop_signal": ""}
    wished = wish([Past(*past) for past in history], **{**wanted, **changes})
    return wished if wished.action in ("leave", "stop") else settle(wished, job)


@pytest.mark.parametrize(
    ("cause", "job", "action"),
    [
        ("finished", COMPLETING, "leave"),
        ("stopped", RUNNING, "leave"),
        ("usage", RUNNING, "leave"),
        ("user cancel", COMPLETING, "leave"),
        ("preempted", RUNNING, "requeue"),
        ("preempted", COMPLETING, "leave"),
        ("preempted", None, "leave"),
        ("preempted", JobState("PENDING", "BeginTime", ""), "leave"),
        ("time limit", RUNNING, "requeue"),
        ("time limit", TIMED_OUT, "requeue"),
        ("time limit", JobState("TIMEOUT", "TimeLimit", "n1", 0), "leave"),
        ("requeued", COMPLETING, "leave"),
        ("node failure", COMPLETING, "leave"),
        ("killed", RUNNING, "restart"),
        ("killed", COMPLETING, "leave"),
        ("killed", TIMED_OUT, "requeue"),
        ("killed", JobState("RUNNING", "None", "n1", 30), "requeue"),
        ("killed", JobState("RUNNING", "None", "n1", None), "restart"),
        ("connection", RUNNING, "restart"),
        ("port", RUNNING, "restart"),
        ("hang", RUNNING, "restart"),
        ("launch", RUNNING, "requeue"),
        ("launch", COMPLETING, "leave"),
        ("unfit node", RUNNING, "requeue"),
        ("srun killed", RUNNING, "restart"),
        ("exception", RUNNING, "stop"),
        ("nan", RUNNING, "stop"),
    ],
)
def test_cause_and_slurms_state_decide(cause: str, job: JobState | None, action: str) -> None:
    assert after((cause, 40), job=job).action == action


@pytest.mark.parametrize(
    ("wished", "expected"),
    [
        (Decision("restart"), Decision("restart")),
        (Decision("requeue"), Decision("leave", "there is no queue on this machine")),
        (Decision("leave"), Decision("leave")),
    ],
)
def test_without_slurm_there_is_no_queue(wished: Decision, expected: Decision) -> None:
    assert without_queue(wished) == expected


@pytest.mark.parametrize(
    ("action", "is_asked_to_stop", "expected"),
    [
        ("restart", False, Decision("restart", "Slurm was not asked: away")),
        ("restart", True, Decision("leave", "whether the job goes on is not known: away")),
        ("requeue", False, Decision("leave", "whether the job goes on is not known: away")),
    ],
)
def test_nothing_is_requeued_unasked_and_ranks_start_again_unless_a_signal_came(
    action: str, is_asked_to_stop: bool, expected: Decision
) -> None:
    assert unasked(Decision(action), "away", is_asked_to_stop=is_asked_to_stop) == expected


def test_budget_of_failures_is_counted_since_the_last_progress() -> None:
    failures = [("exception", 40)] * 3
    assert [after(*failures[:count], max_failures=2).action for count in (1, 2, 3)] == ["restart", "restart", "stop"]
    assert after(*failures, max_failures=2).why == "3 failures since the last progress, requeue.max_failures is 2"
    once = [("exception", 40), ("preempted", 40), ("exception", 40)]
    assert after(*once, max_failures=1).action == "stop"
    progress = [("exception", 20), ("exception", 40), ("exception", 60), ("exception", 80)]
    assert after(*progress, max_failures=1).action == "restart"


def test_preemptions_use_up_neither_budget_nor_patience() -> None:
    assert after(*[("preempted", 0)] * 50).action == "requeue"
    assert after(("preempted", 40), *[("preempted", 40)] * 5, ("killed", 40)).action == "restart"


def test_two_attempts_in_a_row_without_progress_stop_a_run() -> None:
    decision = after(("killed", 40), ("killed", 40), ("preempted", 40), ("killed", 40))
    assert decision == Decision("stop", "no progress in 2 attempts: the newest checkpoint is still of step 40")
    assert after(("time limit", 0), ("time limit", 0)).action == "stop"


@pytest.mark.parametrize(
    ("stop_signal", "job", "action"),
    [
        ("SIGTERM", RUNNING, "requeue"),  # a preemption: Slurm lets the job run to the end of its grace period
        ("SIGTERM", COMPLETING, "leave"),  # scancel
        ("SIGINT", RUNNING, "leave"),  # Ctrl-C in salloc
    ],
)
def test_nothing_is_started_again_in_a_job_that_was_asked_to_stop(stop_signal: str, job: JobState, action: str) -> None:
    assert after(("killed", 40), job=job, stop_signal=stop_signal).action == action


def test_budget_and_patience_outrank_a_request_to_stop() -> None:
    assert after(("exception", 40), stop_signal="SIGTERM").action == "stop"
    assert after(("killed", 0), ("killed", 0), stop_signal="SIGTERM").action == "stop"


@pytest.mark.parametrize(
    ("mark", "action"), [({"requeue": False}, "leave"), ({"requeue": True}, "requeue"), ({}, "leave")]
)
def test_users_mark_outranks_the_policy(mark: dict[str, object], action: str) -> None:
    assert after(("killed", 40), maybe_mark=mark).action == action


@pytest.mark.parametrize("cause", ["finished", "usage", "user cancel"])
def test_users_mark_brings_nothing_back_that_is_over(cause: str) -> None:
    assert after((cause, 40), maybe_mark={"requeue": True}).action == "leave"


def test_spec_may_say_otherwise() -> None:
    assert after(("killed", 40), overrides={"killed": "requeue"}).action == "requeue"
    assert after(("killed", 40), overrides={"killed": "stop"}).action == "stop"
    assert after(("exception", 40), overrides={"exception": "requeue"}).action == "stop"  # the budget stays


def test_spec_can_override_every_cause_that_is_acted_upon() -> None:
    acted_upon = {cause for cause, rule in POLICY.items() if rule.action != "leave"}
    assert set(get_args(Cause)) == acted_upon - {"bad node"}  # which killed or hang becomes, unless overridden


def test_back_off_grows_while_there_is_no_progress() -> None:
    assert back_off_s([Past("killed", 40)]) == 0
    waits = [back_off_s([Past("killed", 40), *[Past("killed", 40)] * count]) for count in (1, 2, 3, 20)]
    assert waits == [2, 4, 8, 60]


def test_failures_of_a_bad_node_requeue_the_job_and_use_up_no_patience() -> None:
    assert after(("killed", 0), ("killed", 0)).action == "stop"
    assert after(("bad node", 0), ("bad node", 0)).action == "requeue"
    assert after(("bad node", 0), ("bad node", 0), ("killed", 0)).action == "restart"
    assert after(("bad node", 0), ("bad node", 0), job=COMPLETING).action == "leave"


def test_fifth_attempt_in_a_row_that_a_node_spoils_is_the_last() -> None:
    spoilt = [("launch", 7), ("unfit node", 7), ("bad node", 7), ("launch", 7)]
    assert after(("preempted", 7), *spoilt).action == "requeue"
    why = "5 attempts in a row were spoilt by nodes: the newest checkpoint is still of step 7"
    assert after(("preempted", 7), *spoilt, ("launch", 7)) == Decision("stop", why)
    assert after(*spoilt, ("preempted", 8), ("launch", 8)).action == "requeue"


@pytest.mark.parametrize(
    ("action", "cause", "mark", "over"),
    [
        ("leave", "finished", None, True),
        ("leave", "usage", None, True),
        ("leave", "user cancel", None, True),
        ("leave", "stopped", None, True),
        ("stop", "killed", None, True),
        ("leave", "preempted", None, False),
        ("leave", "node failure", None, False),
        ("leave", "killed", None, False),
        ("requeue", "time limit", None, False),
        ("restart", "killed", None, False),
        ("leave", "preempted", {"requeue": False}, True),
        ("leave", "stopped", {"requeue": True}, False),
        ("leave", "finished", {"requeue": True}, True),
    ],
)
def test_run_is_over_unless_slurm_has_decided_or_it_goes_on(
    action: str, cause: str, mark: dict[str, object] | None, over: bool
) -> None:
    assert is_over(Decision(action), cause, mark) is over
