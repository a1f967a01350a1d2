"""Chain: a job that Slurm will not requeue -> [chain] -> the next job of the same run.  Standard library only.

One successor waits at any time: the supervisor submits it when it starts (`afternotok`: it runs once this job has ended
badly), and takes it away when the run is over.  Where jobs may not submit jobs, cluster.submit has put some in
beforehand (`afterany`).
Source: `scontrol show job`, Requeue and BatchFlag; Slurm 22.05.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cluster import exclude, orders, slurm, successor
from cluster.cancel import leave_mark
from cluster.exclude import Blame
from cluster.identity import RunJob, own_states, run_job
from cluster.job import Job, insist
from cluster.owner import SUCCESSOR_ROUTE, job_ids, jobs_since_submission
from cluster.plan import LaunchPlan
from cluster.runs import RunFolder, SupersededError, utc_now
from cluster.signals import held_back
from cluster.verdict import Verdict

log = logging.getLogger("run")

START_PATIENCE_S = 60.0  # with a busy controller, while the nodes wait for their ranks


@dataclass
class Chain:
    """The jobs of a run behind the one that this supervisor is in.  Leaving the `with` block takes them away."""

    run: RunFolder
    plan: LaunchPlan
    job: Job
    is_used: bool  # the run goes on in successors, not by requeue
    may_begin: bool  # whether a first successor may take the place of a refused requeue
    own_excluded: str = ""  # nodes that this job must not get: a host list
    maybe_next: str | None = None  # what begin() has submitted
    is_kept: bool = False  # what is in the queue has a reason to be there

    def __enter__(self) -> "Chain":
        """Nothing is submitted yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no job behind, unless the run goes on or somebody else has it."""
        if not self.is_kept and kind is not SupersededError:
            with held_back():  # TERM from Slurm would end the commands, too
                self.take_away()

    @property
    def is_put_in_beforehand(self) -> bool:
        """Whether cluster.submit has submitted all successors."""
        return self.plan.submit_from == "login"

    def begin(self) -> None:
        """Have one successor wait; one that this job submitted before it was requeued still does."""
        if not self.is_used or self.is_put_in_beforehand:
            return
        try:
            waiting = self.waiting(patience_s=START_PATIENCE_S)
        except slurm.SlurmError as error:  # asked again when this job ends
            log.warning("whether a successor waits is not known: %s", error)
            return
        self.maybe_next = waiting[0] if waiting else self.submit("afternotok")

    def submit(self, condition: str) -> str | None:
        """Submit the next job; None when Slurm refused, which the log says.

        condition: afternotok, before this job has ended; afterany, when it is about to end and nothing else will do.
        """
        run, plan, own, environ = self.run, self.plan, self.job.job_id, self.job.environ
        excluded = self.excluded()
        try:
            if condition == "afternotok":  # asked for again when the job ends
                return successor.submit_successor(run, plan, own, condition, environ, excluded)
            # Slurm may have taken a job without an answer; of two the second to start sees the first and leaves.
            return insist(lambda: successor.submit_successor(run, plan, own, condition, environ, excluded))
        except OSError as error:  # its script can't be written
            log.error("no successor was submitted: %s: %s", run.successor_script, error.strerror)
            return None
        except slurm.SlurmError as error:
            log.warning("no successor was submitted: %s", error)
            log.warning("where jobs may not submit jobs, use requeue.submit_from: login")
            return None

    def excluded(self, bad: Sequence[str] | None = None) -> str:
        """Nodes that the next job must not get, as sbatch takes them.  bad: those of now, if they are known."""
        if bad is None:
            bad = exclude.find_blame(self.run, self.plan, {}).bad
        return exclude.excluded(self.own_excluded, exclude.excluded_before(self.run), bad)

    def waiting(self, *, patience_s: float = math.inf) -> list[str]:
        """The successors of this job that are in the queue, next one first.

        Raises SlurmError: Slurm has no squeue for us, or patience has run out.
        """
        events = jobs_since_submission(self.run)
        if not self.is_put_in_beforehand:
            events = [event for event in events if event.get("predecessor") == self.job.job_id]
        known = successors(events)  # one that was submitted while the disk was full is in no event
        known += [self.maybe_next] if self.maybe_next is not None and self.maybe_next not in known else []
        ids = [job_id for job_id in known if job_id != self.job.job_id]
        states = insist(lambda: own_states(self.run, ids, self.job.environ), patience_s=patience_s)
        return [job_id for job_id in ids if job_id in states and states[job_id].state == "PENDING"]

    def maybe_heir(self) -> str | None:
        """The job in which the run goes on once this one has ended; None when there is none, which the log says."""
        waiting = self.waiting()
        if waiting:
            return waiting[0]
        if self.maybe_next is not None:
            log.error("the successor, job %s, was taken out of the queue by its user", self.maybe_next)
        elif self.is_used and self.is_put_in_beforehand:
            log.error("the successors that were put in beforehand are used up (requeue.successors)")
        else:
            return self.submit("afterany")
        return None

    def blame(self, attempt: int, verdict: Verdict) -> Blame:
        """What is laid on nodes after an attempt; on none when the cluster has no others for the job."""
        if not self.job.is_on_slurm:
            return Blame()
        last = {attempt: {"cause": verdict.cause, "rank": verdict.rank, "node": verdict.node, "time": utc_now()}}
        blame = exclude.find_blame(self.run, self.plan, last)
        if not blame.bad or self.has_nodes_without(blame.bad):
            return blame
        return Blame()

    def has_nodes_without(self, bad: Sequence[str]) -> bool:
        """Whether the next job could start without some nodes."""
        try:
            if successor.has_nodes_without(self.run, self.plan, self.excluded(bad), self.job.environ):
                return True
            log.warning("node %s is at fault, but there are too few others", ", ".join(bad))
        except (slurm.SlurmError, OSError) as error:
            log.warning("node %s is at fault; whether there are others is not known: %s", ", ".join(bad), error)
        return False

    def go_on(self, cause: str, attempt: int) -> None:
        """Requeue the job, or leave the run to a successor; where neither can be, the log says how to go on by hand.

        cause: of the attempt's end.
        """
        if not self.is_used and self.was_requeued():
            self.exclude_from(self.job.job_id)
            self.run.note_event("requeued", attempt=attempt, job_id=self.job.job_id, cause=cause)
            return
        maybe_heir = self.maybe_heir() if self.is_used or self.may_begin else None
        if maybe_heir is None:
            log.error("to go on: python -m cluster.submit --resume %s", self.run.path)
            return
        self.keep()
        self.exclude_from(maybe_heir)
        self.run.note_event("requeued", attempt=attempt, job_id=self.job.job_id, cause=cause, successor=maybe_heir)
        log.info("the run goes on in job %s", maybe_heir)

    def was_requeued(self) -> bool:
        """Requeue the job; returns whether Slurm did."""
        try:
            insist(lambda: orders.requeue(self.job.own, self.job.environ))
        except slurm.SlurmError as error:
            log.error("Slurm did not requeue the job: %s", error)
            return False
        log.info("requeued; Slurm holds a requeued job back for about two minutes (AuthInfo=cred_expire)")
        return True

    def of_run(self, job_id: str) -> RunJob:
        """This job, or one that waits behind it."""
        return self.job.own if job_id == self.job.job_id else run_job(self.run, job_id)

    def exclude_from(self, job_id: str) -> None:
        """Give a waiting job the bad nodes of today, where there ever was one: an old one comes back."""
        if not exclude.excluded_before(self.run):
            return
        try:
            orders.update(self.of_run(job_id), f"ExcNodeList={self.excluded()}", self.job.environ)
        except slurm.SlurmError as error:
            log.warning("no node could be excluded: %s", error)

    def end(self, cause: str) -> None:
        """The run is over; a user's cancel of a job with successors is marked for whichever of them still starts."""
        if cause == "user cancel" and self.is_used:
            leave_mark(self.run)

    def leave_to_slurm(self) -> None:
        """Leave what waits in the queue, this job included if Slurm has requeued it, but for the nodes it may get."""
        self.keep()
        if exclude.excluded_before(self.run):
            for job_id in self.waiting() if self.is_used else [self.job.job_id]:
                self.exclude_from(job_id)

    def keep(self) -> None:
        """Leave what waits in the queue: it will see how this job has ended."""
        self.is_kept = True

    def take_away(self) -> None:
        """Take the successors out of the queue; one that starts all the same obeys the run folder."""
        try:
            waiting = self.waiting()
            if waiting:
                orders.cancel([self.of_run(job_id) for job_id in waiting], self.job.environ, only_pending=True)
                log.info("taken out of the queue: job %s", ", ".join(waiting))
        except slurm.SlurmError as error:
            log.error("successors of this job may be left in the queue: %s", error)


