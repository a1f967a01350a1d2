"""How Slurm ends a job: scontrol, the log -> [job_end] -> a cause for the verdict.  Standard library only; pure.

The controller's own record comes first: its fields have kept their names and meaning from 22.05 to 26.05.  slurmstepd's
sentences have not, and decide only what the record leaves open, or where Slurm does not answer.
Source: scontrol(1); both as seen on 22.05.8, 24.11.5 and 26.05.5 while jobs were ended in every way.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.causes import BY_SLURM
from cluster.slurm import maybe_moment, maybe_seconds

# The head of a line of slurmstepd: "slurmstepd-n1: error: ", since 26.05 "[2026-01-02T03:04:05.678] error: " instead,
# whose time has the form of slurm.conf's LogTimeFormat.
STEPD = re.compile(r"^(?:\[[^\]]+\] (?:slurmstepd\S*: )?|slurmstepd\S*: )error: ")

# "... error: *** JOB 5 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***".  That of scancel has no reason,
# and since 26.05 "DUE to SIGNAL Terminated".  A step's own line says less: it comes at the start of a grace period as
# well, and when srun ends the other ranks.  A job's comes without its end, too, on scancel --full --signal=TERM.
JOB_LINE = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE T[Oo] (?P<why>[A-Za-z ]+))?")
SENTENCES: Mapping[str, str] = {
    "PREEMPTION": "preempted",
    "TIME LIMIT": "time limit",
    "NODE FAILURE": "node failure",
    "JOB REQUEUE": "requeued",  # somebody's `scontrol requeue`
}
REASONS: Mapping[str, str] = {"TimeLimit": "time limit", "NodeDown": "node failure", "NodeFail": "node failure"}
WHY_REQUEUED = ("preempted", "node failure")  # what a sentence may say of a job that Slurm has put back into the queue


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What the controller holds of the job whose ranks have ended; an ending job is still COMPLETING."""

    state: str  # Slurm's word
    reason: str
    is_preempted: bool  # also while a grace period lasts and the state is still RUNNING
    is_requeued: bool  # Slurm has put it back into the queue since it began
    time_left_s: int | None = None  # of its time limit, below 0 when that has passed; None without one


def read_record(shown: str, restart_count: int) -> JobRecord | None:
    """Read what `scontrol show job` prints of one job; None where it is of no such form.

    restart_count: the job's when it began, as it is in the environment.
    """
    head = re.search(r"^ +JobState=(\S+) Reason=(\S+) ", shown, re.MULTILINE)
    restarts = re.search(r"^ +Requeue=\d+ Restarts=(\d+) ", shown, re.MULTILINE)
    times = re.search(r"^ +RunTime=(\S+) TimeLimit=(\S+) ", shown, re.MULTILINE)
    if head is None or restarts is None or times is None:
        return None
    run_s, limit_s = map(maybe_seconds, times.groups())
    return JobRecord(
        state=head[1],
        reason=head[2],
        is_preempted=re.search(r"^ +Preempt\S+ PreemptTime=\d", shown, re.MULTILINE) is not None,
        is_requeued=int(restarts[1]) > restart_count,
        time_left_s=None if run_s is None or limit_s is None else limit_s - run_s,
    )


def maybe_grace_end(shown: str) -> str | None:
    """When the grace period of a preempted job ends, UTC: its EndTime moves there; None while it has none.

    shown: what `scontrol show job` prints of it.
    """
    end = re.search(r" EndTime=(\S+) ", shown)
    record = read_record(shown, 0)
    if end is None or record is None or not record.is_preempted or record.state != "RUNNING":
        return None
    return maybe_moment(end[1])


def maybe_job_cause(maybe_record: JobRecord | None, job_lines: Sequence[str]) -> str | None:
    """Why Slurm ends the whole job; None when it does not.

    job_lines: what slurmstepd and others wrote to the job's standard error.
    """
    said = maybe_said(job_lines)
    if maybe_record is None:
        return said
    if maybe_record.is_preempted:
        return "preempted"
    if maybe_record.is_requeued:
        return said if said in WHY_REQUEUED else "requeued"
    if maybe_record.state == "COMPLETING":
        cancelled = "user cancel" if maybe_record.reason == "None" else None
        return REASONS.get(maybe_record.reason) or said or cancelled
    return BY_SLURM.get(maybe_record.state)


def maybe_said(job_lines: Sequence[str]) -> str | None:
    """What slurmstepd's last sentence about the whole job says; None without any."""
    found = [match for match in map(JOB_LINE.search, job_lines) if match]
    if not found:
        return None
    why = (found[-1]["why"] or "SIGNAL").strip()
    return "user cancel" if why.startswith("SIGNAL") else SENTENCES.get(why, "requeued")
