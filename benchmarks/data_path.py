"""Images per second and core that augmentation gives, against torchvision's loader, in one run.

    python -m benchmarks.data_path [--repeats 7]

The reference (benchmarks/reference/torchvision_loader.py) crops, flips, makes tensors, normalises, without workers, so
that both are one core's work.  Ours does the same from the resident data set, and with cutout too.
"""

import argparse
import time
from collections.abc import Callable, Collection
from statistics import median

import torch

from benchmarks.loop_of_rank import CPU, noise
from benchmarks.reference.torchvision_loader import loader
from jobs.batch import Reader
from jobs.data import DataSet, epoch_order
from jobs.numerics import Numerics

BATCH = 128
NUM_TRAIN = 50_000
NUM_REFERENCE = 100 * BATCH  # images of one measurement
LEAST = 10.0  # times the reference's rate
VARIANTS: tuple[tuple[str, ...], ...] = (("flip", "crop"), ("flip", "crop", "cutout"))


def main() -> None:
    """Measure in turn and print a line for each set of operations."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_path", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as the training has it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    data = noise(NUM_TRAIN)
    reference = loader(data.train_images[:NUM_REFERENCE], data.train_labels[:NUM_REFERENCE], BATCH)
    theirs: list[float] = []
    ours: dict[Collection[str], list[float]] = {ops: [] for ops in VARIANTS}
    for number in range(args.repeats + 1):
        theirs.append(rate(NUM_REFERENCE, lambda: exhaust(reference)))
        for ops in VARIANTS:
            ours[ops].append(rate(NUM_TRAIN, lambda ops=ops, number=number: read_epoch(data, ops, number)))  # type: ignore[misc]
    for ops in VARIANTS:
        ratio = median(mine / other for mine, other in zip(ours[ops][1:], theirs[1:], strict=True))
        print(
            f"{', '.join(ops)}; batches of {BATCH}: torchvision's crop and flip {median(theirs[1:]):,.0f} images/s, "
            f"ours {median(ours[ops][1:]):,.0f}, ratio {ratio:.1f}, at least {LEAST:.0f} asked: "
            f"{'kept' if ratio >= LEAST else 'MISSED'}"
        )


def exhaust(batches: "torch.utils.data.DataLoader[tuple[torch.Tensor, int]]") -> None:
    """Read all batches and drop them."""
    for _ in batches:
        pass


def read_epoch(data: DataSet, ops: Collection[str], epoch: int) -> None:
    """Read all images in one epoch's order, as one rank does."""
    reader = Reader(data, Numerics(CPU, "bf16"), ops, seed=0)
    for ids in torch.split(epoch_order(0, epoch, NUM_TRAIN), BATCH):
        reader.read(ids, epoch)


def rate(num_images: int, work: Callable[[], None]) -> float:
    """Images per second."""
    began = time.perf_counter()
    work()
    return num_images / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
