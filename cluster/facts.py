"""Facts: a run folder -> [facts] -> what it says of itself, by as few reads as can be.  Standard library only.

A list of runs may be long and its storage slow: a finished run costs one read, any other a handful.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.index import read_index
from cluster.owner import LOCAL_ROUTES, SUCCESSOR_ROUTE, is_anothers
from cluster.runs import RunFolder, manifest_steps, maybe_object, read_lines


@dataclass(frozen=True, slots=True)
class Submission:
    """One job, or one start on this machine, that a run was given."""

    job_id: str
    route: str  # as in the event `submitted`; empty where an old line of the index does not say
    time: str  # UTC
    cluster: str = ""  # in lower case; empty where an old line does not say, and on one machine
    command: str = ""  # the script, where the job has told it because it is not in the run folder


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run folder says."""

    run: RunFolder
    submissions: tuple[Submission, ...]  # since the last one by hand, oldest first
    attempt: int = 0  # the latest; 0 before the first
    summary: Mapping[str, Any] = field(default_factory=dict)
    claim: Mapping[str, Any] = field(default_factory=dict)
    verdict: Mapping[str, Any] = field(default_factory=dict)  # of the latest attempt
    beat: Mapping[str, Any] = field(default_factory=dict)  # the last heartbeat, of whichever attempt
    stop_mark: Mapping[str, Any] = field(default_factory=dict)
    is_cancelled: bool = False
    is_anothers: bool = False  # another user's, whose jobs Slurm may hide
    checkpoint_step: int | None = None
    checkpoint_s: float | None = None  # seconds since 1970

    @property
    def job_ids(self) -> list[str]:
        """Jobs of Slurm, oldest first."""
        return [one.job_id for one in self.submissions if one.route not in LOCAL_ROUTES and one.job_id]

    @property
    def is_local(self) -> bool:
        """Whether the run was started on one machine, without Slurm's knowledge."""
        return bool(self.submissions) and self.submissions[-1].route in LOCAL_ROUTES

    @property
    def has_begun(self) -> bool:
        """Whether ranks have been started since the last submission by hand."""
        if not self.submissions or not self.claim:
            return self.attempt > 0
        by_hand = self.submissions[0]
        return str(self.claim.get("job_id")) in {one.job_id for one in self.submissions} or (
            str(self.claim.get("time", "")) > by_hand.time
        )


def submissions_of(lines: Sequence[Mapping[str, Any]]) -> tuple[Submission, ...]:
    """The submissions since the last one by hand.  lines: of the index, or events `submitted`; oldest first."""
    found = [
        Submission(
            str(line["job_id"]),
            line.get("route") or "",
            str(line.get("time", "")),
            str(line.get("cluster") or "").lower(),
            str((line.get("job") or {}).get("command", "")),
        )
        for line in lines
        if line.get("job_id")
    ]
    by_hand = [place for place, one in enumerate(found) if one.route != SUCCESSOR_ROUTE]
    return tuple(found[by_hand[-1] :] if by_hand else found)


def submissions_in(run: RunFolder) -> tuple[Submission, ...]:
    """The same from the run's own events."""
    return submissions_of([event for event in read_lines(run.events) if event.get("event") == "submitted"])


def indexed(environ: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The lines of the index by run folder, the run submitted last first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in read_index(environ):
        lines = found.pop(line["run_dir"], [])
        found[line["run_dir"]] = [*lines, line]
    return dict(reversed(found.items()))


def read_facts(run: RunFolder, submissions: tuple[Submission, ...] | None = None) -> Facts:
    """Look into a run folder.

    submissions: where the index gives them with their routes; otherwise the events are read.

    Raises FormatError: another release wrote it.  Raises FileNotFoundError: the folder is gone.
    """
    summary = run.read_json(run.summary)
    if submissions is None or any(not one.route for one in submissions):
        submissions = submissions_in(run)
    if summary:
        return Facts(run, submissions, summary.get("attempts", 0), summary)
    attempt = run.latest_attempt()
    step, saved_s = newest_checkpoint(run) if attempt else (None, None)
    return Facts(
        run,
        submissions,
        attempt,
        claim=run.read_attempt(attempt) if attempt else {},
        verdict=run.read_json(run.verdict(attempt)) if attempt else {},
        beat=maybe_object(run.heartbeat) if attempt else {},
        stop_mark=maybe_object(run.stop_mark),
        is_cancelled=run.cancel_mark.exists(),
        is_anothers=is_anothers(run),
        checkpoint_step=step,
        checkpoint_s=saved_s,
    )


def newest_checkpoint(run: RunFolder) -> tuple[int | None, float | None]:
    """Its step, and when it was saved in seconds since 1970."""
    with contextlib.suppress(OSError):
        for step in reversed(manifest_steps(run.checkpoints)):
            return step, (run.checkpoints / f"step_{step:08d}.json").stat().st_mtime
    return None, None


def beat_age_s(facts: Facts) -> float:
    """Seconds since the last heartbeat, by the clock of the storage."""
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - facts.run.heartbeat.stat().st_mtime)
    return float("inf")
