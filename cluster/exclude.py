"""Bad nodes: a run's history -> [exclude] -> nodes that its next job must not get.  Standard library only.

A node that fails twice within a day while the others work is left out, and one that cannot start ranks at once.  Slurm
changes the excluded nodes of waiting jobs only, so it is done when a job has just been requeued, or to the successor
that waits.
Source: scontrol(1), ExcNodeList; Slurm 22.05 takes it at once after `scontrol requeue`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.allocation import expand_nodelist
from cluster.plan import LaunchPlan
from cluster.requeue import Past
from cluster.runs import RunFolder, seconds_between, utc_now

log = logging.getLogger("run")

MAX_FAILURES = 2  # of one node
WINDOW_S = 24 * 3600.0  # older failures are forgotten, and the node comes back
# What may be a node's fault.  A lost connection names who noticed it, and a failure of the program is no node's.
NODE_CAUSES = frozenset(("killed", "hang", "node failure", "launch", "unfit node"))
SURE_CAUSES = frozenset(("launch", "unfit node"))  # Slurm or the node itself says so: once is enough

NODE_UNFIT = "node_unfit"  # event of a job whose first node could not even start the supervisor, see node_check


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """An attempt that one node may have ended."""

    attempt: int
    time: str  # ISO 8601, UTC
    node: str
    is_sure: bool = False  # no second failure is needed


@dataclass(frozen=True, slots=True)
class Blame:
    """What is laid on nodes."""

    failures: tuple[NodeFailure, ...] = ()
    bad: tuple[str, ...] = ()

    def absolve(self, history: Sequence[Past]) -> list[Past]:
        """The history, from attempt 1 on, with the failures of bad nodes laid on them and no longer on the run."""
        blamed = {failure.attempt for failure in self.failures if failure.node in self.bad}
        return [
            replace(past, cause="bad node") if number in blamed else past
            for number, past in enumerate(history, start=1)
        ]

    def tell(self, run: RunFolder, attempt: int, job_id: str) -> None:
        """Say whether this attempt's node is left out from now on."""
        for failure in self.failures:
            if failure.attempt == attempt and failure.node in self.bad:
                run.note_event("node_excluded", attempt=attempt, job_id=job_id, node=failure.node)
                count = sum(other.node == failure.node for other in self.failures)
                how = "is at fault" if failure.is_sure else f"failed {count} times while others worked"
                log.warning("node %s %s: left out", failure.node, how)


def node_failures(
    run: RunFolder, last: Mapping[int, Mapping[str, Any]], policy: Mapping[str, str]
) -> list[NodeFailure]:
    """The failures of a run that can be laid on a node, oldest first.

    last: attempt -> its verdict (cause, rank, node, time) where that is not in the run folder yet.
    policy: the spec's; a cause that is to stop the run is not laid on a node.
    """
    causes = {cause for cause in NODE_CAUSES if policy.get(cause) != "stop"}
    events, found = run.read_events(), []
    for event in events:
        if event["event"] == NODE_UNFIT and "unfit node" in causes:
            found.append(NodeFailure(0, event["time"], event["node"], is_sure=True))
        if event["event"] != "attempt_started":
            continue
        attempt = event["attempt"]
        verdict = last.get(attempt) or run.read_json(run.verdict(attempt))
        if verdict.get("cause") in causes:
            is_sure = verdict["cause"] in SURE_CAUSES
            found += [
                NodeFailure(attempt, verdict["time"], node, is_sure)
                for node in nodes_at_fault(verdict, event["nodes"], event["world_size"])
            ]
    return found


def nodes_at_fault(verdict: Mapping[str, Any], nodes: Sequence[str], world_size: int) -> list[str]:
    """The nodes that a verdict speaks against: those that it names, else the one on which its rank ran.

    nodes, world_size: of the attempt.
    """
    named = verdict.get("nodes") or [verdict.get("node")]
    if known := [node for node in named if node in nodes]:
        return known
    by_rank = maybe_node_of_rank(verdict.get("rank"), nodes, world_size)
    return [by_rank] if by_rank is not None else []


def maybe_node_of_rank(rank: int | None, nodes: Sequence[str], world_size: int) -> str | None:
    """Where a rank runs when each of several nodes has as many ranks; None where that is not so, or no rank is known.

    srun fills one node after the other.
    """
    if rank is None or len(nodes) < 2 or world_size % len(nodes):
        return None
    return nodes[rank // (world_size // len(nodes))]


def bad_nodes(failures: Sequence[NodeFailure], now: str, num_nodes: int) -> tuple[str, ...]:
    """Nodes that failed within WINDOW_S: once where that is sure, else MAX_FAILURES times; sorted.  Pure.

    num_nodes: of the job.  Where more than a quarter of as many nodes seem bad (though one always may), it is not the
    nodes, and only the sure ones are named.
    """
    recent = [failure for failure in failures if seconds_between(failure.time, now) < WINDOW_S]
    sure = {failure.node for failure in recent if failure.is_sure}
    counts = Counter(failure.node for failure in recent)
    seem = {node for node, count in counts.items() if count >= MAX_FAILURES} - sure
    return tuple(sorted(sure | seem if len(seem) <= max(1, num_nodes // 4) else sure))


def kept_nodes(plan: LaunchPlan) -> tuple[str, ...]:
    """Nodes that the spec asks for by name: the job cannot do without them."""
    wanted = plan.sbatch.get("nodelist")
    return expand_nodelist(str(wanted)) if wanted else ()


def find_blame(run: RunFolder, plan: LaunchPlan, last: Mapping[int, Mapping[str, Any]]) -> "Blame":
    """The bad nodes of a run at this moment.  last: see node_failures."""
    failures = node_failures(run, last, plan.policy)
    bad = bad_nodes(failures, utc_now(), plan.num_nodes)
    return Blame(tuple(failures), tuple(node for node in bad if node not in kept_nodes(plan)))


def excluded(own: str, before: frozenset[str], bad: Sequence[str]) -> str:
    """What the next job must not get, as sbatch takes it: empty without any.  Pure.

    own: the host list that this job must not get.  before: nodes that were ever left out of the run as bad; those of
    them that are bad no more come back.  bad: nodes that are bad now.
    """
    kept = [node for node in (expand_nodelist(own) if own else ()) if node not in before]
    return ",".join([*kept, *(node for node in bad if node not in kept)])


def excluded_before(run: RunFolder) -> frozenset[str]:
    """Nodes that were ever left out of a run as bad."""
    return frozenset(event["node"] for event in run.read_events() if event["event"] in ("node_excluded", NODE_UNFIT))
