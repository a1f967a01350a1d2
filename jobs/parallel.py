"""Data parallel: model -> [parallel] -> DDP whose sums have the same order in every attempt."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster.spec import TrainSpec


def wrap(model: nn.Module, device: torch.device, train: TrainSpec) -> DistributedDataParallel:
    """Wrap a model that is on its device already; its weights become rank 0's on every rank.

    Buffers are not broadcast at each step: in training BatchNorm uses the batch's own statistics, and rank 0's running
    ones are broadcast before each evaluation.
    """
    # torch 2.14 deprecates the one name for the other; 2.6 knows only the first.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    flag = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    no_buffers: dict[str, Any] = {flag: False}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        **no_buffers,
        gradient_as_bucket_view=True,
        bucket_cap_mb=train.bucket_cap_mb,
    )


def settle_buckets(ddp: DistributedDataParallel, device: torch.device) -> None:
    """Run two discarded forward and backward passes, so that the first step of every attempt sums in the same order.

    DDP packs its gradients anew after its first backward pass, in the order in which they came; the order of sums, and
    with it the last bits, changes there.  Without this a resumed run's first step differs from the straight run's at 4
    ranks (at 2 the sum of two numbers has no order).
    """
    buffers = [buffer.clone() for buffer in ddp.module.buffers()]
    images = torch.zeros(2, 3, 32, 32, device=device)
    for _ in range(2):
        ddp(images).float().sum().backward()
    for buffer, kept in zip(ddp.module.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    ddp.zero_grad(set_to_none=True)
