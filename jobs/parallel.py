"""Data parallel: model -> [parallel] -> DDP whose sums have the same order in every attempt."""

import inspect
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster.runs import UsageError
from cluster.spec import TrainSpec
from jobs.numerics import Numerics


class CompilerError(UsageError):
    """The spec asks for compiled code, and there is no compiler."""


def wrap(model: nn.Module, device: torch.device, train: TrainSpec) -> DistributedDataParallel:
    """Wrap a model that is on its device already; its weights become rank 0's on every rank.

    Buffers are not broadcast at each step: in training BatchNorm uses the batch's own statistics, and rank 0's running
    ones are broadcast before each evaluation.
    """
    no_buffers: dict[str, Any] = {buffers_flag(): False}
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        **no_buffers,
        gradient_as_bucket_view=True,  # spares a second copy of all gradients; docs/performance.md has the times
        bucket_cap_mb=train.bucket_cap_mb,
    )
    if train.gradient_compression == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(None, bf16_compress_hook)
    if train.compile:
        # One program for each size of batch: with sizes left open, which program runs would depend on what came before.
        ddp.compile(dynamic=False)
    return ddp


def buffers_flag() -> str:
    """The argument of DDP that has buffers broadcast: torch 2.14 deprecates one name for another; 2.6 knows only it."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"


def check_compiler(train: TrainSpec, environ: Mapping[str, str]) -> None:
    """Look for the C++ compiler that torch.compile needs, on GPUs too.

    Raises CompilerError: there is none.
    """
    wanted = [environ["CXX"]] if environ.get("CXX") else ["g++", "clang++", "c++"]
    if train.compile and not any(shutil.which(name, path=environ.get("PATH")) for name in wanted):
        raise CompilerError(
            f"train.compile needs a C++ compiler, and none of {', '.join(wanted)} is in PATH here: load or install one "
            "(setup: in the spec), or set train.compile=false"
        )


def settle_buckets(ddp: DistributedDataParallel, numerics: Numerics, num_images: int = 2) -> None:
    """Run two discarded forward and backward passes, so that the first step of every attempt sums in the same order.

    DDP packs its gradients anew after its first backward pass, in the order in which they came; the order of sums, and
    with it the last bits, changes there.  Without this a resumed run's first step differs from the straight run's at 4
    ranks (at 2 the sum of two numbers has no order).

    num_images: of a pass; a compiled model is compiled for this number.
    """
    buffers = [buffer.clone() for buffer in ddp.module.buffers()]
    images = torch.zeros(num_images, 3, 32, 32, device=numerics.device).contiguous(memory_format=numerics.memory_format)
    for _ in range(2):
        with numerics.autocast():
            logits = ddp(images)
        logits.float().sum().backward()
    for buffer, kept in zip(ddp.module.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    ddp.zero_grad(set_to_none=True)
