"""Conditions: a run's keys, setup and interpreter -> [conditions] -> whether it has trained under them before.

What is missing on a node is the node's fault only if it was there on others: if this run has done a step with these
same keys.  A run that has not is told that its spec or its environment is wrong.  Standard library only.
"""

import hashlib

from cluster.plan import LaunchPlan
from cluster.runs import RunFolder

DIGITS = 16


def conditions_of(run: RunFolder, plan: LaunchPlan) -> str:
    """Digest of what a start depends on: spec.yaml, which holds env and setup too, and the interpreter's path.

    As a shell makes it, see node_check: `{ cat spec.yaml; echo PYTHON; } | sha256sum | cut -c-16`.
    """
    return hashlib.sha256(run.spec.read_bytes() + f"{plan.supervisor[0]}\n".encode()).hexdigest()[:DIGITS]


def has_trained(run: RunFolder, conditions: str) -> bool:
    """Whether an attempt under these conditions has done a step."""
    events = run.read_events()
    begun = {event["attempt"] for event in events if event.get("conditions") == conditions}
    return any(event["event"] == "first_step" and event["attempt"] in begun for event in events)
