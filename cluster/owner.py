"""Owner: a run folder -> [owner] -> the job or process that runs it now.  Standard library only.

Verbs ask it whom to tell, and a resumption whether anybody is left.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import clusters, index, slurm
from cluster.clusters import cluster_name
from cluster.identity import RunJob, own_states
from cluster.runs import RunFolder, UsageError

LOCAL_ROUTES = frozenset(("local", "direct"))  # no job of Slurm: a supervisor on one machine, or jobs.train by itself
SUBMISSION_EVENTS = frozenset(("submitting", "submitted", "submission_refused"))
SUCCESSOR_ROUTE = "successor"  # a job that waits behind another of the same run


class ElsewhereError(UsageError):
    """The run's job is of another cluster, so that nothing can be asked or done here."""


class UnseenError(slurm.SlurmError):
    """Slurm may hide the run's job from this user."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A job in Slurm's queue, or a process on this machine."""

    job_id: str  # Slurm's; on the local route submitit's
    state: str  # Slurm's word, such as PENDING; RUNNING for a process
    maybe_pid: int | None = None  # who takes stop signals; None for a job
    reason: str = ""  # Slurm's, such as Priority
    behind: tuple[str, ...] = ()  # successors that wait in the queue


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb did to a run, in words and for programs."""

    action: str  # one word
    text: str  # one line
    exit_code: int
    job_id: str = ""  # empty where there was none


def jobs_since_submission(run: RunFolder) -> list[dict[str, Any]]:
    """The events of the newest submission by hand and of its successors; empty when it was cut short before it."""
    submitted = [event for event in run.read_events() if event["event"] == "submitted"]
    by_hand = [place for place, event in enumerate(submitted) if event.get("route") != SUCCESSOR_ROUTE]
    return submitted[by_hand[-1] :] if by_hand else submitted


def job_ids(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The jobs of some submissions, oldest first."""
    return [str(event["job_id"]) for event in events if event["job_id"]]


def is_cut_short(run: RunFolder) -> bool:
    """Whether the newest submission to Slurm never heard of its job, which may be there all the same."""
    told = [event for event in run.read_events() if event["event"] in SUBMISSION_EVENTS]
    return bool(told) and told[-1]["event"] == "submitting" and told[-1]["route"] == "slurm"


def note_submission(run: RunFolder, job: RunJob, environ: Mapping[str, str]) -> None:
    """Enter the job that this process runs in, where the process that submitted it could not.

    Called by the supervisor of a submitted run.
    """
    cluster = cluster_name(environ)
    submitted = [event for event in run.read_events() if event["event"] == "submitted"]
    if not any(str(event["job_id"]) == job.job_id and index.is_of(cluster, event) for event in submitted):
        told = {"route": "slurm", "noted_by": "job", "cluster": cluster, "job": dict(job.record)}
        run.append_event("submitted", attempt=run.latest_attempt(), job_id=job.job_id, **told)
        index.register(run, job.job_id, environ, cluster=cluster)


def last_submission(run: RunFolder) -> dict[str, Any]:
    """The event of the newest submission; empty when a submission was cut short before it."""
    return (jobs_since_submission(run) or [{}])[-1]


def other_cluster(run: RunFolder, environ: Mapping[str, str], timeout_s: float = clusters.ANSWER_S) -> tuple[str, str]:
    """The newest job of a run and its cluster, where that is not the one of this machine; else both empty.

    An older run folder does not tell, but a line of the index may.
    """
    told = [event for event in run.read_events() if event["event"] in SUBMISSION_EVENTS]
    if not is_cut_short(run):
        told = [event for event in told if event["event"] == "submitted"]
    if not told or told[-1].get("route") in LOCAL_ROUTES:
        return "", ""
    newest = told[-1]
    if "cluster" not in newest:
        lines = [line for line in index.read_index(environ) if line["run_dir"] == str(run.path)]
        newest = {**newest, "cluster": lines[-1].get("cluster") if lines else ""}
    if not newest["cluster"] or index.is_of(cluster_name(environ, timeout_s), newest):
        return "", ""
    return str(newest["job_id"]), str(newest["cluster"])


