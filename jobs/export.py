"""Export: a run's checkpoint -> [export] -> its weights as a plain state dict.  cluster.checkpoints runs it.

    python -m jobs.export RUN_DIR FILE [--step N]

The file is what model_final.pt is, and appears whole or not at all; one that exists is never replaced.  The run may be
running: nothing in it is changed.
Exit codes: 0 written, and one JSON object on standard output; 1 no good checkpoint; 2 no such step, or FILE cannot be
written.
"""

import argparse
import errno
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, RunFolder, UsageError, manifest_steps, sync_folder
from jobs.checkpoint import CheckpointError, load, read_manifest
from jobs.digest import weights_sha256
from jobs.learner import exported_weights

NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS))  # of file systems without hard links


class ExportError(UsageError):
    """There is no such checkpoint, or the file cannot be written there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobs.export", description="Write a checkpoint's weights.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest good one without it")
    args = parser.parse_args(argv)
    try:
        check_target(args.file)
        step, state = choose(RunFolder(args.run_dir), args.step)
        weights = exported_weights(state)
        write_new(args.file, weights)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    told = {"path": str(args.file), "step": step, "weights_sha256": weights_sha256(weights)}
    print(json.dumps(told))
    return EXIT_FINISHED


def check_target(path: Path) -> None:
    """Raises ExportError: there is something already, or no folder to write into."""
    if path.exists():
        raise ExportError(f"{path} exists: remove it, or export to another name")
    if not path.parent.is_dir():
        raise ExportError(f"{path.parent} is no folder: make it first")


def choose(run: RunFolder, maybe_step: int | None) -> tuple[int, dict[str, Any]]:
    """Step and state of the newest good checkpoint, or of the one asked for; bad ones are told and left alone.

    Raises CheckpointError: there is no good one.  Raises ExportError: there is none of this step.
    """
    steps = manifest_steps(run.checkpoints)
    if maybe_step is not None and maybe_step not in steps:
        raise ExportError(f"{run.path} has no checkpoint of step {maybe_step}; it has {steps or 'none'}")
    for step in reversed(steps) if maybe_step is None else [maybe_step]:
        try:
            return step, load(run.checkpoints, read_manifest(run.checkpoints, step))
        except (CheckpointError, FileNotFoundError) as error:  # not there: its owner has just removed it
            print(f"checkpoint of step {step} cannot be used: {error}", file=sys.stderr)
    raise CheckpointError(f"{run.path}: no good checkpoint to export")


def write_new(path: Path, weights: dict[str, Any]) -> None:
    """Publish a file under a name that is free.

    Raises ExportError: it is not free any more, or the storage failed.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("xb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        name_it(unfinished, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise ExportError(f"{path} exists: remove it, or export to another name") from None
    except (OSError, RuntimeError) as error:  # torch has its own words for a write that failed
        raise ExportError(f"{path} cannot be written: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def name_it(unfinished: Path, path: Path) -> None:
    """Give a file its name.

    Raises FileExistsError: the name is taken.
    """
    try:
        path.hardlink_to(unfinished)  # unlike a rename, it replaces nothing
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(path) from None
        unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
