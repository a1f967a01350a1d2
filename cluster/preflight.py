"""Preflight: a spec -> [preflight] -> submit.  Asks the cluster beside the planning, and tells what does not fit.

check = begin(spec, environ)       # Slurm is asked in threads of its own
...                                # plan, write the script
conclude(check, ...)               # raises for what the cluster can never run
"""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import fit
from cluster.runs import UsageError
from cluster.site import ANSWER_S, Site, look_up
from cluster.spec import JobSpec
from cluster.spec_yaml import WHOLE_FILE, Document, Problem, apply_overrides, read_document


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


def conclude(
    check: Check, source: Path, overrides: Sequence[str], *, cwd: Path, force: bool = False, is_dry: bool = False
) -> None:
    """Wait for the answers and judge; warnings go to standard error.

    source, overrides, cwd: of load_spec, to say where a value comes from.
    force: what would be refused is only warned of.  is_dry: limits that may hold the job back are told as well.

    Raises UnfitError: the cluster can never run the job.
    """
    if check.maybe_site is None:
        return
    site = check.maybe_site.result()
    verdict = fit.judge(check.spec, site)
    for line in told(verdict.warnings, source, overrides, cwd):
        print(f"warning: {line}", file=sys.stderr)
    for line in told(verdict.notes, source, overrides, cwd) if is_dry else ():
        print(f"note: {line}", file=sys.stderr)
    if site.unanswered:
        print(f"warning: not checked against the cluster: {why_unanswered(site)}", file=sys.stderr)
    lines = told(verdict.problems, source, overrides, cwd)
    if lines and not force:
        hint = "the cluster can't run this job, and nothing was submitted; --force submits it all the same"
        raise UnfitError("\n".join([*lines, hint]))
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def told(found: Sequence[fit.Problem], source: Path, overrides: Sequence[str], cwd: Path) -> list[str]:
    """Problems as lines with the file and line of each key, or the override, in the order of the file."""
    if not found:
        return []
    document = _reread(cwd / source)
    apply_overrides(document, overrides)
    lines = []
    for key, message in found:
        place = document.places.get(tuple(key.split(".", 1)))
        lines.append(Problem(WHOLE_FILE if place is None else place.line, key, message))
    return [line.render(str(source)) for line in sorted(lines)]


def _reread(source: Path) -> Document:
    """The file once more, for its lines; without any when it is gone, as a pipe is."""
    try:
        return read_document(source.read_bytes().decode("utf-8-sig", errors="replace"))
    except OSError:
        return Document()


def why_unanswered(site: Site) -> str:
    """Which questions had no answer, and Slurm's words about the first."""
    others = site.unanswered[1:]
    more = f"; no answer to {', '.join(others)} either" if others else ""
    return f"{' '.join(site.reasons[0].split())}{more}"
