"""Checkpoints: save, verify, newest good one, load.  Knows no loop and no signal; rank 0 alone calls it.

A checkpoint exists when its manifest does.  Order of a save: data under a temporary name, fsync, rename, fsync of the
folder; then the manifest the same way.  Removal goes the other way round.  So at every moment, whatever a kill or a
power cut leaves, a manifest speaks of data that is complete, and a doubt is settled by its SHA-256.
"""

import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.runs import FORMAT_VERSION, RunFolder, manifest_steps, sync_folder

log = logging.getLogger("run")

DATA_NAME = re.compile(r"step_\d{8,}\.pt")
READ_BYTES = 1 << 22


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
) -> Manifest:
    """Write one checkpoint and read it back; it exists when this returns.

    state: tensors, text, numbers, lists and dicts only, so that weights_only=True reads it.
    while_writing: called when the temporary data file is there; what it raises is as if the storage had raised it.

    Raises SupersededError: a later attempt owns the run.  Raises OSError: the storage failed; the temporary file is
    gone and older checkpoints are untouched.  Raises CheckpointError: the storage gave back other bytes than written.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    data = buffer.getbuffer()
    path = data_path(run.checkpoints, step)
    manifest = Manifest(
        step, epoch, attempt, hashlib.sha256(data).hexdigest(), len(data), environment["world_size"], environment
    )
    run.check_owner(attempt)
    withdraw(path)
    publish(path, data, run, attempt, while_writing)
    publish(path.with_suffix(".json"), json.dumps(asdict(manifest), indent=2).encode(), run, attempt)
    verify(path, manifest)
    return manifest


def publish(
    path: Path,
    data: bytes | memoryview,
    run: RunFolder,
    attempt: int,
    while_writing: Callable[[], None] = lambda: None,
) -> None:
    """Write a file under a temporary name that carries the attempt, and rename it once it is on the disk.

    Raises SupersededError: a later attempt owns the run by now; nothing was renamed.
    """
    temporary = path.with_name(f"{path.name}.a{attempt:04d}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            while_writing()
            file.flush()
            os.fsync(file.fileno())
        run.check_owner(attempt)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def withdraw(path: Path) -> None:
    """Make a data file garbage before it is replaced: without a manifest nothing speaks of it."""
    manifest = path.with_suffix(".json")
    if manifest.exists():
        manifest.unlink()
        sync_folder(path.parent)


def verify(path: Path, manifest: Manifest) -> None:
    """Compare a data file with its manifest, read from the storage and not from this machine's cache.

    Raises CheckpointError: size or SHA-256 differ.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    if (size, digest.hexdigest()) != (manifest.size, manifest.sha256):
        raise CheckpointError(
            f"{path.name}: {size} bytes with SHA-256 {digest.hexdigest()[:12]}..., "
            f"the manifest says {manifest.size} and {manifest.sha256[:12]}..."
        )


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of one step.

    Raises CheckpointError: it is damaged, speaks of another step, or another release wrote it.
    """
    path = data_path(folder, step).with_suffix(".json")
    try:
        fields = dict(json.loads(path.read_bytes()))
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{path.name}: format_version {version!r}, this release reads {FORMAT_VERSION}")
        manifest = Manifest(**fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {error}") from None
    if manifest.step != step:
        raise CheckpointError(f"{path.name}: it speaks of step {manifest.step!r}")
    return manifest


def load_newest(run: RunFolder, attempt: int) -> Loaded:
    """The newest checkpoint that is what its manifest says; those in doubt go to bad/, each with a warning.

    Raises OSError: the storage cannot be read, which says nothing about the checkpoint.
    """
    quarantined: list[tuple[str, str]] = []
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

    Raises CheckpointError: the data file is not what the manifest says, or cannot be decoded.  Raises OSError or
    MemoryError: this machine failed, which says nothing about the checkpoint.
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


def prune(folder: Path, *, keep_last: int, maybe_best_step: int | None) -> list[int]:
    """Remove all but the newest keep_last checkpoints and the best one; returns the steps removed.

    Call it only after the newest has been read back: then a good one is always left.
    """
    steps = manifest_steps(folder)
    removed = [step for step in steps[:-keep_last] if step != maybe_best_step]
    for step in removed:
        path = data_path(folder, step)
        withdraw(path)
        path.unlink(missing_ok=True)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left: temporary files, and data without a manifest.  Files of other names stay.

    Only the owner of the run may call it, before its first save.
    """
    kept = {data_path(folder, step).name for step in manifest_steps(folder)}
    for path in folder.iterdir():
        if path.suffix == ".tmp" or (DATA_NAME.fullmatch(path.name) and path.name not in kept):
            path.unlink(missing_ok=True)
