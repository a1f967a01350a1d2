"""Evaluation: training loop -> [evaluate] -> metrics.  Each test image counts once, at any world size.

Accuracy and loss are bit-equal at every world size: the test set is cut into micro-batches that do not depend on it
(the shape of a batch can change the last bits of a convolution), ranks share the micro-batches, and per-image losses
are put together before they are summed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from jobs.augment import Normalization
from jobs.data import DataSet, share_of
from jobs.numerics import Numerics

MICRO_BATCH = 128  # images; the default, the same at every world size


@dataclass(frozen=True)
class Evaluation:
    """The test set's result, equal on all ranks."""

    accuracy: float  # fraction of num_images
    loss: float  # mean cross-entropy per image, without label smoothing
    num_images: int


def evaluate(
    model: nn.Module,
    data: DataSet,
    *,
    rank: int,
    world_size: int,
    numerics: Numerics,
    keep_going: Callable[[], bool],
    with_mirrored: bool = False,
    micro_batch: int = MICRO_BATCH,
    group: dist.ProcessGroup | None = None,
) -> Evaluation | None:
    """Evaluate on the whole test set; None when keep_going said no.

    All ranks call it together, with equal weights and buffers (broadcast_buffers); model is the module inside DDP.
    with_mirrored: average the logits of each image and its mirror image.
    keep_going: called before each micro-batch, equally often on every rank, so it may be a collective; its answer
        must be the same on all ranks.
    group: takes tensors on the CPU; None is the default group; not used when world_size is 1.
    """
    num_images = len(data.test_labels)
    starts = torch.arange(0, num_images, micro_batch)
    own_starts = share_of(starts, rank, world_size).tolist()
    num_rounds = len(share_of(starts, 0, world_size))  # rank 0 has the largest share
    scores = torch.zeros(3, num_images, dtype=torch.float64, device=numerics.device)
    was_training = model.training
    model.eval()
    try:
        for index in range(num_rounds):
            if not keep_going():
                return None
            if index < len(own_starts):
                part = slice(own_starts[index], own_starts[index] + micro_batch)
                scores[:, part] = _score(model, data, part, numerics, with_mirrored)
    finally:
        model.train(was_training)
    return _put_together(scores.cpu(), world_size, group)


def broadcast_buffers(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's buffers: BatchNorm's running statistics come from each rank's own samples.

    group: takes tensors on the model's device; None is the default group.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0, group=group)


@torch.inference_mode()
def _score(model: nn.Module, data: DataSet, part: slice, numerics: Numerics, with_mirrored: bool) -> Tensor:
    """Per image: loss, whether the answer is right, and 1; float64 (3, n) on the device."""
    device = numerics.device
    normalize = Normalization(data.mean.to(device), data.std.to(device), channels_last=numerics.channels_last)
    images = normalize(data.test_images[part].to(device))
    labels = data.test_labels[part].to(device)
    with numerics.autocast():
        logits = model(images).float()
        if with_mirrored:
            logits = (logits + model(images.flip(3)).float()) / 2
    losses = functional.cross_entropy(logits, labels, reduction="none")
    hits = logits.argmax(dim=1) == labels
    return torch.stack([losses.double(), hits.double(), torch.ones_like(losses, dtype=torch.float64)])


def _put_together(scores: Tensor, world_size: int, group: dist.ProcessGroup | None) -> Evaluation:
    """Sum over ranks, then over images; both exact.  scores: float64 (3, num_images), 0 where another rank scored.

    Adding zeros changes no bit in whatever order ranks are summed; it costs 24 bytes per image.  math.fsum rounds once,
    and keeps inf and NaN.
    """
    if world_size > 1:
        dist.all_reduce(scores, group=group)
    losses, hits, times_seen = scores.tolist()
    num_images = len(losses)
    assert times_seen == [1.0] * num_images, "an image was not scored once: the ranks differ in world size or data"
    return Evaluation(accuracy=sum(hits) / num_images, loss=math.fsum(losses) / num_images, num_images=num_images)
