"""Run state: a run folder, squeue -> [run_state] -> pending, training, failed, ... and why.  Standard library only.

Slurm is asked elsewhere: what it said comes in as a value, and None when it did not answer.  Then the folder alone has
to tell, and what it tells may be old.
"""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.early_end import early_end
from cluster.facts import Facts, Submission, beat_age_s, read_facts
from cluster.owner import LOCAL_ROUTES, is_cut_short, maybe_process
from cluster.progress import age
from cluster.queue import QueueJob
from cluster.reasons import explain
from cluster.runs import RunFolder, maybe_object, read_lines

LIVE = frozenset(("pending", "starting", "training", "saving", "requeued"))
BAD = frozenset(("failed", "cancelled"))
PHASES = {"saving": "saving", "starting": "starting"}  # of a heartbeat; any other is training
SILENT_S = 60.0  # a heartbeat comes every 5 s
UNSEEN = "Slurm shows this user no job of it; as the run folder says"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands."""

    word: str  # pending, starting, training, saving, requeued, stopped, failed, cancelled or finished
    because: str = ""  # one line
    source: str = "run folder"  # who says so: squeue, sacct, process or run folder
    job_id: str = ""  # the job or process that runs it, or will
    maybe_job: QueueJob | None = None
    waiting: tuple[str, ...] = ()  # successors in the queue
    never_starts: bool = False
    ended_as: str = ""  # Slurm's word for the end of the last job, where it knows that still

    @property
    def is_over(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.word not in LIVE


def maybe_alive(facts: Facts) -> bool | None:
    """Whether a run's process lives; None when it is on another machine, so that only its heartbeat can tell."""
    last = facts.submissions[-1]
    no_claim_yet = facts.attempt if not facts.has_begun else -1
    submission = {"job_id": last.job_id, "route": last.route, "attempt": no_claim_yet}
    with contextlib.suppress(ValueError):
        if maybe_process(facts.run, submission) is not None:
            return True
    host = facts.claim.get("host", "")
    return None if host not in ("", socket.gethostname()) else False


def belongs(job: QueueJob, submission: Submission, run: RunFolder) -> bool:
    """Whether a job of this id is the run's, and not one of another cluster or of a time when ids began anew.

    Every script that we submit lies in the run folder; any other job has told its script, but for those of older
    releases, whose run id is the job id.
    """
    if submission.command:
        return job.command == submission.command
    return run.run_id in job.command or run.run_id.isdigit()


def judge(facts: Facts, queue: Mapping[str, QueueJob] | None, ends: Mapping[str, str]) -> RunState:
    """Where a run stands.

    queue: squeue's answer; None when there was none.  ends: states by accounting of jobs that squeue has forgotten.
    """
    if facts.summary:
        return RunState("finished", job_id=facts.submissions[-1].job_id if facts.submissions else "")
    if facts.is_local:
        return judge_local(facts)
    jobs = jobs_of(facts, queue or {})
    alive = [job for job in jobs if job.is_alive]
    if alive:
        return judge_alive(facts, alive)
    if queue is None:
        return judge_by_folder(facts)
    if facts.is_anothers and not jobs and not any(job_id in ends for job_id in facts.job_ids):
        return noted(judge_by_folder(facts), UNSEEN)
    return judge_ended(facts, jobs, ends)


def noted(state: RunState, note: str) -> RunState:
    """A state with something that has to be known of it; one that is over stands for itself."""
    if state.is_over:
        return state
    return replace(state, because=f"{state.because}; {note}" if state.because else note)


def jobs_of(facts: Facts, queue: Mapping[str, QueueJob]) -> list[QueueJob]:
    """A run's jobs in the queue, oldest first; of a submission that was cut short, those whose script is the run's."""
    if not facts.job_ids:
        return [job for job in queue.values() if facts.run.run_id in job.command]
    return [
        queue[one.job_id]
        for one in facts.submissions
        if one.route not in LOCAL_ROUTES and one.job_id in queue and belongs(queue[one.job_id], one, facts.run)
    ]


