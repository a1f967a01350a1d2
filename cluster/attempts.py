"""Attempts: a run folder -> [attempts] -> the story of a run, one line for each start of its ranks.

Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.runs import RunFolder, maybe_object, read_lines

MANY = 4  # node names are told one by one up to here


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the ranks."""

    number: int
    job_id: str
    nodes: tuple[str, ...]
    from_step: int
    to_step: int | None  # the last step that it is known to have done; None while it runs or when it left no word
    outcome: str  # finished, stopped, failed, or running
    reason: str
    action: str  # what was done: restart, requeue, leave or stop; empty while it runs

    def text(self) -> str:
        """`attempt 2: job 17 on n1, n2, step 40 to 120, preempted (SIGTERM), saved at step 120; then requeue`."""
        steps = f"step {self.from_step}{f' to {self.to_step}' if self.to_step is not None else ''}"
        then = f"; then {self.action}" if self.action in ("restart", "requeue") else ""
        told = self.outcome if self.outcome in ("finished", "running") else f"{self.outcome}: {self.reason}"
        return f"attempt {self.number}: job {self.job_id} on {places(self.nodes)}, {steps}, {told}{then}"


def places(nodes: tuple[str, ...]) -> str:
    """Node names, or how many there are."""
    if not nodes:
        return "?"
    return ", ".join(nodes) if len(nodes) <= MANY else f"{len(nodes)} nodes ({nodes[0]} ...)"


def read_attempts(run: RunFolder) -> list[Attempt]:
    """All attempts, oldest first."""
    events: dict[int, dict[str, Mapping[str, Any]]] = {}
    for event in read_lines(run.events):
        if isinstance(event, dict) and isinstance(event.get("attempt"), int):
            events.setdefault(event["attempt"], {})[str(event.get("event"))] = event
    return [read_attempt(run, number, events.get(number, {})) for number in range(1, run.latest_attempt() + 1)]


def read_attempt(run: RunFolder, number: int, events: Mapping[str, Mapping[str, Any]]) -> Attempt:
    """One of them.  events: its own, the last of each kind."""
    verdict = run.read_json(run.verdict(number))
    began, claim = events.get("attempt_started", {}), run.read_attempt(number)
    return Attempt(
        number,
        str(claim.get("job_id", began.get("job_id", "?"))),
        tuple(began.get("nodes", ())),
        int(events.get("resumed", {}).get("from_step", 0)),
        last_step(run, number, events, verdict),
        outcome_of(run, events, verdict),
        str(verdict.get("reason", "")),
        str(verdict.get("action", "")),
    )


def outcome_of(run: RunFolder, events: Mapping[str, Mapping[str, Any]], verdict: Mapping[str, Any]) -> str:
    """How it ended, by the supervisor or, without one, by its own events."""
    if verdict:
        return str(verdict.get("outcome"))
    if "finished" in events or "stopped" in events:
        return "finished" if "finished" in events else "stopped"
    return "running"


def last_step(
    run: RunFolder, number: int, events: Mapping[str, Mapping[str, Any]], verdict: Mapping[str, Any]
) -> int | None:
    """The last step that an attempt is known to have done."""
    for name in ("finished", "stopped"):
        if name in events:
            return int(events[name]["step"])
    record = maybe_object(run.failures / f"a{number:04d}_r{verdict.get('rank') or 0:05d}.json")
    if isinstance(record.get("step"), int):
        return int(record["step"])
    step = verdict.get("checkpoint_step")
    return step if isinstance(step, int) else None
