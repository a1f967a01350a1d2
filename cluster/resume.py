"""Resumption by hand: a run folder and changed keys -> [resume] -> the spec of its next job.

Most of a spec is what the run is; only what leaves its past as it was may change.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import slurm
from cluster.clusters import cluster_name
from cluster.owner import (
    last_submission,
    maybe_owner,
    other_cluster,
    refuse_unwritable,
)
from cluster.run_state import is_over_by_folder
from cluster.runs import RunFolder, UsageError, manifest_steps, sync_folder, write_atomic
from cluster.spec import JobSpec, SourcedSpec, changed_keys, dump_spec, faults_allowed, load_spec, read_spec

FREE_KEYS = frozenset((
    "time_limit", "partition", "checkpoint.every_steps", "checkpoint.every_minutes",
    "train.tensorboard", "train.start_timeout_s", "train.step_timeout_s", "checkpoint.save_timeout_s", "code", "python",
))  # fmt: skip


class ResumeError(UsageError):
    """The run cannot go on like this."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that may go on."""

    run: RunFolder
    sourced: SourcedSpec
    is_done: bool  # finished already, and nothing asked for that would make it longer
    commit: Callable[[], None]  # puts the changed spec into the run folder


def prepare_resumption(
    run: RunFolder, overrides: Sequence[str], environ: Mapping[str, str], *, force: bool = False
) -> Resumption:
    """Check that a run may go on with these changes; writes nothing until commit() is called.

    force: whether it may though its job is of another cluster, and could come back there.

    Raises ResumeError: it is cancelled, a job of it is alive, or a key is fixed.  Raises SpecError: a value is wrong.
    """
    old = load_spec(run.spec, cwd=run.path, allow_faults=True)
    sourced = read_spec(run.spec, overrides, cwd=Path.cwd(), allow_faults=faults_allowed(environ))
    spec = sourced.spec
    changed = changed_keys(old, spec)
    check_changes(old, spec, changed, run)
    if run.cancel_mark.exists():
        raise ResumeError(f"{run.path} was cancelled by its user and stays ended")
    is_longer = "train.epochs" in changed
    is_done = run.summary.exists() and not is_longer
    if not is_done:
        refuse_unwritable(run)
        if not is_free_of_other_cluster(run, environ, force=force):
            check_nobody_runs(run, environ)
        check_not_pruned(run)
    return Resumption(run, sourced, is_done, lambda: commit(run, spec, changed))


def check_changes(old: JobSpec, spec: JobSpec, changed: Sequence[str], run: RunFolder) -> None:
    """Raises ResumeError: a changed key is part of what the run is."""
    free = FREE_KEYS | {"train.epochs"} | ({"nodes"} if old.train.global_batch_size is not None else set())
    fixed = [key for key in changed if key not in free]
    if fixed:
        hint = " (nodes may change in a run with train.global_batch_size)" if "nodes" in fixed else ""
        raise ResumeError(
            f"{', '.join(fixed)}: fixed since the run began{hint}; a resumption may change {', '.join(sorted(free))}"
        )
    done = max((event["step"] for event in run.read_events() if event["event"] == "checkpoint_saved"), default=0)
    if spec.train.epochs < old.train.epochs and done:
        raise ResumeError(
            f"train.epochs: {spec.train.epochs} is less than the run's {old.train.epochs}, and {done} steps are done; "
            "a run in progress can only be made longer"
        )
    limit = old.train.max_steps
    if "train.epochs" in changed and limit is not None and run.read_json(run.summary).get("steps") == limit:
        raise ResumeError(f"train.epochs: the run ended by train.max_steps={limit}, which is fixed")


def is_free_of_other_cluster(run: RunFolder, environ: Mapping[str, str], *, force: bool) -> bool:
    """Whether a run's job is of another cluster, which cannot be asked from here, and will not come back there.

    Raises ResumeError: it may.  force: go on all the same.
    """
    job_id, cluster = other_cluster(run, environ)
    if cluster and not force and not is_over_by_folder(run):
        its_job = f"its job {job_id}" if job_id else "its job"
        raise ResumeError(
            f"{run.path}: {its_job} is of cluster {cluster}, and this machine's is {cluster_name(environ)}: ask there, "
            "or end it there by cluster.stop first; --force goes on here, for a cluster that is gone for good"
        )
    return bool(cluster)


def check_nobody_runs(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Raises ResumeError: a job of this run is queued or running, or Slurm did not say."""
    try:
        owner = maybe_owner(run, environ)
    except slurm.SlurmError as error:
        job_id = last_submission(run).get("job_id", "")
        its_job = f"job {job_id}" if job_id else "the job"
        raise ResumeError(f"Slurm did not say whether {its_job} of this run is alive: {error}") from None
    if owner is None:
        return
    if owner.maybe_pid is not None:
        raise ResumeError(f"{run.path} is being trained by process {owner.maybe_pid} on {socket.gethostname()}")
    raise ResumeError(
        f"job {owner.job_id} of this run is {owner.state}: it goes on by itself; to end it: scancel {owner.job_id}"
    )


def check_not_pruned(run: RunFolder) -> None:
    """Raises ResumeError: its user has removed the checkpoint that it would go on from."""
    removed = {step for event in run.read_events() if event["event"] == "pruned" for step in event["steps"]}
    left = manifest_steps(run.checkpoints)
    if removed and not left:
        raise ResumeError(f"{run.path} has no checkpoint any more, cluster.prune has removed them: submit it anew")
    if removed and max(removed) > max(left):
        raise ResumeError(
            f"cluster.prune has removed the checkpoint of step {max(removed)} of {run.path}, and the newest that is "
            f"left is of step {max(left)}: submit it anew"
        )


def commit(run: RunFolder, spec: JobSpec, changed: Sequence[str]) -> None:
    """Put the changed spec into the run folder; what a finished run had is kept beside it."""
    attempt = run.latest_attempt()
    if "train.epochs" in changed:
        if run.summary.exists():
            write_atomic(run.path / f"summary.a{attempt:04d}.json", run.summary.read_bytes())
        write_atomic(run.path / f"spec.a{attempt:04d}.yaml", run.spec.read_bytes())
        run.append_event("extended", attempt=attempt, job_id="", epochs=spec.train.epochs)
    if changed:
        write_atomic(run.spec, dump_spec(spec))
    for mark in (run.stop_mark, run.summary):
        mark.unlink(missing_ok=True)
    sync_folder(run.path)
