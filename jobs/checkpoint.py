"""Checkpoints: save, verify, newest good one, load.  Knows no loop and no signal; rank 0 alone calls it.

A checkpoint exists when its manifest does.  Order of a save: data under a temporary name, fsync, rename, fsync of the
folder; then the manifest the same way.  Removal goes the other way round.  So at every moment, whatever a kill or a
power cut leaves, a manifest speaks of data that is complete, and a doubt is settled by its SHA-256.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from cluster.runs import FORMAT_VERSION, RunFolder, check_format, digest_of, look_afresh, manifest_steps, sync_folder
from jobs.storage import HashedFile, Storage

log = logging.getLogger("run")

DATA_NAME = re.compile(r"step_\d{8,}\.pt")
STORAGE = Storage()


class CheckpointError(RuntimeError):
    """A checkpoint whose content is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is; written last."""

    step: int  # optimizer steps done
    epoch: int  # the epoch that the next step belongs to, from 0
    attempt: int
    sha256: str  # of the whole data file, hexadecimal
    size: int  # bytes of the data file
    world_size: int
    environment: Mapping[str, Any]  # what bit-equality depends on: torch build, device type, threads, world size
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest good checkpoint, and what was put aside on the way to it."""

    maybe_state: dict[str, Any] | None  # None: nothing to go on from
    maybe_manifest: Manifest | None
    quarantined: tuple[tuple[str, str], ...]  # (name in bad/, reason)


def data_path(folder: Path, step: int) -> Path:
    """Where the tensors of a step lie."""
    return folder / f"step_{step:08d}.pt"


def save(
    run: RunFolder,
    state: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    attempt: int,
    environment: Mapping[str, Any],
    while_writing: Callable[[], None] = lambda: None,
    storage: Storage = STORAGE,
) -> Manifest:
    """Write one checkpoint and read it back; it exists when this returns.

    state: tensors, text, numbers, lists and dicts only, so that weights_only=True reads it.
    while_writing: called when the temporary data file is there; what it raises is as if the storage had raised it.

    Raises SupersededError: a later attempt owns the run.  Raises OSError: the storage failed; the temporary file is
    gone and older checkpoints are untouched.  Raises CheckpointError: the storage gave back other bytes than written;
    the new checkpoint is gone.
    """
    path = data_path(run.checkpoints, step)
    run.check_owner(attempt)
    withdraw(path, storage)

    def write_state(file: HashedFile) -> None:
        try:
            torch.save({"format_version": FORMAT_VERSION, **state}, cast(IO[bytes], file))
        except RuntimeError as error:  # torch's own words for a write that failed
            raise file.maybe_error or error from None
        while_writing()

    written = publish(path, write_state, run, attempt, storage)
    manifest = Manifest(step, epoch, attempt, written.hexdigest(), written.size, environment["world_size"], environment)
    storage.sync_file(run.metrics)  # the state says how long metrics.jsonl is
    storage.sync_folder(run.path)  # and its name may be new
    text = json.dumps(asdict(manifest), indent=2).encode()
    publish(path.with_suffix(".json"), lambda file: file.write(text), run, attempt, storage)
    try:
        verify(path, manifest)
    except CheckpointError:
        withdraw(path, storage)
        storage.unlink(path)
        raise
    return manifest


def publish(
    path: Path, write: Callable[[HashedFile], Any], run: RunFolder, attempt: int, storage: Storage = STORAGE
) -> HashedFile:
    """Write a file under a temporary name that carries the attempt, and rename it once it is on the disk.

    write: puts the content into the file.

    Raises SupersededError: a later attempt owns the run by now; nothing was renamed.
    """
    temporary = path.with_name(f"{path.name}.a{attempt:04d}.tmp")
    try:
        with storage.create(temporary) as file:
            hashed = HashedFile(file)
            write(hashed)
            storage.sync(file)
        run.check_owner(attempt, afresh=True)
        storage.rename(temporary, path)
    except BaseException:
        storage.unlink(temporary)
        raise
    storage.sync_folder(path.parent)
    return hashed


def withdraw(path: Path, storage: Storage = STORAGE) -> None:
    """Make a data file garbage before it is replaced or removed: without a manifest nothing speaks of it."""
    manifest = path.with_suffix(".json")
    if manifest.exists():
        storage.unlink(manifest)
        storage.sync_folder(path.parent)


