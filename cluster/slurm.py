"""Slurm's commands: the one place that runs them.  Standard library only.

Argument lists, never a shell; parsable output; what a command wrote to standard error goes into the exception.
Sources: squeue(1), scontrol(1), slurm.conf(5); forms seen on 22.05, 24.11 and 26.05.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster.runs import utc_text

ANSWER_S = 30.0  # a controller that hangs answers after slurm.conf's MessageTimeout, 10 s by default
TEST_ONLY_S = 15.0

# PREEMPTED is a job under PreemptMode=CANCEL: a requeued job shows as PENDING.  REVOKED is no end: in a federation the
# job lives on, on a sibling cluster; squeue(1), "JOB STATE CODES".
ENDED_STATES = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)

# What a user's profile may hold for Slurm's commands; it would hide jobs that are asked for, or widen an order.
USERS_OPTIONS = re.compile(r"(SQUEUE|SINFO|SCONTROL|SCANCEL|SACCT)_")

# Without these a job in a hidden partition is in no list, a waiting member of an array is told on one line with
# others, and times take the form of the user's choice.  "ENVIRONMENT VARIABLES" of squeue(1), sinfo(1), scontrol(1).
QUESTIONS: Mapping[str, Mapping[str, str]] = {
    "squeue": {"SQUEUE_ALL": "1", "SQUEUE_ARRAY": "1", "SLURM_TIME_FORMAT": "standard"},
    "sinfo": {"SINFO_ALL": "1", "SLURM_TIME_FORMAT": "standard"},
    "scontrol": {"SCONTROL_ALL": "1", "SLURM_TIME_FORMAT": "standard"},
}

FIELD_END = "\x1f"  # between the fields of a squeue that is asked for paths, which may hold anything printable

# Slurm's last words on a question or an order: to ask again would change nothing.  All else may pass: a controller that
# restarts or stands by, a munged that is down, a prolog that still runs, words of a later release.
# Source: slurm_errno.c, Slurm 22.05 to 25.11.
FINAL_WORDS = (
    # the command itself
    "is not on path", "cannot be started", "unrecognized option", "invalid option", "requires an argument",
    "doesn't allow an argument",
    # who asks
    "access/permission denied", "access denied", "invalid user id", "invalid group id", "group not permitted",
    # the job that it is about
    "invalid job id", "already completing or completed", "job has already", "job is not", "no longer pending execution",
    # what is asked for
    "operation is presently disabled", "operation not supported", "invalid account", "invalid qos", "invalid partition",
    "no partition specified", "invalid node name", "invalid feature", "invalid generic resource", "invalid gres",
    "invalid trackable resource", "invalid license", "invalid time", "invalid wckey", "invalid job array",
    "invalid dependency", "invalid --", "specification invalid", "specification can not be satisfied", "is not a valid",
    "more processors requested than permitted", "requested node configuration is not available",
    "requested nodes not in this partition", "memory required by task is not available", "requested time limit",
    "requested reservation is invalid", "requested more tasks than available", "insufficient gres",
    "job dependency problem", "violates accounting/qos policy", "time limit specification required",
)  # fmt: skip


class SlurmError(RuntimeError):
    """A Slurm command failed, or Slurm did not answer."""


class StrangerError(SlurmError):
    """Slurm's job of that id is not the run's, or there is none; asked again it would say the same."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What squeue says of one job."""

    state: str  # Slurm's word, such as PENDING or RUNNING
    reason: str
    nodes: str  # host list, empty while pending
    time_left_s: int | None = None  # of its time limit; None without one


def run(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = ANSWER_S) -> str:
    """Run one command and return its standard output; errors as of call()."""
    return call(argv, environ, timeout_s=timeout_s).stdout