def judge_alive(facts: Facts, alive: Sequence[QueueJob]) -> RunState:
    """A run with a job in the queue: of a chain the newest that has started counts, or else the first that waits."""
    waiting = [job for job in alive if job.kind == "pending"]
    started = [job for job in alive if job.kind != "pending"]
    job = started[-1] if started else waiting[0]
    behind = tuple(other.job_id for other in waiting if other != job)
    if job.kind != "pending":
        word, because = running_word(facts, job)
        return RunState(word, because, "squeue", job.job_id, job, behind)
    if facts.is_cancelled:
        return RunState(
            "cancelled", f"by its user; to take its job away: scancel {job.job_id}", "squeue", job.job_id, job
        )
    reason = explain(job.reason)
    word = "requeued" if facts.has_begun else "pending"
    if job.reason == "DependencyNeverSatisfied":
        word = "failed"  # it would stay in the queue for ever
    because = f"{job.reason}: {reason.text}" if job.reason else reason.text
    return RunState(word, because, "squeue", job.job_id, job, behind, never_starts=reason.never_ends)


def running_word(facts: Facts, job: QueueJob) -> tuple[str, str]:
    """State and reason of a run whose job has started."""
    if facts.is_cancelled:
        return "cancelled", "by its user; its job is ending"
    is_own = str(facts.claim.get("job_id")) == job.job_id
    if is_own and facts.verdict:
        if facts.verdict.get("action") == "restart":
            return "starting", f"again after attempt {facts.attempt}: {facts.verdict.get('reason')}"
        return ended_word(facts)
    if not is_own or facts.beat.get("attempt") != facts.attempt:
        return "starting", "" if job.state == "RUNNING" else f"the job is {job.state}"
    return phase_of(facts), silence(facts) if job.state == "RUNNING" else f"the job is {job.state}"


def phase_of(facts: Facts) -> str:
    """A state by the last heartbeat."""
    return PHASES.get(str(facts.beat.get("phase")), "training")


def silence(facts: Facts) -> str:
    """A warning where no heartbeat has come for long."""
    age_s = beat_age_s(facts)
    return f"no sign of life for {age(age_s)}" if SILENT_S < age_s < float("inf") else ""


def ended_word(facts: Facts) -> tuple[str, str]:
    """State and reason by the verdict on the latest attempt."""
    verdict = facts.verdict
    cause, reason = verdict.get("cause"), str(verdict.get("reason", ""))
    if cause == "user cancel":
        return "cancelled", reason
    if verdict.get("action") == "requeue" or (verdict.get("action") == "leave" and comes_back(facts)):
        return "requeued", reason
    if verdict.get("outcome") == "stopped":
        return "stopped", reason
    why = verdict.get("why")
    return "failed", f"{reason} ({why})" if why else reason


def comes_back(facts: Facts) -> bool:
    """Whether Slurm brings the run back, as far as its folder can tell."""
    if facts.stop_mark:
        return bool(facts.stop_mark.get("requeue"))
    return not facts.is_local and facts.verdict.get("cause") in ("preempted", "node failure", "requeued", "lost")


def judge_local(facts: Facts) -> RunState:
    """A run on one machine, whose processes can be looked at from there only."""
    alive, job_id = maybe_alive(facts), facts.submissions[-1].job_id
    is_fresh = facts.beat.get("attempt") == facts.attempt and beat_age_s(facts) < SILENT_S
    if alive or (alive is None and is_fresh and not facts.verdict):
        if facts.beat.get("attempt") != facts.attempt or (facts.verdict and facts.attempt):
            return RunState("starting", "", "process", job_id)
        return RunState(phase_of(facts), silence(facts), "process" if alive else "run folder", job_id)
    where = f"; it ran on {facts.claim['host']}: ask there" if alive is None else ""
    if facts.is_cancelled:
        return RunState("cancelled", "by its user", job_id=job_id)
    if facts.verdict and facts.has_begun:
        word, because = ended_word(facts)
        return RunState("stopped" if word == "requeued" else word, because, job_id=job_id)
    word, because = by_records(facts, f"its process has ended{where}")
    return RunState(word, because, job_id=job_id)


