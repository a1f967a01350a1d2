"""View: run folders and one question to Slurm -> [view] -> where runs stand, for status, why and logs.

Standard library only.  squeue is asked once for all runs, and within bounds: a controller that is away must not keep
anybody from what the run folders tell.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.clusters import cluster_name
from cluster.facts import Facts, Submission, indexed, read_facts, submissions_of
from cluster.index import is_of
from cluster.owner import LOCAL_ROUTES, other_cluster
from cluster.queue import ANSWER_S, FIELDS, QueueJob, ask_queue, recorded_ends
from cluster.run_state import BAD, LIVE, RunState, judge, noted
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_UNREACHED, FormatError, RunError, RunFolder, UsageError

NUM_READERS = 8  # of run folders at a time: shared storage answers many as fast as one
MAX_RECORDED = 200  # jobs that accounting is asked for; a longer list fails at some sites

Queue = Mapping[str, QueueJob] | None


@dataclass(frozen=True, slots=True)
class View:
    """Where one run stands, and what it says of itself."""

    facts: Facts
    state: RunState


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen of some runs."""

    views: tuple[View, ...]
    slurm_error: str = ""  # why squeue did not answer; empty where it did, or was not needed
    unreadable: tuple[str, ...] = ()  # run folders of another release, and why

    @property
    def is_short_of_slurm(self) -> bool:
        """Whether Slurm did not answer and a state depends on it."""
        return bool(self.slurm_error) and any(
            not view.facts.is_local and view.state.word in LIVE for view in self.views
        )


def exit_code_of(sight: Sight) -> int:
    """The exit code of a verb that was asked about one run."""
    if sight.is_short_of_slurm:
        return EXIT_UNREACHED
    state = sight.views[0].state
    return EXIT_FAILED if state.word in BAD or state.never_starts else EXIT_FINISHED


def look_at(run: RunFolder, environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> Sight:
    """Look at one run: its folder, squeue if it has jobs, and accounting where both are silent.

    Raises UsageError: another release wrote it, or a file of it is damaged.
    """
    facts = facts_of(run)
    queue: Queue = {}
    error = ""
    if not facts.is_local and not facts.summary:
        _, elsewhere = other_cluster(run, environ, timeout_s)
        if elsewhere:
            queue, error = None, f"its job is of cluster {elsewhere}: ask there"
        else:
            uid = str(run.path.stat().st_uid)
            whose: dict[str, Any] = {"job_ids": facts.job_ids} if facts.job_ids else {"user": uid}
            queue, error = ask(lambda: ask_queue(environ, **whose, timeout_s=timeout_s))
            facts = facts_of(run)  # what happened while Slurm was thinking
    forgotten = [] if queue is None else unexplained([facts], queue)
    state = judge(facts, queue, recorded_ends(forgotten, environ, timeout_s))
    return Sight((View(facts, state),), error)


def ask(question: Callable[[], dict[str, QueueJob]]) -> tuple[Queue, str]:
    """squeue's answer, or None and what went wrong."""
    try:
        return question(), ""
    except slurm.SlurmError as error:
        return None, str(error).split(f"{FIELDS}: ", 1)[-1]  # without the command


def unexplained(found: Iterable[Facts], queue: Mapping[str, QueueJob]) -> list[str]:
    """Jobs that squeue has forgotten, of runs whose folder does not say how they ended; the newest runs' first."""
    ids = [
        facts.job_ids[-1]
        for facts in found
        if facts.job_ids and not (facts.summary or (facts.has_begun and facts.verdict) or facts.is_cancelled)
    ]
    return [job_id for job_id in ids if job_id not in queue][:MAX_RECORDED]


def look_at_all(
    environ: Mapping[str, str], *, newest: int | None, maybe_root: Path | None = None, timeout_s: float = ANSWER_S
) -> Sight:
    """Look at the runs of the index, the one submitted last first.

    newest: how many of them beside those that are live; None for all.  maybe_root: only those below this folder.
    """
    lines, here = indexed(environ), cluster_name(environ, timeout_s)
    if maybe_root is not None:
        lines = {path: own for path, own in lines.items() if maybe_root in Path(path).parents}
    elsewhere = {path: str(own[-1]["cluster"]) for path, own in lines.items() if not is_of(here, own[-1])}
    with ThreadPoolExecutor(NUM_READERS + 1) as pool:
        asked = pool.submit(ask_for_all, lines.values(), environ, timeout_s)
        first = list(lines)[:newest]
        read = dict(zip(first, pool.map(maybe_facts, first, [lines[path] for path in first]), strict=True))
        queue, error = asked.result()
        more = [path for path in lines if path not in read and may_live(lines[path], queue)]
        read |= dict(zip(more, pool.map(maybe_facts, more, [lines[path] for path in more]), strict=True))
    found = [one for path in lines if isinstance(one := read.get(path), Facts)]
    ends = {} if queue is None else recorded_ends(unexplained(found, queue), environ, timeout_s)
    views = [View(one, judge_here(one, elsewhere.get(str(one.run.path)), queue, ends)) for one in found]
    kept = [view for view in views if str(view.facts.run.path) in first or not view.state.is_over]
    return Sight(tuple(kept), error, tuple(str(one) for one in read.values() if isinstance(one, UsageError)))


def judge_here(facts: Facts, maybe_cluster: str | None, queue: Queue, ends: Mapping[str, str]) -> RunState:
    """Where a run stands; of one whose job is of another cluster only its folder can tell."""
    if maybe_cluster is None:
        return judge(facts, queue, ends)
    return noted(judge(facts, None, {}), f"its job is of cluster {maybe_cluster}")


def ask_for_all(
    runs: Iterable[Sequence[Mapping[str, Any]]], environ: Mapping[str, str], timeout_s: float
) -> tuple[Queue, str]:
    """squeue's answer for the user's jobs; not asked where no run ever had one."""
    if not any(line.get("route") not in LOCAL_ROUTES for lines in runs for line in lines):
        return {}, ""
    return ask(lambda: ask_queue(environ, user=str(os.getuid()), timeout_s=timeout_s))


def maybe_facts(path: str, lines: Sequence[Mapping[str, Any]]) -> Facts | UsageError | None:
    """What a run folder says; None when it is gone."""
    try:
        return facts_of(RunFolder(Path(path)), submissions_of(lines))
    except UsageError as error:
        return error
    except OSError:
        return None


def facts_of(run: RunFolder, submissions: tuple[Submission, ...] | None = None) -> Facts:
    """What a run folder says.

    Raises FormatError: another release wrote it.  Raises RunError: a file of it is damaged.
    Raises FileNotFoundError: it is gone.
    """
    try:
        return read_facts(run, submissions)
    except FormatError:
        raise
    except ValueError as error:  # of json
        raise RunError(f"{run.path} holds a damaged file: {error}") from None


def may_live(lines: Sequence[Mapping[str, Any]], queue: Queue) -> bool:
    """Whether a run older than those that are shown anyway may be live still, without a look into its folder."""
    last = submissions_of(lines)[-1:] or (Submission("", "", ""),)
    if last[0].route in LOCAL_ROUTES:
        return last[0].job_id.isdigit() and Path(f"/proc/{last[0].job_id}").exists()
    return queue is None or any(one.job_id in queue and queue[one.job_id].is_alive for one in submissions_of(lines))
