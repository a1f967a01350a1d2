"""Staging: spec -> [stage] -> data.  Fetch, check and convert a data set once, before any rank starts.

    python -m jobs.stage SPEC [section.key=value ...] [--force]

The result is one file, published by one rename: it is there whole or not at all, and two stagings at once are harmless.
Exit codes: 0 staged, now or before; 2 the spec or the data is wrong, or there is no network.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.runs import write_json
from cluster.spec import DatasetSpec, SpecError, faults_allowed, load_spec
from jobs.cifar import read_cifar
from jobs.data import CIFAR_KINDS, STAGED_FORMAT_VERSION, DataError, open_staged
from jobs.sources import Source, make_synthetic, read_image_folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code.  arguments: sys.argv without the program's name."""
    parser = argparse.ArgumentParser(prog="python -m jobs.stage", description="Stage the data set of a spec.")
    parser.add_argument("spec", type=Path, help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in cluster.submit")
    parser.add_argument("--force", action="store_true", help="stage anew, even if the staged file is good")
    options = parser.parse_intermixed_args(arguments)
    try:
        allow_faults = faults_allowed(os.environ)
        dataset = load_spec(options.spec, options.overrides, cwd=Path.cwd(), allow_faults=allow_faults).dataset
        if not options.force and is_staged(dataset):
            print(f"{dataset.staged_path} is staged already; --force stages it anew")
            return 0
        print(f"staging {dataset.kind} into {dataset.staged_path}", flush=True)
        stage(dataset)
    except (SpecError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    data = open_staged(dataset)
    print(f"staged {len(data.train_labels)} train and {len(data.test_labels)} test images, {data.num_classes} classes")
    return 0


def is_staged(dataset: DatasetSpec) -> bool:
    """Whether the staged file exists and serves this spec."""
    try:
        open_staged(dataset)
    except DataError:
        return False
    return True


def stage(dataset: DatasetSpec) -> Path:
    """Read the source and publish the staged file, replacing any; returns its path.

    Raises DataError: the source is missing, damaged or out of reach, or the file cannot be written.
    """
    try:
        source = _read_source(dataset)
        _publish(_staged_form(dataset.kind, source), dataset.staged_path)
        write_json(dataset.staged_note, _numbers(source))
    except OSError as error:
        raise DataError(
            f"cannot stage into {dataset.staged_path}: {error}: check the path, its rights and quota"
        ) from error
    return dataset.staged_path


def _read_source(dataset: DatasetSpec) -> Source:
    if dataset.kind in CIFAR_KINDS:
        return read_cifar(dataset.kind, dataset.root, accept_unpublished_md5=dataset.accept_unpublished_md5)
    if dataset.kind == "image_folder":
        return read_image_folder(dataset.root)
    assert dataset.num_train is not None and dataset.num_test is not None  # the spec fills them in for this kind
    return make_synthetic(dataset.num_train, dataset.num_test)


def _staged_form(kind: str, source: Source) -> dict[str, Any]:
    mean, std = channel_statistics(source.train.images)
    return {
        "format_version": STAGED_FORMAT_VERSION,
        "kind": kind,
        "train_images": source.train.images,
        "train_labels": source.train.labels,
        "test_images": source.test.images,
        "test_labels": source.test.labels,
        "classes": list(source.classes),
        "mean": mean,
        "std": std,
        "origin": source.origin,
        "md5_checked": source.md5_checked,
    }


def _numbers(source: Source) -> dict[str, Any]:
    """How much there is; the dry run of a submission reads it."""
    return {
        "num_train": len(source.train.labels),
        "num_test": len(source.test.labels),
        "num_classes": len(source.classes),
    }


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, of pixels scaled to [0, 1]: float32 (3,) each.

    images: uint8 (N, 3, 32, 32).  Counted from histograms, so nothing is as large as the images in float.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
    weights = counts / counts.sum(dim=1, keepdim=True, dtype=torch.float64)  # (3, 256)
    mean = weights @ levels
    variance = (weights * (levels - mean[:, None]) ** 2).sum(dim=1)
    return mean.float(), variance.sqrt().float()


def _publish(staged: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            torch.save(staged, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main())
