"""Orders: a job of a run -> [orders] -> Slurm changes, signals, requeues or ends it.  Standard library only.

Before each order Slurm is asked whether its job of that id is the run's: ids repeat, see identity.py.
Sources: scancel(1), scontrol(1), Slurm 22.05.
"""

from collections.abc import Mapping, Sequence

from cluster import slurm
from cluster.identity import RunJob, maybe_own_id


def confirmed(job: RunJob, environ: Mapping[str, str]) -> str:
    """The id by which an order means this job alone.

    Raises StrangerError: Slurm has no such job of this run any more.  Raises SlurmError: it did not answer.
    """
    job_id = maybe_own_id(job, environ)
    if job_id is None:
        raise slurm.StrangerError(f"Slurm's job {job.job_id} is not of {job.folder}, or is gone: it was left alone")
    return job_id


def requeue(job: RunJob, environ: Mapping[str, str]) -> None:
    """Put a running job back into the queue; one that waits there already is left as it is.

    Raises SlurmError: Slurm refused or did not answer, or the job is no longer the run's.
    """
    try:
        slurm.run(["scontrol", "requeue", confirmed(job, environ)], environ)
    except slurm.SlurmError as error:
        if "pending execution" not in str(error):
            raise


def update(job: RunJob, change: str, environ: Mapping[str, str], *, timeout_s: float = slurm.ANSWER_S) -> None:
    """Change one property of a job: `Requeue=0`, `ExcNodeList=n1` (of a pending job only).

    Raises SlurmError: Slurm refused or did not answer, or the job is no longer the run's.
    """
    slurm.run(["scontrol", "update", f"JobId={confirmed(job, environ)}", change], environ, timeout_s=timeout_s)


def signal_ranks(job: RunJob, name: str, environ: Mapping[str, str]) -> None:
    """Send a signal to all job steps of a job, but not to its batch shell.  name: such as USR2.

    Raises SlurmError: Slurm refused or did not answer, or the job is no longer the run's.
    """
    slurm.run(["scancel", f"--signal={name}", confirmed(job, environ)], environ)


def cancel(jobs: Sequence[RunJob], environ: Mapping[str, str], *, only_pending: bool = False) -> None:
    """End jobs, in this order; those that are gone, or no longer the run's, are left out.

    only_pending: take jobs out of the queue, and leave those that have started as they are.

    Raises SlurmError: Slurm refused or did not answer.
    """
    ids = [job_id for job in jobs if (job_id := maybe_own_id(job, environ)) is not None]
    if ids:
        slurm.run(["scancel", *(["--state=PENDING"] if only_pending else []), *ids], environ)
