"""Batch: data set, sample ids -> [batch] -> augmented, normalised images and labels on the device."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jobs.augment import augment, normalize, take
from jobs.data import DataSet
from jobs.numerics import Numerics

RESIDENT_SHARE = 0.5  # of a GPU's free memory; the rest is for weights, gradients and activations


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads batches; what it gives depends on seed, epoch and sample ids alone."""

    data: DataSet  # on the device, or its images on the host
    numerics: Numerics
    ops: Collection[str]  # of augmentation
    seed: int

    def read(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Images float32 (m, 3, 32, 32) and labels int64 (m,), on the device.  ids: int64 (m,), on the host."""
        device, images, rows = self.numerics.device, self.data.train_images, ids
        if images.device != device:
            images, rows = sent(take(images, ids), device), torch.arange(len(ids))
        on_device = sent(ids, device)
        rows = on_device if rows is ids else sent(rows, device)
        batch = augment(images, rows, ops=self.ops, seed=self.seed, epoch=epoch, sample_ids=on_device)
        inputs = normalize(batch, self.data.mean, self.data.std, channels_last=self.numerics.channels_last)
        return inputs, self.data.train_labels[on_device]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; to a GPU from pinned memory, so that the host does not wait for the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def place_data(data: DataSet, device: torch.device) -> DataSet:
    """The data set on the device, so that no step waits for a copy; images that don't fit stay on the host."""
    if device.type == "cpu":
        return data
    free, _ = torch.cuda.mem_get_info(device)
    return placed(data, device, limit=int(RESIDENT_SHARE * free))


def placed(data: DataSet, device: torch.device, *, limit: int) -> DataSet:
    """A data set with as many of its images on a device as fit.  limit: bytes for them; all else is small."""
    moved = {name: getattr(data, name).to(device) for name in ("train_labels", "test_labels", "mean", "std")}
    for name in ("test_images", "train_images"):  # the smaller first
        images = getattr(data, name)
        if images.nbytes <= limit:
            moved[name], limit = images.to(device), limit - images.nbytes
    return replace(data, **moved)
