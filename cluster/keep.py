"""Keep: spec, run folder -> [keep] -> what a submission leaves of its code and its environment in the run folder.

A new run gets a snapshot, or with code: live the digests of what lies there.  A run that goes on keeps its snapshot;
one that has none yet, since it began without cluster.submit, gets it now.  --rerun takes another run's.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cluster import code, provenance
from cluster.code import CodeError, Project
from cluster.provenance import Environment
from cluster.runs import RunFolder, UsageError
from cluster.setup import check_setup

if TYPE_CHECKING:
    from cluster.spec import JobSpec

log = logging.getLogger("run")

NUM_NAMED = 5
OTHER_CODE = "code: the run goes on with other code than it was trained with, so it is no longer bit-exact"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be kept; nothing has been written yet."""

    is_snapshot: bool
    environment: Environment
    maybe_project: Project | None  # None: the snapshot is there, or comes from another run
    maybe_source: RunFolder | None  # the run whose snapshot is taken

    def code_root(self, run: RunFolder) -> Path:
        """The folder whose packages the run will use."""
        return run.code if self.is_snapshot else code.packages_folder()


def look(spec: "JobSpec", run: RunFolder, environ: Mapping[str, str], *, maybe_source: RunFolder | None = None) -> Kept:
    """Look at interpreter, setup lines and code before anything is written or waits in a queue.

    maybe_source: the run to repeat.

    Raises UsageError: the job could not start with these.
    """
    check_setup(spec.setup, environ)
    environment = check_interpreter(spec, environ)
    is_snapshot = spec.code == "snapshot"
    if maybe_source is not None:
        provenance.check_snapshot(maybe_source)
        if not is_snapshot:
            raise CodeError(f"code: a rerun runs the snapshot of {maybe_source.path}; leave code: live out")
    if is_snapshot and (maybe_source is not None or provenance.has_snapshot(run)):
        return Kept(True, environment, None, maybe_source)
    project = code.find_project(code.packages_folder(), environ, not_in=(spec.run_root, spec.dataset.root))
    if is_snapshot:
        code.check_size(project)
    return Kept(is_snapshot, environment, project, None)


def check_interpreter(spec: "JobSpec", environ: Mapping[str, str]) -> Environment:
    """The environment of supervisor and ranks, as far as this machine can tell.

    Raises UsageError: it lacks what the job needs.
    """
    if spec.python is not None:
        if spec.cluster == "local" and not Path(spec.python).exists():
            raise UsageError(f"python: {spec.python} is not on this machine")
        return provenance.environment_of(spec.python, environ, needs_torch=spec.container.image is None)
    if spec.container.image is None and find_spec("torch") is None:
        raise UsageError(
            f"python: {sys.executable} has no torch; submit with one that has it, or name one with the key python"
        )
    return provenance.own_environment()


def keep(kept: Kept, run: RunFolder, environ: Mapping[str, str]) -> None:
    """Write what was looked at into the run folder.

    Raises CodeError: a file cannot be read.  Raises OSError: the storage refused.
    """
    if kept.maybe_source is not None:
        provenance.copy_record(kept.maybe_source, run, kept.environment)
    elif kept.maybe_project is not None:
        changed = provenance.record(run, kept.maybe_project, kept.environment, environ, is_snapshot=kept.is_snapshot)
        if changed:
            print(f"{OTHER_CODE}: {provenance.named(changed)}", file=sys.stderr)
    else:
        provenance.renew_record(run, kept.environment)


def tell_left_out(kept: Kept) -> None:
    """Say what the snapshot does not hold."""
    left_out = kept.maybe_project.left_out if kept.is_snapshot and kept.maybe_project else {}
    if left_out:
        listed = [f"{path} ({why})" for path, why in left_out.items()]
        more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
        print(f"code: left out of the snapshot: {', '.join(listed[:NUM_NAMED])}{more}", file=sys.stderr)


def record_live(spec: "JobSpec", run: RunFolder, environ: Mapping[str, str]) -> None:
    """Note code and environment of a run that was not submitted by cluster.submit: its code is what lies there.

    What cannot be noted is a warning: the job has its nodes already.
    """
    try:
        project = code.find_project(code.packages_folder(), environ, not_in=(spec.run_root, spec.dataset.root))
        changed = provenance.record(run, project, provenance.own_environment(), environ, is_snapshot=False)
        if changed:
            log.warning("%s: %s", OTHER_CODE, provenance.named(changed))
    except (CodeError, OSError) as error:
        log.warning("code.json is not complete: %s", error)


def tell_other_code(run: RunFolder, attempt: int, job_id: str) -> None:
    """Compare the packages of this process, which no supervisor has chosen, with those the run was submitted with."""
    provenance.tell_drift(run, attempt, job_id, maybe_running=code.packages_folder())


def become_submit_of(source: RunFolder, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let the code of the run that is repeated submit it, since it alone knows how its jobs are planned.

    words: of the command line.  Returns where that code is running already.

    Raises CodeError: the run has no snapshot, or it was changed.
    """
    provenance.check_snapshot(source)
    if code.packages_folder() != source.code:
        replace_process([sys.executable, str(source.code / code.STARTER), "cluster.submit", *words], environ)


def replace_process(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become another program."""
    sys.stdout.flush()
    os.execve(command[0], list(command), dict(environ))