def find_chain(run: RunFolder, plan: LaunchPlan, job: Job) -> Chain:
    """Whether the run goes on in successors, by the spec and by whether Slurm may requeue the job."""
    if not job.is_on_slurm:
        return Chain(run, plan, job, is_used=False, may_begin=False)
    terms = terms_of(job, plan)
    may_begin = terms.is_batch and plan.requeue_mode != "requeue"  # in salloc nobody could run it again
    is_used = may_begin and (plan.requeue_mode == "successor" or not terms.may_be_requeued)
    if is_used and terms.may_be_requeued:
        forbid_requeue(job)
    if is_used and plan.requeue_mode == "auto":
        log.info("Slurm may not requeue this job: the run goes on in successors")
    return Chain(run, plan, job, is_used=is_used, may_begin=may_begin, own_excluded=terms.excluded)


def terms_of(job: Job, plan: LaunchPlan) -> slurm.JobTerms:
    """On which terms the job runs; as the plan asked for them when Slurm does not say."""
    try:
        return insist(lambda: slurm.job_terms(job.job_id, job.environ), patience_s=START_PATIENCE_S)
    except slurm.SlurmError as error:
        log.warning("whether Slurm may requeue this job is not known: %s", error)
        asked = str(plan.sbatch.get("exclude", ""))
        return slurm.JobTerms(may_be_requeued=plan.requeue_mode != "successor", is_batch=True, excluded=asked)


def forbid_requeue(job: Job) -> None:
    """Turn off Slurm's own requeue, which raw sbatch has turned on: the run must not come back twice."""
    try:
        orders.update(job.own, "Requeue=0", job.environ)
    except slurm.SlurmError as error:
        log.warning("Slurm may still requeue this job by itself: %s", error)


def successors(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of those submitted jobs that are successors."""
    return job_ids([event for event in events if event["route"] == SUCCESSOR_ROUTE])
