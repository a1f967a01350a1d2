"""Successor: a run folder and its plan -> [successor] -> one more job of the same run.  Standard library only.

A successor runs the same supervisor in the same run folder once the job before it has ended.  Its script needs nothing
of submitit.  chain.py says when one is submitted.
Source: sbatch(1), --dependency, --kill-on-invalid-dep, Slurm 22.05.
"""

import logging
import shlex
from collections.abc import Mapping
from typing import Any

from cluster import index, slurm
from cluster.clusters import cluster_name
from cluster.environment import clean_environment
from cluster.owner import SUCCESSOR_ROUTE
from cluster.plan import LaunchPlan
from cluster.runs import RunFolder, write_atomic

log = logging.getLogger("run")

# Of the first job alone: when it was to start.
FIRST_ONLY = frozenset(("dependency", "kill-on-invalid-dep", "hold", "begin"))


def submit_successor(
    run: RunFolder, plan: LaunchPlan, predecessor: str, condition: str, environ: Mapping[str, str], excluded: str = ""
) -> str:
    """Submit a job that goes on with a run; returns its id.

    condition: afternotok or afterany, the predecessor's end.  excluded: as in sbatch_words.

    Raises SlurmError: refused, or no answer.
    """
    write_script(run, plan)
    waits = [f"--dependency={condition}:{predecessor}", "--kill-on-invalid-dep=yes"]
    script = [str(run.successor_script), "--after", predecessor]
    job_id = slurm.submit([*waits, *sbatch_words(plan, excluded), *script], clean_environment(environ))
    told = {"route": SUCCESSOR_ROUTE, "predecessor": predecessor, "cluster": cluster_name(environ)}
    run.note_event("submitted", attempt=run.latest_attempt(), job_id=job_id, **told)
    index.register(run, job_id, environ, SUCCESSOR_ROUTE, told["cluster"])
    log.info("job %s waits behind job %s (%s)", job_id, predecessor, condition)
    return job_id


def submit_beforehand(run: RunFolder, plan: LaunchPlan, job_id: str, environ: Mapping[str, str]) -> None:
    """Submit all successors of a job, each behind the one before it.

    Raises SlurmError: refused, or no answer.
    """
    for _ in range(plan.num_successors):
        job_id = submit_successor(run, plan, job_id, "afterany", environ)


def script_text(plan: LaunchPlan) -> str:
    """A successor's batch script: the same preamble and supervisor as the first job's."""
    return "\n".join(["#!/bin/bash", *plan.shell_lines, f'begin_blocked {shlex.join(plan.supervisor)} "$@"', ""])


def write_script(run: RunFolder, plan: LaunchPlan) -> None:
    """Put the script into the run folder, where it is not there already: a full disk has no room for the same again."""
    text = script_text(plan)
    if not (run.successor_script.exists() and run.successor_script.read_text() == text):
        write_atomic(run.successor_script, text)


def sbatch_words(plan: LaunchPlan, excluded: str) -> list[str]:
    """The plan's flags as words of sbatch's command line.

    excluded: nodes that the job must not get, in place of the plan's; empty to leave it at those.
    """
    flags: dict[str, Any] = {name: value for name, value in plan.sbatch.items() if name not in FIRST_ONLY}
    if excluded:
        flags["exclude"] = excluded
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


def has_nodes_without(run: RunFolder, plan: LaunchPlan, excluded: str, environ: Mapping[str, str]) -> bool:
    """Whether the cluster has nodes for a job of this run when some are excluded, be they busy.

    Raises SlurmError: no answer.
    """
    write_script(run, plan)
    return slurm.would_start([*sbatch_words(plan, excluded), str(run.successor_script)], clean_environment(environ))
