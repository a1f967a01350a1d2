"""Predecessor: a successor starts -> [predecessor] -> whether there is anything left to do.  Standard library only.

A successor's dependency says only that the job before it has ended, or ended badly; a user's cancel looks the same.
Measured on Slurm 22.05: a job with --no-requeue ends as PREEMPTED under every PreemptMode, as NODE_FAIL, TIMEOUT or
FAILED, and as CANCELLED only by scancel.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster import slurm
from cluster.cancel import leave_mark
from cluster.chain import Chain
from cluster.identity import own_states
from cluster.job import ASK_AGAIN_S, insist
from cluster.owner import job_ids, jobs_since_submission
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, RunFolder

log = logging.getLogger("run")


def maybe_exit_code_by_predecessor(chain: Chain, predecessor: str) -> int | None:
    """What ends a successor before it starts anything: somebody else runs the run, or it is over.

    After a user's cancel it writes the mark that all later ones obey.

    Raises SlurmError: Slurm has no squeue for us.
    """
    run, own, environ = chain.run, chain.job.job_id, chain.job.environ
    ids = [job_id for job_id in job_ids(jobs_since_submission(run)) if job_id != own]
    if predecessor not in ids:
        ids.append(predecessor)
    states = ended_states(run, ids, environ)
    state = states[predecessor].state if predecessor in states else maybe_recorded_state(predecessor, environ)
    alive = [job_id for job_id in ids if job_id in states and is_alive(states[job_id])]
    end = judge_predecessor(state, alive, run.read_json(run.verdict(run.latest_attempt())), ids)
    if end == "alive":
        log.info("job %s runs this run; nothing to do", ", ".join(alive))
        chain.keep()
        return EXIT_FINISHED
    if end == "failed":
        log.info("%s has failed for good in an earlier job", run.path)
        return EXIT_FAILED
    if end == "cancelled":
        leave_mark(run)
        log.info("job %s was cancelled by its user, and with it %s", predecessor, run.path)
        return EXIT_FAILED
    log.info("job %s ended as %s; this job goes on", predecessor, state or "one that Slurm no longer knows")
    return None


def ended_states(run: RunFolder, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, slurm.JobState]:
    """What squeue says of jobs once none of them is still about to end."""
    while True:
        states = insist(lambda: own_states(run, ids, environ))
        if all(job.state != "COMPLETING" for job in states.values()):
            return states
        time.sleep(ASK_AGAIN_S)


def judge_predecessor(state: str | None, alive: Sequence[str], verdict: Mapping[str, Any], ids: Sequence[str]) -> str:
    """How the jobs before a successor ended: alive, failed, cancelled, or open (it goes on).  Pure.

    state: Slurm's word for the direct predecessor's end; None when nobody knows it any more.
    alive: jobs of the run that have started and not ended.  verdict: of the latest attempt.
    ids: the jobs since the run was last submitted by hand; another job's verdict counts no more.
    """
    if alive:
        return "alive"
    if verdict.get("job_id") in ids and (verdict.get("action") == "stop" or verdict.get("cause") == "usage"):
        return "failed"
    return "cancelled" if state == "CANCELLED" else "open"


def is_alive(job: slurm.JobState) -> bool:
    """Whether a job has started and not ended."""
    return job.state != "PENDING" and not slurm.has_ended(job)


def maybe_recorded_state(job_id: str, environ: Mapping[str, str]) -> str | None:
    """The end of a job that squeue has forgotten (slurm.conf's MinJobAge, 300 s), where there is accounting."""
    try:
        return slurm.maybe_recorded_state(job_id, environ)
    except slurm.SlurmError as error:
        log.warning("how job %s ended is not known: %s", job_id, error)
        return None
