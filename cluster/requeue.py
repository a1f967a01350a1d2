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
MAX_SPOILT_ATTEMPTS = 5  # by nodes, in a row without progress: then it is not the nodes
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
    "launch": Rule("requeue", counts=False),  # Slurm could not start the ranks
    "unfit node": Rule("requeue", counts=False),  # a node lacks what the run had elsewhere
    "srun killed": Rule("restart"),
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

OVER_CAUSES = frozenset(("finished", "usage", "user cancel"))
NODES_FAULT = frozenset(("bad node", "launch", "unfit node"))


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


def wish(
    history: Sequence[Past],
    *,
    max_failures: int,
    overrides: Mapping[str, str],
    maybe_mark: Mapping[str, object] | None,
    stop_signal: str,
) -> Decision:
    """What the policy wants after the last attempt of a history, as far as Slurm allows it: see settle().

    overrides: cause -> action, from the spec's requeue.policy.
    maybe_mark: the contents of stop.json, which the user left.
    stop_signal: what the supervisor was sent, such as SIGTERM; empty when nothing came.
    """
    cause = history[-1].cause
    if maybe_mark is not None and cause not in OVER_CAUSES:
        return Decision("requeue" if maybe_mark.get("requeue") else "leave", "cluster.stop")
    rule = POLICY[cause]
    action = overrides.get(cause, rule.action)
    if action in ("leave", "stop"):
        return Decision(action)
    why_not = why_not_again(history, max_failures)
    if why_not:
        return Decision("stop", why_not)
    if action == "restart" and stop_signal:  # TERM may be a preemption in which no rank lived to save
        return Decision("leave" if stop_signal == "SIGINT" else "requeue", f"{stop_signal} came")
    return Decision(action)


def why_not_again(history: Sequence[Past], max_failures: int) -> str:
    """Why a run that is not over is given up; empty while it may go on."""
    num_failures = failures_since_progress(history)
    if POLICY[history[-1].cause].has_budget and num_failures > max_failures:
        return f"{num_failures} failures since the last progress, requeue.max_failures is {max_failures}"
    step = history[-1].checkpoint_step
    if (idle := idle_attempts(history)) >= MAX_IDLE_ATTEMPTS:
        return f"no progress in {idle} attempts: the newest checkpoint is still of step {step}"
    if (spoilt := spoilt_attempts(history)) >= MAX_SPOILT_ATTEMPTS:
        return f"{spoilt} attempts in a row were spoilt by nodes: the newest checkpoint is still of step {step}"
    return ""


def settle(wanted: Decision, maybe_job: JobState | None) -> Decision:
    """What remains of a wish once Slurm has said where the job is.

    maybe_job: None when Slurm no longer knows the job.
    """
    if maybe_job is None:
        return Decision("leave", "Slurm no longer knows the job")
    is_timed_out = maybe_job.state == "COMPLETING" and maybe_job.reason == "TimeLimit"
    if maybe_job.state != "RUNNING" and not is_timed_out:
        return Decision("leave", f"the job is {maybe_job.state}: Slurm or its user has decided")
    left = maybe_job.time_left_s
    if wanted.action == "restart" and (is_timed_out or (left is not None and left < LEAVING_S)):
        return Decision("requeue", f"{left or 0:.0f} s are left of the time limit")
    return wanted


def without_queue(wanted: Decision) -> Decision:
    """What remains of a wish on one machine."""
    return Decision("leave", "there is no queue on this machine") if wanted.action == "requeue" else wanted


def unasked(wanted: Decision, refusal: str, *, is_asked_to_stop: bool) -> Decision:
    """What remains of a wish when Slurm does not say where the job is: nothing is requeued unasked.

    A requeue would revive a job that its user has cancelled.  refusal: Slurm's words, or what there is of them.
    """
    if wanted.action == "restart" and not is_asked_to_stop:
        return Decision("restart", f"Slurm was not asked: {refusal}")
    return Decision("leave", f"whether the job goes on is not known: {refusal}")


def is_over(decision: Decision, cause: str, maybe_mark: Mapping[str, object] | None) -> bool:
    """Whether a run does not go on by itself, whoever may be waiting behind this job.

    Where Slurm has decided (a preemption without grace, a dead node), it does.
    """
    if decision.action in ("restart", "requeue"):
        return False
    if decision.action == "stop" or cause in OVER_CAUSES:
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


def spoilt_attempts(history: Sequence[Past]) -> int:
    """Attempts without progress at the end of a history which nodes have spoilt; other ends between them pass."""
    count = 0
    for place in reversed(range(len(history))):
        if made_progress(history, place):
            break
        count += history[place].cause in NODES_FAULT
    return count


def back_off_s(history: Sequence[Past]) -> float:
    """Seconds to wait before the ranks are started again here: none after progress, then longer and longer."""
    idle = idle_attempts(history)
    return 0.0 if idle == 0 else min(60.0, 2.0**idle)