def by_records(facts: Facts, otherwise: str) -> tuple[str, str]:
    """State and reason of a run without a supervisor, or whose supervisor has died, by its events and failures.

    otherwise: the reason where there is none of them.
    """
    events = [event for event in read_lines(facts.run.events) if event.get("attempt") == facts.attempt]
    stops = [event for event in events if event.get("event") == "stopped"]
    if stops:
        return "stopped", f"{stops[-1]['signal']}, saved at step {stops[-1]['step']}"
    records = sorted(facts.run.failures.glob(f"a{facts.attempt:04d}_r*.json")) if facts.attempt else []
    failures = sorted((maybe_object(path) for path in records), key=lambda said: str(said.get("time")))
    if failures:
        return "failed", f"rank {failures[0].get('rank')}: {failures[0].get('exception')}"
    return "failed", otherwise


def judge_by_folder(facts: Facts) -> RunState:
    """A run of Slurm while Slurm does not answer."""
    job_id = facts.job_ids[-1] if facts.job_ids else ""
    if facts.is_cancelled:
        return RunState("cancelled", "by its user", job_id=job_id)
    if not facts.has_begun:
        return RunState("pending", "as of its submission", job_id=job_id)
    if facts.verdict:
        word, because = ended_word(facts)
        if facts.verdict.get("action") == "restart":
            word = "starting"
        return RunState(word, because, job_id=job_id)
    if facts.beat.get("attempt") != facts.attempt:
        return RunState("starting", job_id=job_id)
    return RunState(phase_of(facts), silence(facts), job_id=job_id)


def is_over_by_folder(run: RunFolder) -> bool:
    """Whether the run folder itself tells that no job of the run comes back, whichever cluster had it."""
    return not is_cut_short(run) and judge_by_folder(read_facts(run)).is_over


def judge_ended(facts: Facts, jobs: Sequence[QueueJob], ends: Mapping[str, str]) -> RunState:
    """A run of which Slurm has no job any more."""
    if not facts.job_ids and not jobs and not facts.has_begun:
        return RunState("failed", "its submission was cut short, and Slurm has no job of it")
    job_id = facts.job_ids[-1] if facts.job_ids else ""
    ended_as, source = (jobs[-1].state, "squeue") if jobs else (ends.get(job_id, ""), "sacct")
    reason = f" ({jobs[-1].reason})" if jobs and jobs[-1].reason else ""
    told = f"job {job_id} ended as {ended_as}{reason}" if ended_as else f"job {job_id} is gone"
    word, because = ended_without_job(facts, ended_as, told)
    return RunState(word, because, source if ended_as else "run folder", job_id, ended_as=ended_as)


def ended_without_job(facts: Facts, ended_as: str, told: str) -> tuple[str, str]:
    """State and reason of a run of which Slurm has no job any more.  told: how the last one ended, in words."""
    if facts.is_cancelled:
        return "cancelled", "by its user"
    if facts.has_begun and facts.verdict:
        word, because = ended_word(facts)
        if word == "requeued":  # and then its job left the queue
            because = f"{because}; {told}, and no job of the run waits"
            outcome = "stopped" if facts.verdict.get("outcome") == "stopped" else "failed"
            word = "cancelled" if ended_as == "CANCELLED" and not facts.stop_mark else outcome
        return word, because
    if ended_as == "CANCELLED" and facts.stop_mark:
        return "stopped", "its user had it taken out of the queue"
    if ended_as == "CANCELLED":
        return "cancelled", told if facts.has_begun else f"{told} before it began"
    if not facts.has_begun:
        early = early_end(facts.run) or f"it left no log, so Slurm could not start it or not open {facts.run.logs}"
        return "failed", f"{told} before it had started any rank: {early}"
    return ("failed", f"{told}, and left no verdict") if ended_as else by_records(facts, f"{told}, and left no verdict")
