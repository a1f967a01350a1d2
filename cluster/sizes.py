"""Sizes of a run, known from its spec alone: spec -> [sizes] -> dry run.  Never loads torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.runs import maybe_object

if TYPE_CHECKING:
    from cluster.spec import JobSpec

IMAGES: Mapping[str, tuple[int, int]] = {"cifar10": (50_000, 10), "cifar100": (50_000, 100)}  # training images, classes
SYNTHETIC_CLASSES = 10


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model keeps: float32 parameters, of which some for each class, and bytes of BatchNorm's buffers."""

    fixed: int
    per_class: int
    buffer_bytes: int


MODELS: Mapping[str, ModelSize] = {  # of jobs.model; a test compares
    "resnet18": ModelSize(11_168_832, 513, 38_560),
    "small": ModelSize(97_680, 129, 1_952),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long a run is and what a save writes; None where only the staged data set knows."""

    global_batch_size: int  # images per step over all ranks
    num_train: int | None
    num_classes: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    checkpoint_bytes: int | None  # of one save, to about one percent


def sizes_of(spec: "JobSpec") -> Sizes:
    """Work out the sizes of a run on the most nodes that it asks for."""
    num_train, num_classes = images_of(spec)
    batch = spec.train.global_batch(spec.world_size)
    per_epoch = None if num_train is None else -(-num_train // batch)
    limits = [spec.train.max_steps, None if per_epoch is None else per_epoch * spec.train.epochs]
    known = [limit for limit in limits if limit is not None]
    total = min(known) if per_epoch is not None else None
    return Sizes(batch, num_train, num_classes, per_epoch, total, checkpoint_bytes(spec, num_classes))


def images_of(spec: "JobSpec") -> tuple[int | None, int | None]:
    """Training images and classes of the data set; what a folder of images holds is noted when it is staged."""
    dataset = spec.dataset
    if dataset.kind == "synthetic":
        return dataset.num_train, SYNTHETIC_CLASSES
    if dataset.kind in IMAGES:
        return IMAGES[dataset.kind]
    noted = maybe_object(dataset.staged_note)
    return noted.get("num_train"), noted.get("num_classes")


def checkpoint_bytes(spec: "JobSpec", num_classes: int | None) -> int | None:
    """Bytes of one checkpoint: weights and buffers, their average, and the optimizer's momentum beside each weight."""
    if num_classes is None:
        return None
    model, train = MODELS[spec.train.model], spec.train
    has_momentum = train.momentum > 0 or train.optimizer == "muon"  # what SGD does without it is small beside Muon's
    weights = 4 * (model.fixed + model.per_class * num_classes)
    with_buffers = 1 if train.ema_decay is None else 2
    return with_buffers * (weights + model.buffer_bytes) + has_momentum * weights
