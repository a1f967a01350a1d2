"""Policy: the verdict on an attempt -> [requeue] -> start the ranks again here, requeue the job, or leave.  Pure.

One table says what is done about each cause.  Ends that come from outside go on as long as there is progress, which is
a checkpoint of a higher step than any before; failures of the program have a budget.  A job is requeued only while
Slurm lets it run: whatever else Slurm says, it or the user has decided already, and `scontrol requeue` would revive a
job that its user has cancelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.slurm import JobState

MAX_IDLE_ATTEMPTS = 2  # in a row without progress
LEAVING_S = 60  # an allocation that ends sooner is not worth another start


@dataclass(frozen=True, slots=True)
class Rule:
    """What one cause leads to."""

    action: str  # restart: the ranks, here; requeue: the job; leave: nothing, somebody else decides or it is over
    has_budget: bool = False  # a failure of the program, counted against requeue.max_failures
    counts: bool = True  # whether an attempt without progress counts towards MAX_IDLE_ATTEMPTS


POLICY: Mapping[str, Rule] = {
    "finished": Rule("leave"),
    "stopped": Rule("leave", counts=False),  # by the user
    "user cancel": Rule("leave", counts=False),
    "usage": Rule("leave"),
    "preempted": Rule("requeue", counts=False),
    "time limit": Rule("requeue"),
    "node failure": Rule("leave", counts=False),  # Slurm requeues
    "requeued": Rule("leave", counts=False),  # Slurm does
    "bad node": Rule("requeue", counts=False),  # the node's fault, which the next job does without
    "lost": Rule("leave", counts=False),  # an attempt whose supervisor died
    "killed": Rule("restart"),
    "hang": Rule("restart"),
    "connection": Rule("restart"),
    "port": Rule("restart"),
    "out of memory": Rule("restart", has_budget=True),
    "exception": Rule("restart", has_budget=True),
    "nan": Rule("restart", has_budget=True),
    "disk": Rule("restart", has_budget=True),
    "unknown": Rule("restart", has_budget=True),
}


@dataclass(frozen=True, slots=True)
class Past:
    """One attempt, as its verdict tells."""

    cause: str
    checkpoint_step: int  # the newest checkpoint when it ended; 0 without one


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why in one line where that is not plain."""

    action: str  # restart, requeue, leave or stop; stop: the run has failed for good
    why: str = ""


def decide(
    history: Sequence[Past],
    *,
    maybe_job: JobState | None,
    is_on_slurm: bool,
    max_failures: int,
    overrides: Mapping[str, str],
    maybe_mark: Mapping[str, object] | None,
    stop_signal: str,
) -> Decision:
    """What to do after the last attempt of a history.

    maybe_job: what squeue says now; None when Slurm no longer knows the job, or without Slurm.
    overrides: cause -> action, from the spec's requeue.policy.
    maybe_mark: the contents of stop.json, which the user left.
    stop_signal: what the supervisor was sent, such as SIGTERM; empty when nothing came.
    """
    cause = history[-1].cause
    if maybe_mark is not None and cause not in ("finished", "usage", "user cancel"):
        action = "requeue" if maybe_mark.get("requeue") else "leave"
        return ask_slurm(Decision(action, "cluster.stop"), maybe_job, is_on_slurm)
    rule = POLICY[cause]
    action = overrides.get(cause, rule.action)
    if action in ("leave", "stop"):
        return Decision(action)
    num_failures = failures_since_progress(history)
    if rule.has_budget and num_failures > max_failures:
        return Decision(
            "stop", f"{num_failures} failures since the last progress, requeue.max_failures is {max_failures}"
        )
    if idle_attempts(history) >= MAX_IDLE_ATTEMPTS:
        step = history[-1].checkpoint_step
        return Decision(
            "stop", f"no progress in {idle_attempts(history)} attempts: the newest checkpoint is still of step {step}"
        )
    wanted = Decision(action)
    if action == "restart" and stop_signal:  # TERM may be a preemption in which no rank lived to save
        wanted = Decision("leave" if stop_signal == "SIGINT" else "requeue", f"{stop_signal} came")
    return ask_slurm(wanted, maybe_job, is_on_slurm)


def ask_slurm(wanted: Decision, maybe_job: JobState | None, is_on_slurm: bool) -> Decision:
    """What remains of a wish once Slurm's state of the job is known."""
    if wanted.action == "leave" or not is_on_slurm:
        return wanted if wanted.action != "requeue" else Decision("leave", "there is no queue on this machine")
    if maybe_job is None:
        return Decision("leave", "Slurm no longer knows the job")
    is_timed_out = maybe_job.state == "COMPLETING" and maybe_job.reason == "TimeLimit"
    if maybe_job.state != "RUNNING" and not is_timed_out:
        return Decision("leave", f"the job is {maybe_job.state}: Slurm or its user has decided")
    left = maybe_job.time_left_s
    if wanted.action == "restart" and (is_timed_out or (left is not None and left < LEAVING_S)):
        return Decision("requeue", f"{left or 0:.0f} s are left of the time limit")
    return wanted


def is_over(decision: Decision, cause: str, maybe_mark: Mapping[str, object] | None) -> bool:
    """Whether a run does not go on by itself, whoever may be waiting behind this job.

    Where Slurm has decided (a preemption without grace, a dead node), it does.
    """
    if decision.action in ("restart", "requeue"):
        return False
    if decision.action == "stop" or cause in ("finished", "usage", "user cancel"):
        return True
    return cause == "stopped" if maybe_mark is None else not maybe_mark.get("requeue")


def made_progress(history: Sequence[Past], place: int) -> bool:
    """Whether an attempt left a newer checkpoint than all before it."""
    return history[place].checkpoint_step > max((past.checkpoint_step for past in history[:place]), default=0)


def failures_since_progress(history: Sequence[Past]) -> int:
    """Failures of the program since an attempt last made progress, its own end included."""
    count = 0
    for place in reversed(range(len(history))):
        count += POLICY[history[place].cause].has_budget
        if made_progress(history, place):
            break
    return count


def idle_attempts(history: Sequence[Past]) -> int:
    """Attempts without progress at the end of a history; those that were ended through no fault of the run pass."""
    count = 0
    for place in reversed(range(len(history))):
        if made_progress(history, place):
            break
        count += POLICY[history[place].cause].counts
    return count


def back_off_s(history: Sequence[Past]) -> float:
    """Seconds to wait before the ranks are started again here: none after progress, then longer and longer."""
    idle = idle_attempts(history)
    return 0.0 if idle == 0 else min(60.0, 2.0**idle)
