"""How long one task takes to find its place in a job step of many nodes, eight tasks on each, and how much memory.

    python -m benchmarks.scale [--repeats 31]

Reference: all names expanded and all tasks listed by a plain script.  Both in turn, in this process; medians.  Peaks
are of Python's own allocations in one derivation of its own.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping

from benchmarks.reference.naive_ranks import naive_rank
from cluster.rank import read_rank

LIMIT_MS = 20.0
TASKS = 8
STEPS: Mapping[str, tuple[str, int]] = {
    "n[00001-16384]": ("n[00001-16384]", 16_384),
    "4,096 single names": (",".join(f"host{7 * number}" for number in range(4096)), 4096),
    "rack[01-16]chassis[1-32]n[01-32]": ("rack[01-16]chassis[1-32]n[01-32]", 16_384),
}


def main() -> None:
    """Measure and print one line for each step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    repeats = parser.parse_args().repeats
    for name, (nodelist, num_nodes) in STEPS.items():
        environ = last_task(nodelist, num_nodes, TASKS)
        (rank, local_rank, _, world_size), place = naive_rank(environ), read_rank(environ)
        assert (rank, local_rank, world_size) == (place.rank, place.local_rank, place.world_size)
        turns_ms = [(taken_ms(naive_rank, environ), taken_ms(read_rank, environ)) for _ in range(repeats)]
        reference_ms, ours_ms = (statistics.median(side) for side in zip(*turns_ms, strict=True))
        one_task = peak_kib(read_rank, last_task(nodelist, num_nodes, 1))
        print(
            f"{name}, {TASKS} tasks each: reference {reference_ms:.1f} ms, {peak_kib(naive_rank, environ):,.0f} KiB; "
            f"ours {ours_ms:.2f} ms, ratio {ours_ms / reference_ms:.3f}, limit {LIMIT_MS:.0f} ms; at its peak "
            f"{peak_kib(read_rank, environ):,.0f} KiB, with one task each {one_task:,.0f} KiB"
        )


def last_task(nodelist: str, num_nodes: int, tasks: int) -> dict[str, str]:
    """The variables of a step's last task."""
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(num_nodes * tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{num_nodes})",
        "SLURM_PROCID": str(num_nodes * tasks - 1),
        "SLURM_LOCALID": str(tasks - 1),
        "SLURM_NODEID": str(num_nodes - 1),
    }


def taken_ms(derive: Callable[[Mapping[str, str]], object], environ: Mapping[str, str]) -> float:
    """Milliseconds of one derivation."""
    began = time.perf_counter()
    derive(environ)
    return (time.perf_counter() - began) * 1e3


def peak_kib(derive: Callable[[Mapping[str, str]], object], environ: Mapping[str, str]) -> float:
    """KiB that one derivation holds at its peak."""
    tracemalloc.start()
    derive(environ)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


if __name__ == "__main__":
    main()
