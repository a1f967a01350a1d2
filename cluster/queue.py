"""Queue: a user, or job ids -> [queue] -> what squeue says of each job, in one question and in bounded time.

Standard library only.  Sources: squeue(1), sacct(1), slurm.h (job_states), Slurm 22.05 to 25.11.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster import slurm

log = logging.getLogger("run")

ANSWER_S = 1.5  # a controller that hangs answers after MessageTimeout, 10 s by default; nobody wants to wait for that
FIELDS = "%i|%A|%T|%S|%L|%N|%x|%r|%o"  # the command comes last: it may hold anything

# Every word of job_states and of accounting -> what it means for somebody who waits.
KINDS: Mapping[str, str] = {
    "PENDING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "EXPEDITING": "pending",
    "CONFIGURING": "running",
    "POWER_UP_NODE": "running",
    "RUNNING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "REVOKED": "running",  # in a federation the job lives on, on a sibling cluster
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "UPDATE_DB": "running",
    "COMPLETED": "done",
    "BOOT_FAIL": "failed",
    "CANCELLED": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "LAUNCH_FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",  # with PreemptMode=CANCEL; a requeued job is listed as PENDING, and squeue is asked first
    "RECONFIG_FAIL": "failed",
    "TIMEOUT": "failed",
}


@dataclass(frozen=True, slots=True)
class QueueJob:
    """One job as squeue knows it; Slurm keeps ended ones for MinJobAge, 300 s by default."""

    job_id: str
    state: str  # Slurm's word, such as PENDING
    reason: str  # why it waits, or how it ended; empty where there is none
    maybe_start: str | None  # UTC; when it started, or is expected to, or may (BeginTime)
    time_left_s: int | None
    nodes: str  # host list; empty while it waits
    excluded: str  # host list
    command: str  # the batch script

    @property
    def kind(self) -> str:
        """pending, running, done, failed or unknown."""
        return kind_of(self.state)

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs; a word that nobody knows does, since it is listed."""
        return self.kind not in ("done", "failed")


def word_of(state: str) -> str:
    """Slurm's bare word in what a command prints: `CANCELLED by 54321` and `CANCELLED+` are CANCELLED."""
    return (state.split() or [""])[0].rstrip("+")


def kind_of(state: str) -> str:
    """pending, running, done, failed or unknown."""
    return KINDS.get(word_of(state), "unknown")


def ask_queue(
    environ: Mapping[str, str], *, job_ids: Sequence[str] = (), user: str = "", timeout_s: float = ANSWER_S
) -> dict[str, QueueJob]:
    """What squeue says of some jobs, or of all jobs of a user, by job id; of unknown ids nothing.

    A member of an array is there under both of its names, ARRAY_TASK and its number.

    Raises SlurmError: no answer in time, which says nothing about the jobs.
    """
    whose = [f"--jobs={','.join(job_ids)}"] if job_ids else [f"--user={user}"]
    try:
        command = ["squeue", "--noheader", "--states=all", *whose, f"--format={FIELDS}"]
        answer = slurm.run(command, environ, timeout_s=timeout_s)
    except slurm.SlurmError as error:
        if "Invalid job id specified" in str(error):  # of a single id; of several it leaves out what it has forgotten
            return {}
        raise
    found = [read_job(line) for line in answer.splitlines() if line.count("|") >= FIELDS.count("|")]
    for word in sorted({job.state for _, job in found if job.kind == "unknown"}):
        log.warning("%r is a job state that this release does not know", word)
    # A federation may list a job on each of its clusters; where it lives counts.
    found.sort(key=lambda one: one[1].state != "REVOKED")
    by_number = {number: job for number, job in found}
    return by_number | {job.job_id: job for _, job in found}


def read_job(line: str) -> tuple[str, QueueJob]:
    """One line of squeue: the number of a job, and what is said of it."""
    job_id, number, state, start, left, nodes, excluded, reason, command = line.split("|", FIELDS.count("|"))
    return number, QueueJob(
        job_id,
        word_of(state),
        "" if reason == "None" else reason,
        slurm.maybe_moment(start),
        slurm.maybe_seconds(left),
        "" if nodes == "(null)" else nodes,
        "" if excluded == "(null)" else excluded,
        command,
    )


def recorded_ends(job_ids: Iterable[str], environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> dict[str, str]:
    """The state of jobs by accounting, which gives the newest record of each; empty where there is no accounting."""
    asked = list(job_ids)
    if not asked:
        return {}
    command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,JobIDRaw,State"]
    try:
        answer = slurm.run([*command, f"--jobs={','.join(asked)}"], environ, timeout_s=timeout_s)
    except slurm.SlurmError:  # not installed, turned off, or away: the run folder has to do
        return {}
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 2]
    return {name: word_of(state) for *names, state in rows for name in names}
