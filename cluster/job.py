"""The job that a supervisor runs in: what its environment says, and what Slurm says of it.  Standard library only."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cluster import slurm
from cluster.identity import RunJob, find_own, find_shown, is_own, maybe_own_state
from cluster.job_end import JobRecord, maybe_grace_end, read_record
from cluster.plan import LaunchPlan
from cluster.runs import RunFolder
from cluster.signals import held_back

log = logging.getLogger("run")

ASK_AGAIN_S = 2.0
# A job that is still running afterwards, or about to: somebody resizes, suspends or signals it, or its data is moved.
# Source: squeue(1), "JOB STATE CODES", Slurm 22.05 to 25.11.
PASSING_STATES = frozenset(
    ("CONFIGURING", "POWER_UP_NODE", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
)

Answer = TypeVar("Answer")


def insist(
    ask: Callable[[], Answer], *, patience_s: float = math.inf, is_urgent: Callable[[], bool] = lambda: False
) -> Answer:
    """Ask Slurm again and again while its refusal may pass.

    patience_s: seconds after which it is given up; by default only the end of this process ends it.
    is_urgent: whether it is not to be given up, whatever the patience.

    Raises SlurmError: it refuses for good, or patience has run out.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except slurm.SlurmError as error:
            if slurm.is_final(error) or (time.monotonic() > end and not is_urgent()):
                raise
            log.warning("asking Slurm again: %s", error)
            time.sleep(ASK_AGAIN_S)


@dataclass
class Job:
    """A Slurm job, or a local run under submitit's controller."""

    own: RunJob
    is_on_slurm: bool
    environ: Mapping[str, str]
    maybe_error_path: Path | None = None  # where slurmstepd writes why it ends the job
    _read: int = field(default=0)  # bytes of it that are old

    @property
    def job_id(self) -> str:
        """As events name it, and Slurm: an array member's is ARRAY_TASK."""
        return self.own.job_id

    def ask(
        self, *, patience_s: float = math.inf, is_urgent: Callable[[], bool] = lambda: False
    ) -> slurm.JobState | None:
        """The job's state, once it is not just passing from one to another; None of a job that Slurm no longer knows.

        patience_s, is_urgent: as for insist().

        Raises SlurmError: as insist().
        """
        while True:
            state = insist(lambda: maybe_own_state(self.own, self.environ), patience_s=patience_s, is_urgent=is_urgent)
            if state is None or state.state not in PASSING_STATES:
                return state
            time.sleep(ASK_AGAIN_S)

    def maybe_record(self) -> JobRecord | None:
        """What Slurm's controller holds of this job; None without Slurm, without an answer, or of another job."""
        shown = self._maybe_shown()
        return None if shown is None else read_record(shown, int(self.environ.get("SLURM_RESTART_COUNT", "0")))

    def maybe_grace_end(self) -> str | None:
        """When the grace period ends in which this job is, UTC; None where it is in none, or nobody says."""
        shown = self._maybe_shown()
        return None if shown is None else maybe_grace_end(shown)

    def _maybe_shown(self) -> str | None:
        if not self.is_on_slurm:
            return None
        try:
            with held_back():  # Slurm sends TERM twice where a job is preempted at once, to scontrol as well
                shown = slurm.run(["scontrol", "show", "job", self.job_id], self.environ)
        except slurm.SlurmError as error:
            log.warning("how Slurm ends this job is not known: %s", error)
            return None
        found = find_shown(shown, self.job_id)
        return shown if found is not None and is_own(found, self.own) else None

    def maybe_time_left_s(self) -> float | None:
        """Seconds until the end that the job had when it began, where Slurm does not answer; None when nobody says."""
        end_s = self.environ.get("SLURM_JOB_END_TIME")  # since Slurm 23.02
        return None if end_s is None or not self.is_on_slurm else float(end_s) - time.time()

    def new_error_lines(self) -> tuple[str, ...]:
        """What was written to the job's standard error since the last call."""
        if self.maybe_error_path is None or not self.maybe_error_path.exists():
            return ()
        with self.maybe_error_path.open("rb") as file:
            file.seek(self._read)
            text = file.read().decode(errors="replace")
            self._read = file.tell()
        return tuple(text.splitlines())


def find_job(plan: LaunchPlan, environ: Mapping[str, str]) -> Job:
    """The job of this process.

    What an earlier run of a requeued job left in the same file is skipped.
    """
    run = RunFolder(Path(plan.run_dir))
    if plan.cluster == "local" or "SLURM_JOB_ID" not in environ:
        job_id = environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())
        return Job(RunJob(job_id, run.path), is_on_slurm=False, environ=environ)
    own = find_own(run, environ)
    job = Job(own, is_on_slurm=True, environ=environ, maybe_error_path=maybe_error_path(run, own.job_id, environ))
    job.new_error_lines()
    return job


def maybe_error_path(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> Path | None:
    """Where slurmstepd writes why it ends a job; None where nobody says.

    scontrol expands a %% of a path as if it were a single % (22.05); the log of a job that we submit is known anyway.
    """
    try:
        path = slurm.maybe_error_path(job_id, environ)
    except slurm.SlurmError as error:
        log.warning("Slurm's own words about the end of this job will not be read: %s", error)
        return None
    known = run.batch_log(job_id)
    return known if path is not None and not path.exists() and known.exists() else path
