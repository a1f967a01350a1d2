"""What each option of a step costs or gains, against the step as it is by default, in one run.

    python -m benchmarks.step_options [--repeats 5] [--model small] [--batch 16] [--compile]

Two ranks over gloo on one machine: a network between nodes is not in it.  Small batches, so that the sum of gradients
and the update weigh more than in training.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loop_of_rank import CPU, join_ranks
from jobs.model import build_model
from jobs.numerics import Numerics, Precision
from jobs.parallel import buffers_flag

NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Option:
    """One way to make a step."""

    name: str
    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of DistributedDataParallel
    sgd: dict[str, Any] = field(default_factory=lambda: {"fused": True})
    precision: Precision = "bf16"
    channels_last: bool = True
    compresses: bool = False  # gradients, to bf16
    micro_batches: int = 1
    syncs_each: bool = False  # of the micro-batches, instead of the last alone
    compiles: bool = False


DEFAULT = Option("as by default")
OPTIONS = (
    DEFAULT,
    Option("gradient_as_bucket_view off", ddp={"gradient_as_bucket_view": False}),
    Option("BatchNorm's buffers broadcast in each step", ddp={buffers_flag(): True}),
    Option("static_graph", ddp={"static_graph": True}),
    Option("buckets of 1 MiB", ddp={"bucket_cap_mb": 1.0}),
    Option("buckets of 100 MiB", ddp={"bucket_cap_mb": 100.0}),
    Option("gradients compressed to bf16", compresses=True),
    Option("2 micro-batches, sum in the last (no_sync)", micro_batches=2),
    Option("2 micro-batches, sum in each", micro_batches=2, syncs_each=True),
    Option("SGD one weight at a time", sgd={"foreach": False}),
    Option("SGD foreach", sgd={"foreach": True}),
    Option("contiguous", channels_last=False),
    Option("fp32", precision="fp32"),
    Option("fp32, contiguous", precision="fp32", channels_last=False),
)
COMPILED = Option("torch.compile", compiles=True)


def main() -> None:
    """Measure all in turn and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_options", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=("resnet18", "small"), default="resnet18")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, per rank")
    parser.add_argument("--steps", type=int, default=4, help="of one measurement")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: a minute more, and a C++ compiler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, args=(Path(folder), args), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    print(f"{args.model}, {NUM_RANKS} ranks, batch {args.batch} per rank; a step {median(seconds[DEFAULT.name]):.4f} s")
    for name, found in seconds.items():
        ratio = median(mine / usual for mine, usual in zip(found, seconds[DEFAULT.name], strict=True))
        print(f"{ratio:6.3f}  {name}")


def measure(rank: int, folder: Path, args: argparse.Namespace) -> None:
    """One rank: all options in turn, again and again."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join_ranks(rank, NUM_RANKS, folder)
    options = (*OPTIONS, COMPILED) if args.compile else OPTIONS
    steps = {option.name: make_step(option, args.model, args.batch) for option in options}
    for step in steps.values():  # the first ones pack buckets, allocate, compile
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(args.steps):
                step()
            dist.barrier()
            seconds[name].append((time.perf_counter() - began) / args.steps)
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def make_step(option: Option, model_name: str, batch: int) -> Callable[[], None]:
    """A training step on a fixed batch of noise."""
    numerics = Numerics(CPU, option.precision)
    layout = torch.channels_last if option.channels_last else torch.contiguous_format
    model = build_model(model_name, 10).to(memory_format=layout)
    arguments = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25.0, buffers_flag(): False} | option.ddp
    ddp = DistributedDataParallel(model, **arguments)
    if option.compresses:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(None, bf16_compress_hook)
    if option.compiles:
        ddp.compile(dynamic=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True, **option.sgd)
    images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=layout)
    parts = torch.chunk(images, option.micro_batches)
    labels = torch.chunk(torch.randint(0, 10, (batch,)), option.micro_batches)

    def forward_backward(part: Tensor, target: Tensor) -> None:
        with numerics.autocast():
            logits = ddp(part).float()
        torch.autograd.backward(functional.cross_entropy(logits, target))

    def step() -> None:
        for part, target in zip(parts[:-1], labels[:-1], strict=True):
            if option.syncs_each:
                forward_backward(part, target)
            else:
                with ddp.no_sync():
                    forward_backward(part, target)
        forward_backward(parts[-1], labels[-1])
        sgd.step()
        sgd.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
