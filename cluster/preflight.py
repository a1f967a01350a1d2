"""Preflight: a spec -> [preflight] -> submit.  Asks the cluster beside the planning, and tells what does not fit.

check = begin(spec, environ)       # Slurm is asked in threads of its own
...                                # plan, write the script
conclude(check, ...)               # raises for what the cluster can never run
"""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster import fit, spec_yaml
from cluster.fit import Problem
from cluster.node_local import MOUNTS, are_all_here, maybe_reason
from cluster.runs import UsageError
from cluster.site import ANSWER_S, Site, look_up
from cluster.spec import JobSpec, SourcedSpec
from cluster.spec_yaml import WHOLE_FILE


class UnfitError(UsageError):
    """The cluster can never run the job.  Its text has one line for each thing to mend."""


@dataclass(frozen=True, slots=True)
class Check:
    """A question that is on its way."""

    spec: JobSpec
    maybe_site: "Future[Site] | None"  # None: a run without Slurm


def begin(spec: JobSpec, environ: Mapping[str, str], *, timeout_s: float = ANSWER_S) -> Check:
    """Start to ask the cluster, and return at once."""
    if spec.cluster != "slurm":
        return Check(spec, None)
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(look_up, environ, timeout_s=timeout_s)
    pool.shutdown(wait=False)
    return Check(spec, asked)


def conclude(check: Check, sourced: SourcedSpec, *, force: bool = False, is_dry: bool = False) -> None:
    """Wait for the answers and judge; warnings go to standard error.

    sourced: the spec of the check, to say where a value comes from.
    force: what would be refused is only warned of.  is_dry: limits that may hold the job back are told as well.

    Raises UnfitError: the cluster can never run the job.
    """
    if check.maybe_site is None:
        return
    site = check.maybe_site.result()
    verdict = fit.judge(check.spec, site)
    problems = [*verdict.problems, *local_folders(check.spec, site)]
    for line in told(verdict.warnings, sourced):
        print(f"warning: {line}", file=sys.stderr)
    for line in told(verdict.notes, sourced) if is_dry else ():
        print(f"note: {line}", file=sys.stderr)
    if site.unanswered:
        print(f"warning: not checked against the cluster: {why_unanswered(site)}", file=sys.stderr)
    lines = told(problems, sourced)
    if lines and not force:
        hint = "the cluster can't run this job, and nothing was submitted; --force submits it all the same"
        raise UnfitError("\n".join([*lines, hint]))
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def told(found: Sequence[Problem], sourced: SourcedSpec) -> list[str]:
    """Problems as lines with the file and line of each key, or the override, in the order of the file."""
    places = sourced.document.places
    lines = []
    for key, message in found:
        place = places.get(tuple(key.split(".", 1)))
        lines.append(spec_yaml.Problem(WHOLE_FILE if place is None else place.line, key, message))
    return [line.render(sourced.source) for line in sorted(lines)]


def local_folders(spec: JobSpec, site: Site) -> list[Problem]:
    """Folders of the spec that its nodes do not see."""
    if site.nodes is None or are_all_here([node.address for node in site.nodes]):
        return []
    mounts = MOUNTS.read_text()
    folders = {"run_root": spec.run_root, "dataset.root": spec.dataset.root}
    reasons = {key: maybe_reason(path, mounts) for key, path in folders.items()}
    return [
        Problem(key, f"{folders[key]} is not seen by the nodes: {reason}; use storage that all of them share")
        for key, reason in reasons.items()
        if reason is not None
    ]


def why_unanswered(site: Site) -> str:
    """Which questions had no answer, and Slurm's words about the first."""
    others = site.unanswered[1:]
    more = f"; no answer to {', '.join(others)} either" if others else ""
    return f"{' '.join(site.reasons[0].split())}{more}"