def call(
    argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = ANSWER_S, maybe_input: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run one command and return what it wrote to standard output and error.

    maybe_input: text for its standard input.

    Raises SlurmError: it is not installed, failed, or gave no answer in time.
    """
    kept = {name: value for name, value in environ.items() if not USERS_OPTIONS.match(name)}
    try:
        done = subprocess.run(
            argv,
            env={**kept, **QUESTIONS.get(argv[0], {})},
            input=maybe_input,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmError(f"{argv[0]} is not on PATH: is this a machine of the cluster?") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{' '.join(argv)}: no answer within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def is_final(error: SlurmError) -> bool:
    """Whether Slurm, or the lack of it here, has refused for good; else it may do later what it was asked for."""
    words = str(error).lower()
    return isinstance(error, StrangerError) or any(final in words for final in FINAL_WORDS)


def literal_path(path: Path) -> str:
    """A path for --output, in which Slurm would expand % and what follows it; sbatch(1), "filename pattern"."""
    return str(path).replace("%", "%%")


def in_directive(value: str | int | bool) -> str | int | bool:
    """A value for a quoted #SBATCH line: sbatch takes a backslash for an escape there, in single quotes too.

    So do 22.05, 24.11 and 26.05.
    """
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def maybe_job_state(job_id: str, environ: Mapping[str, str]) -> JobState | None:
    """What squeue says of a job; None when Slurm answered and no longer knows it.

    Raises SlurmError: no answer, which says nothing about the job.
    """
    return job_states([job_id], environ).get(job_id)


def job_states(job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """What squeue says of each job that Slurm still knows, in one question.

    job_ids: of an array member ARRAY_TASK, or the number that Slurm gives it besides, which may be the array's own.

    Raises SlurmError: no answer.
    """
    if not job_ids:
        return {}
    asked = ["squeue", "-h", "-t", "all", "-j", ",".join(job_ids), "-o", "%i|%A|%T|%r|%N|%L"]
    try:
        answer = run(asked, environ)
    except SlurmError as error:
        if "Invalid job id specified" in str(error):  # of a single id; of several it leaves out what it has forgotten
            return {}
        raise
    found: dict[str, JobState] = {}
    for line in answer.splitlines():
        if line.count("|") == 5:  # squeue lists all members when it is asked for an array's own id
            shown, number, state, reason, nodes, left = line.split("|")
            for job_id in {shown, number}.intersection(job_ids):
                add_state(found, job_id, JobState(state, reason, nodes, maybe_seconds(left)))
    return found


def add_state(found: dict[str, JobState], job_id: str, job: JobState) -> None:
    """Enter a job, which a federation may list on each of its clusters: the one where it lives counts."""
    if job_id not in found or found[job_id].state == "REVOKED":
        found[job_id] = job


def maybe_seconds(text: str) -> int | None:
    """Seconds of a duration as squeue prints it, [[D-]H:]M:S; None for UNLIMITED, NOT_SET, INVALID."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def maybe_moment(text: str) -> str | None:
    """A local time as Slurm shows it, in UTC; None for N/A, Unknown and their like."""
    try:
        return utc_text(datetime.fromisoformat(text))
    except ValueError:
        return None


def jobs_of(folder: Path, environ: Mapping[str, str], *, timeout_s: float = ANSWER_S) -> dict[str, str]:
    """This user's jobs whose script or log lies in a run folder: job id -> state, oldest first.

    Both are part of a job from the moment that Slurm takes it, and a run folder belongs to one run.

    Raises SlurmError: no answer.
    """
    fields = ",".join(f"{name}:{FIELD_END}" for name in ("JobArrayID", "State", "StdOut", "Command"))
    answer = run(["squeue", "-h", "--me", "-t", "all", "-S", "i", "-O", fields], environ, timeout_s=timeout_s)
    jobs = [[text.strip() for text in line.split(FIELD_END)] for line in answer.splitlines()]
    return {job[0]: job[1] for job in jobs if len(job) == 5 and any(lies_in(folder, path) for path in job[2:4])}


def lies_in(folder: Path, shown: str) -> bool:
    """Whether a path, as Slurm shows it, is inside a folder; squeue shows a log's path as sbatch was given it."""
    return shown.startswith((f"{folder}/", f"{literal_path(folder)}/"))


def has_ended(job: JobState | None) -> bool:
    """Whether the job has left the queue for good; None is a job that Slurm no longer knows."""
    return job is None or job.state in ENDED_STATES


def kill_wait_s(environ: Mapping[str, str]) -> float:
    """slurm.conf's KillWait: seconds between TERM and KILL."""
    answer = run(["scontrol", "show", "config"], environ)
    match = re.search(r"^KillWait\s*=\s*(\d+)", answer, re.MULTILINE)
    if match is None:
        raise SlurmError("scontrol show config names no KillWait")
    return float(match.group(1))


def maybe_time_limit_s(job_id: str, environ: Mapping[str, str]) -> int | None:
    """A job's time limit in seconds; None when it has none."""
    return maybe_seconds(run(["squeue", "-h", "-j", job_id, "-o", "%l"], environ).strip())


def submit(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Submit a batch script; returns the job id.

    words: long options, the script, and its arguments.

    Raises SlurmError: refused, or no answer; then Slurm may have taken the job all the same.
    """
    answer = run(["sbatch", "--parsable", *words], environ)
    job_id = maybe_submitted_id(answer)
    if job_id is None:
        raise SlurmError(f"no job id in what sbatch printed: {answer!r}")
    return job_id


def maybe_submitted_id(answer: str) -> str | None:
    """The job id in what `sbatch --parsable` printed: the last line that is digits, with a cluster's name or without.

    A site's wrapper may print banners before it, with numbers in them.
    """
    found = [match for match in (re.fullmatch(r"(\d+)(;\S+)?", line.strip()) for line in answer.splitlines()) if match]
    return found[-1][1] if found else None


def would_start(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether there are nodes for a job, be they busy.  words: as for submit().

    Raises SlurmError: no answer.
    """
    try:
        run(["sbatch", "--test-only", *words], environ)
    except SlurmError as error:
        if "allocation failure" not in str(error):
            raise
        return False
    return True


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `sbatch --test-only` says of a script."""

    start: str | None  # local time of the cluster, ISO 8601, as things are now; None when Slurm refuses the job
    nodes: str  # host list
    words: str  # Slurm's own


def forecast(script: str, environ: Mapping[str, str]) -> Forecast:
    """Ask Slurm when a script would start; nothing is submitted.

    Raises SlurmError: no answer.
    """
    try:
        said = call(["sbatch", "--test-only"], environ, timeout_s=TEST_ONLY_S, maybe_input=script).stderr
    except SlurmError as error:
        if not is_final(error) or "exit code" not in str(error):
            raise
        return Forecast(None, "", str(error).partition(": exit code ")[2].partition(": ")[2])
    # "Job 7 to start at TIME using 2 processors on nodes n[1-2] in partition low", on 26.05 "... at TIME a using ..."
    match = re.search(r"^sbatch: (Job \d+ to start at (\S+) .*\busing .* on nodes (\S+).*)$", said, re.MULTILINE)
    if match is None:
        return Forecast("", "", said.strip())
    return Forecast(match[2], match[3], match[1])


def maybe_recorded_state(job_id: str, environ: Mapping[str, str]) -> str | None:
    """A job's end by accounting, such as CANCELLED; None when it knows none.

    Raises SlurmError: no answer, or there is no accounting.
    """
    answer = run(["sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}"], environ)
    words = answer.split()  # "CANCELLED by 1000"
    return words[0] if words else None


@dataclass(frozen=True, slots=True)
class JobTerms:
    """On which terms a job runs."""

    may_be_requeued: bool
    is_batch: bool  # there is a script that could run again; not in salloc
    excluded: str = ""  # nodes that it must not get: a host list


def job_terms(job_id: str, environ: Mapping[str, str]) -> JobTerms:
    """What `scontrol show job` says about coming back.

    Raises SlurmError: no answer.
    """
    shown = run(["scontrol", "show", "job", job_id], environ)
    excluded = re.search(r" ExcNodeList=(\S+)", shown)
    return JobTerms(
        may_be_requeued=" Requeue=0 " not in shown,
        is_batch=re.search(r" BatchFlag=[1-9]", shown) is not None,  # counts the starts: 2 after a requeue
        excluded=excluded[1] if excluded and excluded[1] != "(null)" else "",
    )


def maybe_error_path(job_id: str, environ: Mapping[str, str]) -> Path | None:
    """Where the batch step's standard error goes; None for a job without a batch script.

    StdErr is empty where it is the same file as StdOut, on 26.05; up to 24.11 the path is there twice.
    """
    shown = run(["scontrol", "show", "job", job_id], environ)
    paths = dict(re.findall(r"^ +(StdErr|StdOut)=(.+)$", shown, re.MULTILINE))
    path = paths.get("StdErr", paths.get("StdOut"))
    return None if path is None else Path(path)


def node_addresses(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """NodeAddr of each node, as slurm.conf gives it."""
    answer = run(["scontrol", "show", "node", "--oneliner", ",".join(nodes)], environ)
    found = re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", answer)
    missing = set(nodes) - {name for name, _ in found}
    if missing:
        raise SlurmError(f"scontrol show node gives no NodeAddr for {', '.join(sorted(missing))}")
    return dict(found)