def refuse_elsewhere(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Raises ElsewhereError: the run's job is of another cluster."""
    job_id, cluster = other_cluster(run, environ)
    if cluster:
        its_job = f"its job {job_id}" if job_id else "its job"
        raise ElsewhereError(
            f"{run.path}: {its_job} is of cluster {cluster}, and this machine's is {cluster_name(environ)}: ask there"
        )


def refuse_unwritable(run: RunFolder) -> None:
    """Raises UsageError: this user cannot leave a mark in the run folder, so that the job would not obey it."""
    if not os.access(run.path, os.W_OK):
        raise UsageError(f"{run.path} belongs to {owner_name(run)}, and you may not write there: ask them")


def owner_name(run: RunFolder) -> str:
    """The user whose run it is; a number where this machine knows no name."""
    try:
        return run.path.owner()
    except KeyError:
        return f"user {run.path.stat().st_uid}"


def is_anothers(run: RunFolder) -> bool:
    """Whether a run belongs to another user, whose jobs Slurm may hide (PrivateData, slurm.conf(5)); not from root."""
    return os.getuid() not in (0, run.path.stat().st_uid)


def maybe_owner(run: RunFolder, environ: Mapping[str, str]) -> Owner | None:
    """What runs a run now, or will; None when nobody does, as far as this machine and Slurm can tell.

    Of a chain of jobs it is the newest that has started, or else the first that waits.

    Raises SlurmError: Slurm did not say.  Raises UnseenError: it may hide the job.
    """
    submission = last_submission(run)
    if submission.get("route") in LOCAL_ROUTES:
        return maybe_process(run, submission)
    ids = job_ids(jobs_since_submission(run))
    if is_cut_short(run):
        ids += [job_id for job_id in slurm.jobs_of(run.path, environ) if job_id not in ids]
    states = own_states(run, ids, environ)
    alive = [job_id for job_id in ids if job_id in states and not slurm.has_ended(states[job_id])]
    if not alive and not states and is_anothers(run):
        raise UnseenError(f"{run.path} belongs to {owner_name(run)}, and Slurm shows this user no job of it")
    if not alive:
        return None
    waiting = [job_id for job_id in alive if states[job_id].state == "PENDING"]
    started = [job_id for job_id in alive if job_id not in waiting]
    owner = started[-1] if started else waiting[0]
    behind = tuple(job_id for job_id in waiting if job_id != owner)
    return Owner(owner, states[owner].state, reason=states[owner].reason, behind=behind)


def unanswered(error: slurm.SlurmError) -> str:
    """Why nobody knows who runs a run, in words."""
    return str(error) if isinstance(error, UnseenError) else f"Slurm was not reached: {error}"


def maybe_process(run: RunFolder, submission: Mapping[str, Any]) -> Owner | None:
    """The process that claimed the latest attempt; before the first claim since the submission, submitit's."""
    attempt, job_id = run.latest_attempt(), submission["job_id"]
    claim = run.read_attempt(attempt)
    if claim and is_alive(int(claim["pid"]), claim["host"]):
        return Owner(job_id, "RUNNING", int(claim["pid"]))
    is_starting = attempt == submission["attempt"] and submission["route"] == "local"
    if is_starting and str(run.submitit).encode() in command_of(int(job_id)):
        return Owner(job_id, "RUNNING", int(job_id))
    return None


def is_alive(pid: int, host: str) -> bool:
    """Whether a supervisor of this machine is alive; of another machine nothing can be said, and it counts as dead."""
    command = command_of(pid) if host == socket.gethostname() else b""
    return b"cluster.supervise" in command or b"jobs.train" in command


def command_of(pid: int) -> bytes:
    """Command line of a process of this machine; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def nobody(run: RunFolder, what: str) -> Answer:
    """The answer where there is nothing to do.  what: the verb."""
    if run.summary.exists():
        return Answer("none", f"{run.path} is finished; nothing to {what}", exit_code=1)
    host = run.read_attempt(run.latest_attempt()).get("host", "")
    is_elsewhere = last_submission(run).get("route") in LOCAL_ROUTES and host not in ("", socket.gethostname())
    hint = f" on this machine, and its last attempt was on {host}: ask there" if is_elsewhere else ""
    return Answer("none", f"nobody runs {run.path}{hint}; nothing to {what}", exit_code=1)


def tell(run: RunFolder, answer: Answer, *, as_json: bool) -> int:
    """Print a verb's answer and return its exit code; with as_json standard output holds one object."""
    if as_json:
        fields = {"run_dir": str(run.path), "run_id": run.run_id, "job_id": answer.job_id or None}
        print(json.dumps({**fields, "action": answer.action}), flush=True)
    if not as_json or answer.exit_code:
        print(answer.text, file=sys.stderr if answer.exit_code else sys.stdout)
    return answer.exit_code
