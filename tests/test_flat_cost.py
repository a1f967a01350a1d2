"""Cost on shared storage: what a start asks of the run folder does not grow with the number of ranks."""

import collections
import functools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.plan import read_plan, write_plan
from cluster.runs import RunFolder
from tests import training
from tests.training import REPOSITORY, command, environment, submit, summary_of, write_spec

TRACED = "trace=%file,read,pread64,readv,preadv,getdents64,write,pwrite64,fsync,ftruncate"
CALL = re.compile(r"^(?:\d+ +)?(?:[\d:.]+ )?(\w+)\(")


def count_calls(folder: Path, data: Path, num_ranks: int) -> collections.Counter[str]:
    """System calls of all ranks, by name, that name the run folder, in a start from a checkpoint."""
    where = f"cluster: local\ntasks_per_node: {num_ranks}"
    spec = write_spec(folder, data, where)
    words = ["train.max_steps=2", "train.epochs=1", "train.warmup_epochs=0", "train.global_batch_size=64"]
    first = submit(spec, *words, "checkpoint.every_steps=1", environ=environment(folder))
    assert first.returncode == 0, first.stderr
    run = training.newest_run(folder)
    summary_of(run)
    run.summary.unlink()  # as if the last moments had been lost
    trace = folder / "trace"
    return traced(run, trace, environment(folder))


def traced(run: RunFolder, trace: Path, environ: dict[str, str]) -> collections.Counter[str]:
    """Start the ranks once more, under strace."""
    plan = read_plan(run)
    strace = ("strace", "-f", "-ff", "-y", "--seccomp-bpf", "-qq", "-e", TRACED, "-o", str(trace))
    write_plan(replace(plan, rank=(*strace, *plan.rank)), run)
    words = command("cluster.supervise", run.path)
    done = subprocess.run(words, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for path in trace.parent.glob("trace.*") for line in path.read_text(errors="replace").splitlines()]
    # Every rank is started with the log as its standard error, and Python looks at that once.
    # The program lies there as well: each rank loads it, as it would from anywhere, and looks at the folder on the way.
    ways = (str(run.attempt_log(2)), str(run.code), f'"{run.path}"')
    named = [
        line for line in lines if str(run.path) in functools.reduce(lambda rest, way: rest.replace(way, ""), ways, line)
    ]
    found = [CALL.match(line) for line in named if "execve(" not in line]
    return collections.Counter(match[1] for match in found if match)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: it counts the system calls")
def test_start_of_eight_ranks_asks_no_more_of_the_run_folder_than_that_of_two(
    tmp_path: Path, staged_data: Path
) -> None:
    counts = {}
    for num_ranks in (2, 8):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        counts[num_ranks] = count_calls(folder, staged_data, num_ranks)
    print("\n", counts)
    assert sum(counts[2].values()) > 50
    few, many = counts[2], counts[8]
    grown = {name: (few[name], count) for name, count in many.items() if count > few[name] + 2}  # a beat more or less
    assert grown == {}
