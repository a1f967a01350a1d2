"""How long a save keeps the training waiting, against torch.save + fsync of the same state in the same run.

    python -m benchmarks.save_stall [--ranks 1 2] [--saves 11] [--folder DIR]

ResNet-18 with momentum, about 90 MB.  After each save of ours has been committed the plain one writes the same state to
the same folder.  The first save of each kind is left out; the medians of the others are compared.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.loop_of_rank import end_loop, join_ranks, make_loop, read_spec_text
from benchmarks.reference.plain_save import plain_save
from cluster.runs import RunFolder
from jobs.loop import Loop

SPEC = """\
name: stall
cluster: local
train: {model: resnet18, global_batch_size: 16, device: cpu, epochs: 100}
dataset: {kind: synthetic}
checkpoint: {every_minutes: 600.0}
"""


def main() -> None:
    """Measure at each number of ranks and print one line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_stall", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=11)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder by default")
    args = parser.parse_args()
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            spawn(train, args=(num_ranks, Path(folder), args.saves), nprocs=num_ranks)  # type: ignore[no-untyped-call]
            report(num_ranks, json.loads((Path(folder) / "figures.json").read_text()))


def report(num_ranks: int, figures: dict[str, Any]) -> None:
    """Print the medians."""
    plain, ours = (statistics.median(figures[name][1:]) for name in ("plain_s", "stall_s"))
    alone, beside = (statistics.median(figures[name][1:]) for name in ("step_alone_s", "step_beside_s"))
    print(
        f"{num_ranks} ranks: torch.save + fsync {plain * 1e3:.1f} ms ({figures['plain_bytes']:,} bytes), "
        f"stall {ours * 1e3:.2f} ms ({figures['bytes']:,} bytes), ratio {ours / plain:.3f}; "
        f"a step beside a save takes {beside / alone:.2f} times one alone ({alone:.2f} s)"
    )


def train(rank: int, num_ranks: int, folder: Path, num_saves: int) -> None:
    """One rank: a save every other step."""
    torch.set_num_threads(1)
    join_ranks(rank, num_ranks, folder)
    loop = make_loop(read_spec_text(SPEC, folder), RunFolder(folder / "run"), rank, num_ranks)
    figures: dict[str, Any] = {name: [] for name in ("plain_s", "stall_s", "step_alone_s", "step_beside_s")}
    released_s: list[float] = []
    release = loop.saver.release
    loop.saver.release = lambda: released_s.append(timed(release))  # type: ignore[method-assign]
    for _ in range(num_saves):
        figures["step_alone_s"].append(timed(loop.step))
        loop.settle()
        stall_s = timed(loop.save)
        figures["step_beside_s"].append(timed(loop.step))
        figures["stall_s"].append(stall_s + released_s[-1])
        loop.saver.wait()
        dist.barrier()
        if rank == 0:
            figures["plain_s"].append(timed(lambda: plain_save(state_of(loop), folder / "plain.pt")))
        dist.barrier()
    end_loop(loop)
    if rank == 0:
        newest = max(loop.recorder.run.checkpoints.glob("*.pt"))
        sizes = {"plain_bytes": (folder / "plain.pt").stat().st_size, "bytes": newest.stat().st_size}
        (folder / "figures.json").write_text(json.dumps(figures | sizes))
    dist.barrier()
    dist.destroy_process_group()


def state_of(loop: Loop) -> dict[str, Any]:
    """What our checkpoint holds."""
    return {
        **loop.learner.state(),
        "schedule": asdict(loop.length),
        "state": loop.state.as_dict(),
    }


def timed(work: Any) -> float:  # noqa: ANN401
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