def verify(path: Path, manifest: Manifest) -> None:
    """Compare a data file with its manifest, read from the storage and not from this machine's cache.

    Raises CheckpointError: size or SHA-256 differ.
    """
    size, digest = digest_of(path)
    if (size, digest) != (manifest.size, manifest.sha256):
        raise CheckpointError(
            f"{path.name}: {size} bytes with SHA-256 {digest[:12]}..., "
            f"the manifest says {manifest.size} and {manifest.sha256[:12]}..."
        )


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of one step.

    Raises CheckpointError: it is damaged, or speaks of another step.  Raises FormatError: another release wrote it.
    """
    path = data_path(folder, step).with_suffix(".json")
    try:
        fields = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {error}") from None
    check_format(path, fields)
    if fields.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path.name}: format_version {fields.get('format_version')!r}")
    try:
        manifest = Manifest(**fields)
    except TypeError as error:
        raise CheckpointError(f"{path.name}: {error}") from None
    if manifest.step != step:
        raise CheckpointError(f"{path.name}: it speaks of step {manifest.step!r}")
    return manifest


def load_newest(run: RunFolder, attempt: int) -> Loaded:
    """The newest checkpoint that is what its manifest says; those in doubt go to bad/, each with a warning.

    Raises OSError: the storage cannot be read, which says nothing about the checkpoint.  Raises FormatError: another
    release wrote it, and it stays where it is.
    """
    quarantined: list[tuple[str, str]] = []
    look_afresh(run.checkpoints)
    for step in reversed(manifest_steps(run.checkpoints)):
        try:
            manifest = read_manifest(run.checkpoints, step)
            return Loaded(load(run.checkpoints, manifest), manifest, tuple(quarantined))
        except (CheckpointError, FileNotFoundError) as error:
            name = quarantine(run.checkpoints, step, attempt)
            log.warning("checkpoint of step %d is bad and was moved to bad/%s: %s", step, name, error)
            quarantined.append((name, str(error)))
    return Loaded(None, None, tuple(quarantined))


def load(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The state of one checkpoint, on the CPU.

    Raises CheckpointError: the data file is not what the manifest says, or cannot be decoded.  Raises FormatError:
    another release wrote it.  Raises OSError or MemoryError: this machine failed, which says nothing about the
    checkpoint.
    """
    path = data_path(folder, manifest.step)
    verify(path, manifest)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch names no exception of its own for a file that it cannot decode
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {reason}") from error
    check_format(path, state)
    state.pop("format_version", None)
    return state


def quarantine(folder: Path, step: int, attempt: int) -> str:
    """Move a doubtful checkpoint to bad/, manifest first; returns its name there."""
    bad = folder / "bad"
    bad.mkdir(exist_ok=True)
    data = data_path(folder, step)
    for path in (data.with_suffix(".json"), data):
        if path.exists():
            path.replace(bad / f"{path.stem}.a{attempt:04d}{path.suffix}")
            sync_folder(folder)
    return f"{data.stem}.a{attempt:04d}{data.suffix}"


def prune(
    folder: Path,
    *,
    keep_last: int,
    maybe_best_step: int | None,
    maybe_max_bytes: int | None = None,
    storage: Storage = STORAGE,
) -> list[int]:
    """Remove all but the newest keep_last checkpoints and the best one; returns the steps removed.

    maybe_max_bytes: of all data files; older ones go until the rest fits, the best one last, the newest never.

    Call it only after the newest has been read back: then a good one is always left.
    """
    steps = manifest_steps(folder)
    removed = [step for step in steps[:-keep_last] if step != maybe_best_step]
    if maybe_max_bytes is not None:
        kept = [step for step in steps if step not in removed]
        sizes = {step: data_path(folder, step).stat().st_size for step in kept}
        for step in sorted(kept[:-1], key=lambda step: (step == maybe_best_step, step)):
            if sum(sizes.values()) > maybe_max_bytes:
                del sizes[step]
                removed.append(step)
    for step in removed:
        path = data_path(folder, step)
        withdraw(path, storage)
        storage.unlink(path)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left: temporary files, and data without a manifest.  Files of other names stay.

    Only the owner of the run may call it, before its first save.
    """
    kept = {data_path(folder, step).name for step in manifest_steps(folder)}
    for path in folder.iterdir():
        if path.suffix == ".tmp" or (DATA_NAME.fullmatch(path.name) and path.name not in kept):
            path.unlink(missing_ok=True)
