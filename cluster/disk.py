"""Disk: a run folder -> [disk] -> what in it can be removed, and its removal.  Standard library only.

What stays in any case says what the run was and came to: spec, plan, scripts, events, metrics, verdicts, failures,
summary, final model.  Checkpoints go as jobs/checkpoint.py removes them, the manifest first, so that a kill leaves
garbage and never a manifest that speaks of nothing.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.runs import RunFolder, digest_of, manifest_steps, maybe_object, sync_folder

RESUMABLE = ("stopped", "failed")
DATA_NAME = re.compile(r"step_(\d{8,})\.pt")
CHECKPOINT_NAME = re.compile(r"step_\d{8,}(\.a\d+)?\.(pt|json)(\.a\d+\.tmp)?|trial\.a\d+\.tmp")


@dataclass(frozen=True, slots=True)
class Removal:
    """What would be removed of one run."""

    steps: tuple[int, ...] = ()  # checkpoints, oldest first
    garbage: tuple[Path, ...] = ()  # what killed saves left, and what was put aside as bad
    folders: tuple[Path, ...] = ()  # emptied, and kept
    kept_steps: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes by checkpoints, stacks, submitit, code, logs

    @property
    def num_bytes(self) -> int:
        """All together."""
        return sum(self.sizes.values())


def find_removal(run: RunFolder, state: str, *, all_checkpoints: bool, logs: bool, verify: bool) -> Removal:
    """What can be removed of a run that nobody runs.

    state: what it is: finished, cancelled, stopped or failed; the last two keep what they can go on with.
    verify: whether to read the checkpoint that is kept for that; without it its size has to do.
    """
    folders = {"stacks": run.stacks, "submitit": run.submitit}
    if state not in RESUMABLE:
        folders["code"] = run.path / "code"
    if logs:
        folders["logs"] = run.logs
    kept = () if all_checkpoints else kept_steps(run, state, verify=verify)
    steps = tuple(step for step in steps_of(run) if step not in kept)
    garbage = tuple(garbage_of(run))
    paths = [path for step in steps for path in files_of(run, step)]
    sizes = {"checkpoints": sum(map(size_of, (*paths, *garbage)))}
    sizes |= {name: size_of(folder) for name, folder in folders.items()}
    return Removal(steps, garbage, tuple(folders.values()), kept, sizes)


def steps_of(run: RunFolder) -> list[int]:
    """Steps that have a checkpoint, oldest first."""
    return manifest_steps(run.checkpoints) if run.checkpoints.is_dir() else []


def files_of(run: RunFolder, step: int) -> tuple[Path, Path]:
    """Manifest and data of a checkpoint, in the order of their removal."""
    data = run.checkpoints / f"step_{step:08d}.pt"
    return data.with_suffix(".json"), data


def kept_steps(run: RunFolder, state: str, *, verify: bool) -> tuple[int, ...]:
    """Checkpoints that are worth their room: the best one, and those that a run can go on from.

    The best one of a finished run is not kept where it is the final model.  Of a run that can go on the newest good one
    is kept, and those newer than it, which its next start will judge; where none is good, all are.
    """
    steps = steps_of(run)
    best = maybe_object(run.checkpoints / "best.json").get("step")
    kept = {best} - {run.read_json(run.summary).get("steps")}
    if state in RESUMABLE:
        good = next((step for step in reversed(steps) if is_good(run, step, verify=verify)), 0)
        kept |= {step for step in steps if step >= good}
    return tuple(step for step in steps if step in kept)


def is_good(run: RunFolder, step: int, *, verify: bool) -> bool:
    """Whether a checkpoint is what its manifest says; verify: by all of it, not by its size alone."""
    manifest, data = files_of(run, step)
    said = maybe_object(manifest)
    if said.get("step") != step or said.get("size") != size_of(data):
        return False
    try:
        return not verify or digest_of(data)[1] == said.get("sha256")
    except OSError:
        return False


def garbage_of(run: RunFolder) -> list[Path]:
    """Files of no checkpoint: data without a manifest, temporary ones, and all in bad/."""
    if not run.checkpoints.is_dir():
        return []
    whole = {path.name for step in steps_of(run) for path in files_of(run, step)}
    bad = run.checkpoints / "bad"
    loose = [path for path in run.checkpoints.iterdir() if path.name not in whole]
    return sorted(
        path
        for path in (*loose, *(bad.iterdir() if bad.is_dir() else ()))
        if CHECKPOINT_NAME.fullmatch(path.name) and not path.is_dir()
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed, and what is not there has none."""
    if path.is_symlink() or not path.is_dir():
        try:
            return path.lstat().st_size
        except OSError:
            return 0
    return sum(size_of(inner) for inner in path.iterdir())


def remove(run: RunFolder, removal: Removal) -> None:
    """Remove it; a kill in between leaves a run folder that is right, and the next time removes the rest.

    Raises OSError: the storage refused.
    """
    if not removal.num_bytes:
        return
    told: dict[str, Any] = {"steps": list(removal.steps), "kept_steps": list(removal.kept_steps)}
    run.append_event("pruned", attempt=run.latest_attempt(), job_id="", bytes=removal.num_bytes, **told)
    for step in removal.steps:
        manifest, data = files_of(run, step)
        manifest.unlink(missing_ok=True)
        sync_folder(run.checkpoints)
        data.unlink(missing_ok=True)
    for path in removal.garbage:
        path.unlink(missing_ok=True)
    for folder in removal.folders:
        empty(folder)


def empty(folder: Path) -> None:
    """Remove all in a folder; a link is removed, and what it leads to is left alone."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def last_change_s(run: RunFolder) -> float:
    """When something was last written about a run, in seconds since 1970."""
    paths = (run.spec, run.metrics, run.heartbeat, run.summary)  # a removal adds to the events
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def shown_size(num_bytes: int) -> str:
    """At most 8 characters: `1.2 GiB`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            amount = num_bytes / (1 << power)
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
    return f"{num_bytes} B" if num_bytes else "-"
