"""Identity: a run folder, a job id -> [identity] -> whether Slurm's job of that id is the run's.

Standard library only.

Ids repeat: each cluster counts its jobs from 1, and so does a slurmctld that has lost its state.  A job that we have
submitted has its script and its log in the run folder.  By raw sbatch, in salloc and by hand neither is so; there the
supervisor writes down, when it begins, what Slurm says of its job.
Sources: scontrol(1), `show job`; sbatch(1), --array; Slurm 22.05.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.runs import RunFolder, seconds_between

log = logging.getLogger("run")

# Between the clocks of slurmctld and a node; munge refuses more.
MAX_SKEW_S = 300.0


@dataclass(frozen=True, slots=True)
class RunJob:
    """A job of a run, and by what it is told from another one of the same id."""

    job_id: str  # of an array member ARRAY_TASK, in older run folders its number
    folder: Path  # the run's
    record: Mapping[str, Any] = field(default_factory=dict)  # as record_of() makes it; empty where there is none
    noted: str = ""  # when the job entered itself, where it did so without a record; UTC


@dataclass(frozen=True, slots=True)
class ShownJob:
    """What `scontrol show job` says of a job."""

    job_id: str  # of an array member ARRAY_TASK
    command: str  # its script with arguments; (null) in salloc
    log: str
    maybe_start: str | None  # UTC; of the newest start, or the expected one
    restarts: int


def own_job_id(environ: Mapping[str, str]) -> str:
    """The id of the job that this process is in, an array member's as ARRAY_TASK: its number may be the array's.

    An array member hands its variables on to jobs that are submitted from inside it, so Slurm is asked where they say
    that this is one.
    """
    number = environ["SLURM_JOB_ID"]
    array, task = (environ.get(name) for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    if not array or not task:
        return number
    try:
        shown = maybe_shown(number, environ)
    except slurm.SlurmError:
        return f"{array}_{task}"
    return shown.job_id if shown is not None else number


def run_job(run: RunFolder, job_id: str) -> RunJob:
    """A job of a run, by the event of its submission."""
    told: dict[str, Any] = {}
    for event in run.read_events():
        if event["event"] == "submitted" and str(event["job_id"]) == job_id:
            told = event
    if told.get("job"):  # empty where Slurm gave no answer
        return RunJob(job_id, run.path, told["job"])
    entered_itself = told.get("route") == "sbatch" or told.get("noted_by") == "job"
    return RunJob(job_id, run.path, noted=told["time"] if entered_itself else "")


def find_own(run: RunFolder, environ: Mapping[str, str]) -> RunJob:
    """The job that this process is in, by what Slurm says of it at this moment, or else by the run's events."""
    try:
        shown = maybe_shown(environ["SLURM_JOB_ID"], environ)
    except slurm.SlurmError as error:
        log.warning("this job is known by its id only: %s", error)
        shown = None
    if shown is None:
        return run_job(run, own_job_id(environ))
    return RunJob(shown.job_id, run.path, record_of(shown))


def maybe_shown(job_id: str, environ: Mapping[str, str]) -> ShownJob | None:
    """What Slurm says of a job; None when it knows none of this id.

    Raises SlurmError: no answer.
    """
    try:
        answer = slurm.run(["scontrol", "show", "job", job_id], environ)
    except slurm.SlurmError as error:
        if re.search(r"Invalid job id specified|Job \S+ not found", str(error)):
            return None
        raise
    return find_shown(answer, job_id)


def find_shown(answer: str, job_id: str) -> ShownJob | None:
    """One job in an answer of `scontrol show job`."""
    found = [read_shown(text) for text in re.split(r"\n\s*\n", answer) if "JobId=" in text]
    # Asked for an array's own id scontrol shows all members; one of them has that number, too.
    ids = {number: shown for number, shown in found} | {shown.job_id: shown for _, shown in found}
    return ids.get(job_id)


def read_shown(text: str) -> tuple[str, ShownJob]:
    """One job of `scontrol show job`: its number, and what is said of it."""
    values = dict(re.findall(r"(?<!\S)(JobId|ArrayJobId|ArrayTaskId|StartTime|Restarts)=(\S+)", text))
    paths = dict(re.findall(r"^ *(Command|StdOut)=(.*)$", text, re.MULTILINE))
    number, task = values["JobId"], values.get("ArrayTaskId", "")
    job_id = f"{values['ArrayJobId']}_{task}" if task.isdigit() else number
    start = slurm.maybe_moment(values.get("StartTime", ""))
    restarts = int(values.get("Restarts", "0"))
    return number, ShownJob(job_id, paths.get("Command", ""), paths.get("StdOut", ""), start, restarts)


def record_of(shown: ShownJob) -> dict[str, Any]:
    """What tells a job that runs from a later one of its id: a requeue counts Restarts up and moves SubmitTime."""
    return {"command": shown.command, "start": shown.maybe_start, "restarts": shown.restarts}


def is_own(shown: ShownJob, job: RunJob) -> bool:
    """Whether what Slurm shows is a job of the run.  Pure."""
    if any(slurm.lies_in(job.folder, path) for path in (shown.command, shown.log)):
        return True
    if job.noted:
        return shown.restarts > 0 or began_before(shown, job.noted)
    if not job.record or shown.command != job.record["command"]:
        return False
    is_same_start = (shown.restarts, shown.maybe_start) == (job.record["restarts"], job.record["start"])
    return shown.restarts > job.record["restarts"] or is_same_start


def began_before(shown: ShownJob, moment: str) -> bool:
    """Whether a job had begun at a moment at which it wrote something."""
    return shown.maybe_start is not None and seconds_between(shown.maybe_start, moment) > -MAX_SKEW_S


def maybe_own_id(job: RunJob, environ: Mapping[str, str]) -> str | None:
    """The id by which orders mean this job alone; None when Slurm has none of this id, or a stranger.

    Raises SlurmError: no answer.
    """
    shown = maybe_shown(job.job_id, environ)
    return shown.job_id if shown is not None and is_own(shown, job) else None


def own_states(run: RunFolder, job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, slurm.JobState]:
    """What squeue says of jobs of a run; those that Slurm no longer knows, or whose id another has, are left out.

    Raises SlurmError: no answer.
    """
    states = slurm.job_states(job_ids, environ)
    return {
        job_id: state
        for job_id, state in states.items()
        if slurm.has_ended(state) or maybe_own_id(run_job(run, job_id), environ) is not None
    }


def maybe_own_state(job: RunJob, environ: Mapping[str, str]) -> slurm.JobState | None:
    """What squeue says of a job of a run; None when it no longer knows it, and may have given its id to another.

    Raises SlurmError: no answer.
    """
    state = slurm.maybe_job_state(job.job_id, environ)
    return state if slurm.has_ended(state) or maybe_own_id(job, environ) is not None else None
