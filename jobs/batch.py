"""Batch: data set, sample ids -> [batch] -> augmented, normalised images and labels on the device."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from jobs.augment import Augmentation, Normalization, take
from jobs.data import DataSet
from jobs.numerics import Numerics

RESIDENT_SHARE = 0.5  # of a GPU's free memory; the rest is for weights, gradients and activations


class Reader:
    """Reads batches; what it gives depends on seed, epoch and sample ids alone."""

    def __init__(self, data: DataSet, numerics: Numerics, ops: Collection[str], seed: int) -> None:
        """data: on the device, or its images on the host.  ops: of augmentation."""
        self._data, self._device = data, numerics.device
        self._augmentation = Augmentation(ops, seed, numerics.device)
        self._normalize = Normalization(data.mean, data.std, channels_last=numerics.channels_last)

    def read(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Images float32 (m, 3, 32, 32) and labels int64 (m,), on the device.  ids: int64 (m,), on the host."""
        device, images, rows = self._device, self._data.train_images, ids
        if images.device != device:
            images, rows = sent(take(images, ids), device), torch.arange(len(ids))
        on_device = sent(ids, device)
        rows = on_device if rows is ids else sent(rows, device)
        batch = self._augmentation.read(images, rows, epoch=epoch, sample_ids=on_device)
        return self._normalize(batch), self._data.train_labels[on_device]


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
