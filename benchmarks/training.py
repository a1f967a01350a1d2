"""Images per second of the whole training loop, against the bare step and against the usual recipe, in one run.

    python -m benchmarks.training [--repeats 5] [--ranks 2]

Bare (benchmarks/reference/bare_step.py): forward, backward and update of one fixed batch, in the loop's precision and
memory layout.  Usual (benchmarks/reference/usual_training.py): fp32, contiguous, torchvision's loader.  Ours: all of it
but evaluation and saves.  All three are timed in turn by the same processes, with one thread each.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.loop_of_rank import end_loop, join_ranks, make_loop, read_spec_text
from benchmarks.reference.bare_step import bare_images_per_s
from benchmarks.reference.usual_training import usual_images_per_s
from cluster.runs import RunFolder
from jobs.loop import Loop
from jobs.model import build_model

BATCH = 128  # images of a step, per rank
SPEC = """\
name: training
cluster: local
train: {{model: {model}, batch_size_per_rank: {batch}, device: cpu, epochs: 100}}
dataset: {{kind: synthetic, augment: [flip, crop, cutout]}}
checkpoint: {{every_minutes: 600.0}}
"""


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured, and what it has to reach."""

    model: str
    num_steps: int  # of one measurement
    least_of_bare: float | None  # ours / bare
    least_of_usual: float | None  # ours / usual


TASKS = (Task("resnet18", 4, 0.97, 1.9), Task("small", 40, None, None))


def main() -> None:
    """Measure both models and print a line for each comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    for task in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, args=(args.ranks, Path(folder), task, args.repeats), nprocs=args.ranks)  # type: ignore[no-untyped-call]
            report(task, args.ranks, json.loads((Path(folder) / "rates.json").read_text()))


def report(task: Task, num_ranks: int, rates: dict[str, list[float]]) -> None:
    """Print the medians; each ratio is the median of those of the single rounds."""
    ours = median(rates["ours"])
    for name, least in (("bare", task.least_of_bare), ("usual", task.least_of_usual)):
        ratio = median(mine / other for mine, other in zip(rates["ours"], rates[name], strict=True))
        goal = "" if least is None else f", at least {least} asked: {'kept' if ratio >= least else 'MISSED'}"
        print(
            f"{task.model}, {num_ranks} ranks, batch {BATCH} per rank: {name} {median(rates[name]):.1f} images/s, "
            f"ours {ours:.1f}, ratio {ratio:.3f}{goal}"
        )


def measure(rank: int, num_ranks: int, folder: Path, task: Task, repeats: int) -> None:
    """One rank: the three in turn, again and again."""
    torch.set_num_threads(1)
    join_ranks(rank, num_ranks, folder)
    spec = read_spec_text(SPEC.format(model=task.model, batch=BATCH), folder)
    loop = make_loop(spec, RunFolder(folder / "run"), rank, num_ranks, num_train=50_000)
    bf16 = loop.numerics.precision == "bf16"
    rates: dict[str, list[float]] = {"usual": [], "bare": [], "ours": []}
    for _ in range(repeats):
        part = loop.data.train_images[: BATCH * (task.num_steps + 1)]
        labels = loop.data.train_labels[: len(part)]
        torch.use_deterministic_algorithms(False)  # neither reference asks for it
        rates["usual"].append(
            usual_images_per_s(
                build_model(task.model, 10), part, labels, batch_size=BATCH, num_warm=1, num_steps=task.num_steps - 1
            )
        )
        rates["bare"].append(
            bare_images_per_s(
                build_model(task.model, 10),
                batch_size=BATCH,
                bf16=bf16,
                channels_last=loop.numerics.channels_last,
                num_warm=1,
                num_steps=task.num_steps,
            )
        )
        torch.use_deterministic_algorithms(True)
        rates["ours"].append(images_per_s(loop, num_ranks, task.num_steps))
    end_loop(loop)
    if rank == 0:
        (folder / "rates.json").write_text(json.dumps(rates))
    dist.destroy_process_group()


def images_per_s(loop: Loop, num_ranks: int, num_steps: int) -> float:
    """Of all ranks, after one step that is not counted."""
    loop.step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    dist.barrier()
    return BATCH * num_steps * num_ranks / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
