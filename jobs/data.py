"""Staged data set: stage -> [data] -> training loop.  Tensors, and which samples a global step reads.

A rank only opens the file that jobs.stage published; it downloads and converts nothing.  The order of samples is a
pure function of (seed, epoch), so it is the same at any world size and needs no state in a checkpoint.
"""

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.runs import UsageError
from cluster.spec import DatasetSpec

STAGED_FORMAT_VERSION = 1
IMAGE_SHAPE = (3, 32, 32)  # channels, height, width
CIFAR_KINDS = ("cifar10", "cifar100")  # the kinds with published MD5 sums
_REMEDY = "stage it anew: python -m jobs.stage SPEC --force"


class DataError(UsageError):
    """The data set is missing, damaged or not what the spec says."""


@dataclass(frozen=True)
class DataSet:
    """Images and labels of one data set, in sample order: sample id = row."""

    train_images: Tensor  # uint8 (num_train, 3, 32, 32)
    train_labels: Tensor  # int64 (num_train,), in [0, num_classes)
    test_images: Tensor  # uint8 (num_test, 3, 32, 32)
    test_labels: Tensor  # int64 (num_test,)
    num_classes: int
    mean: Tensor  # float32 (3,), of the train pixels scaled to [0, 1], per channel
    std: Tensor  # float32 (3,), the same scale


def open_staged(dataset: DatasetSpec) -> DataSet:
    """Open the staged file.  Pixels stay in the mapped file, so ranks of one node share the memory.

    Raises DataError: the file is missing, truncated, of another kind or version, or from a mirror that the spec
        does not accept.
    """
    path = dataset.staged_path
    if not path.is_file():
        raise DataError(f"{path} does not exist: stage it first: python -m jobs.stage SPEC")
    staged = _load(path)
    maybe_problem = next(_problems(staged, dataset), None)
    if maybe_problem is not None:
        raise DataError(f"{path}: {maybe_problem}: {_REMEDY}")
    return DataSet(
        train_images=staged["train_images"],
        train_labels=staged["train_labels"],
        test_images=staged["test_images"],
        test_labels=staged["test_labels"],
        num_classes=len(staged["classes"]),
        mean=staged["mean"],
        std=staged["std"],
    )


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Sample ids in the order that one epoch reads them, int64 (num_samples,)."""
    digest = hashlib.sha256(f"epoch order, seed {seed}, epoch {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(num_samples, generator=generator)


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Optimizer steps of one epoch; the last may be short."""
    return -(-num_samples // global_batch)


def global_batch_ids(order: Tensor, step_in_epoch: int, global_batch: int) -> Tensor:
    """Sample ids that all ranks together read in one step, int64 (n,), 1 <= n <= global_batch.

    order: from epoch_order.  step_in_epoch: in [0, steps_per_epoch).
    """
    start = step_in_epoch * global_batch
    assert 0 <= start < len(order), f"step {step_in_epoch} lies outside an epoch of {len(order)} samples"
    return order[start : start + global_batch]


def share_of(ids: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's contiguous part of ids; sizes differ by at most one, the larger come first, some may be empty."""
    size, num_larger = divmod(len(ids), world_size)
    start = rank * size + min(rank, num_larger)
    return ids[start : start + size + (rank < num_larger)]


def _load(path: Path) -> dict[str, Any]:
    try:
        staged = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds its C++ stack
        raise DataError(f"{path} cannot be read as a staged data set ({reason}): {_REMEDY}") from error
    if not isinstance(staged, dict):
        raise DataError(f"{path} holds a {type(staged).__name__}, not a staged data set: {_REMEDY}")
    return staged


def _problems(staged: dict[str, Any], dataset: DatasetSpec) -> Iterator[str]:
    """What keeps a staged file from serving this spec; a later check holds only after the earlier ones."""
    if staged.get("format_version") != STAGED_FORMAT_VERSION:
        yield f"format_version is {staged.get('format_version')!r}, this code reads {STAGED_FORMAT_VERSION}"
    if staged.get("kind") != dataset.kind:
        yield f"it holds {staged.get('kind')!r}, the spec says {dataset.kind!r}"
    if dataset.kind in CIFAR_KINDS and not (staged.get("md5_checked") or dataset.accept_unpublished_md5):
        yield "it lacks the published MD5 sums; set dataset.accept_unpublished_md5: true to use it, or"
    classes = staged.get("classes")
    if not isinstance(classes, list) or not classes:
        yield f"classes is {classes!r}, expected a list of names"
    yield from _split_problems(staged, "train", len(classes or ()), dataset.num_train)
    yield from _split_problems(staged, "test", len(classes or ()), dataset.num_test)
    for name in ("mean", "std"):
        scale = staged.get(name)
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or tuple(scale.shape) != (3,):
            yield f"{name} is {_describe(scale)}, expected float32 (3,)"
        elif not bool((scale > 0).all()):
            yield f"{name} is {scale.tolist()}, expected positive numbers"


def _split_problems(staged: dict[str, Any], split: str, num_classes: int, maybe_size: int | None) -> Iterator[str]:
    images, labels = staged.get(f"{split}_images"), staged.get(f"{split}_labels")
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or tuple(images.shape[1:]) != IMAGE_SHAPE:
        yield f"{split}_images is {_describe(images)}, expected uint8 (N, 3, 32, 32)"
    elif not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        yield f"{split}_labels is {_describe(labels)}, expected int64 ({len(images)},)"
    elif len(images) == 0 or maybe_size not in (None, len(images)):
        yield f"it holds {len(images)} {split} images, the spec says {maybe_size or 'at least 1'}"
    elif int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        yield f"{split}_labels span {int(labels.min())} to {int(labels.max())}, expected 0 to {num_classes - 1}"


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"
