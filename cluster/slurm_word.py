"""Slurm's word: a job id -> [slurm_word] -> how Slurm says that the job ended.  Standard library only.

Asked in this order: scontrol, which forgets a job after MinJobAge; accounting, where there is some; the job's own log,
into which slurmstepd writes why it ends a job.
Source: scontrol(1), sacct(1), Slurm 22.05, 24.11 and 26.05.
"""

import re
from collections.abc import Mapping

from cluster import slurm
from cluster.identity import find_shown, is_own, run_job
from cluster.job_end import STEPD
from cluster.queue import ANSWER_S, word_of
from cluster.runs import RunFolder

FIELD = re.compile(r"\b(JobState|Reason|ExitCode|NodeList)=(\S+)")
STARS = re.compile(r"^(?:\*\*\* )?(.*?)(?:, SEE SLURMCTLD LOG.*)?(?: \*\*\*)?$")


def slurm_word(job_id: str, run: RunFolder, environ: Mapping[str, str]) -> str:
    """One line; it says so when nobody knows the job any more."""
    told = by_controller(job_id, run, environ) or by_accounting(job_id, environ) or f"job {job_id} is no longer known"
    spoken = by_log(job_id, run)
    return f"{told}; its log: {spoken}" if spoken else told


def by_controller(job_id: str, run: RunFolder, environ: Mapping[str, str]) -> str:
    """What scontrol says; empty when it does not know the job, has given its id to another, or does not answer."""
    try:
        answer = slurm.run(["scontrol", "show", "job", job_id], environ, timeout_s=ANSWER_S)
    except slurm.SlurmError:
        return ""
    found = find_shown(answer, job_id)
    if found is None or not is_own(found, run_job(run, job_id)):
        return ""
    shown = dict(FIELD.findall(answer))
    reason = f" ({shown['Reason']})" if shown.get("Reason", "None") != "None" else ""
    return f"job {job_id} is {shown.get('JobState')}{reason}, exit code {shown.get('ExitCode')}"


def by_accounting(job_id: str, environ: Mapping[str, str]) -> str:
    """What sacct says; empty where there is no accounting or it does not know the job."""
    fields = ["--noheader", "--allocations", "--parsable2", "--format=State,ExitCode"]
    try:
        rows = slurm.run(["sacct", *fields, f"--jobs={job_id}"], environ, timeout_s=ANSWER_S).splitlines()
    except slurm.SlurmError:
        return ""
    if not rows or rows[-1].count("|") != 1:
        return ""
    state, code = rows[-1].split("|")
    return f"job {job_id} was {word_of(state)}, exit code {code} (accounting)"


def by_log(job_id: str, run: RunFolder) -> str:
    """The last words of slurmstepd in the job's log; empty without any."""
    path = run.batch_log(job_id)
    if not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    spoken = [line[head.end() :] for line in lines if (head := STEPD.match(line))]
    return STARS.sub(r"\1", spoken[-1]) if spoken else ""
