"""From fork to the end of the first step: two ranks of jobs.train against the shortest program that trains in parallel.

    python -m benchmarks.start_up [--repeats 7]

The reference is benchmarks/reference/bare_start.py.  Ours: the small net on made-up images that were staged before,
started as the supervisor starts ranks on one machine, and by hand with torchrun's variables, which makes the run folder
as well.  Interleaved; the first round is left out, so files are in the kernel's cache.  A start ends when rank 0 has
taken its first step: the line of the reference, the event first_step of ours; all ranks are then killed.
"""

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cluster.launch import local_variables, rank_variables
from cluster.plan import make_plan
from cluster.rank import SPEC_VARIABLE
from cluster.runs import RunFolder, read_lines, seconds_between, utc_now, write_atomic
from cluster.spec import JobSpec, dump_spec, load_spec

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
FACTOR, EXTRA_S = 1.15, 0.2  # the limit: so many times the reference, and so much more
POLL_S = 0.01

SPEC = """\
name: start
cluster: local
tasks_per_node: 2
run_root: {folder}/runs
train: {{model: small, epochs: 1, batch_size_per_rank: 32, device: cpu}}
dataset: {{kind: synthetic, root: {folder}/data, num_train: 2048, num_test: 512}}
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of all ranks."""

    seconds: float  # from before the first fork to the end of rank 0's first step
    cpu_seconds: float  # of all ranks together, until they were killed
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds, as the event first_step has them


def main() -> None:
    """Measure in turn and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = prepare(Path(folder), SPEC)
        rounds = [
            (start_reference(os.environ), start_supervised(spec, os.environ), start_by_hand(spec, os.environ))
            for _ in range(args.repeats + 1)
        ]
    reference, supervised, by_hand = (list(starts) for starts in zip(*rounds[1:], strict=True))
    report("supervised", reference, supervised)
    report("by hand", reference, by_hand)


def prepare(folder: Path, text: str) -> JobSpec:
    """A spec whose runs and data lie in a folder, and its data staged.  text: with {folder} where that is named."""
    path = folder / "spec.yaml"
    path.write_text(text.format(folder=folder))
    subprocess.run([sys.executable, "-m", "jobs.stage", str(path)], cwd=REPOSITORY, check=True, stdout=sys.stderr)
    return load_spec(path, cwd=folder)


def report(route: str, reference: Sequence[Start], ours: Sequence[Start]) -> None:
    """Print the medians of one route beside the reference's."""
    theirs_s, ours_s = (median(start.seconds for start in starts) for starts in (reference, ours))
    theirs_cpu_s, ours_cpu_s = (median(start.cpu_seconds for start in starts) for starts in (reference, ours))
    limit_s = limit_of(theirs_s)
    print(
        f"{route}: reference {theirs_s:.2f} s, ours {ours_s:.2f} s, ratio {ours_s / theirs_s:.2f}; "
        f"limit {FACTOR} x + {EXTRA_S} s = {limit_s:.2f} s, {'kept' if ours_s <= limit_s else 'MISSED'}; "
        f"CPU of all ranks {theirs_cpu_s:.2f} s and {ours_cpu_s:.2f} s, ratio {ours_cpu_s / theirs_cpu_s:.2f}"
    )
    medians = {name: median(start.phases[name] for start in ours) for name in ours[0].phases}
    print("  phases of rank 0, seconds: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in medians.items()))


def limit_of(reference_s: float) -> float:
    """Seconds that our start may take."""
    return FACTOR * reference_s + EXTRA_S


def start_reference(environ: Mapping[str, str]) -> Start:
    """The bare program, from fork to rank 0's line."""
    before_s, began = children_cpu_s(), time.monotonic()
    command = [sys.executable, "-m", "benchmarks.reference.bare_start"]
    ranks = fork_ranks(command, environ, rank_variables("127.0.0.1", free_port(), "", 1))
    assert ranks[0].stdout is not None
    said = ranks[0].stdout.readline()
    seconds = time.monotonic() - began
    assert said == b"stepped\n", f"rank 0 of the reference said {said!r}"
    end(ranks)
    return Start(seconds, children_cpu_s() - before_s)


def start_supervised(spec: JobSpec, environ: Mapping[str, str]) -> Start:
    """Ranks as cluster.supervise starts them on one machine, in a run folder that is there."""
    run = RunFolder(new_root(spec) / spec.name / "supervised")
    run.make()
    write_atomic(run.spec, dump_spec(spec))
    plan = make_plan(spec, run, python=sys.executable, maybe_code_root=REPOSITORY)
    meeting = rank_variables("127.0.0.1", free_port(), "supervised", run.claim_attempt({}))
    return time_ours(
        plan.rank, {**environ, **meeting, SPEC_VARIABLE: run.spec.read_text()}, meeting, run.path.parents[1]
    )


def start_by_hand(spec: JobSpec, environ: Mapping[str, str]) -> Start:
    """Ranks as somebody starts them with torchrun's variables; rank 0 makes the run folder."""
    root = new_root(spec)
    command = [sys.executable, "-m", "jobs.train", str(spec.run_root.parent / "spec.yaml"), f"run_root={root}"]
    return time_ours(command, environ, rank_variables("127.0.0.1", free_port(), "", 1), root)


def time_ours(command: Sequence[str], environ: Mapping[str, str], meeting: Mapping[str, str], root: Path) -> Start:
    """Start ranks, wait until the one run below a folder tells of its first step, and kill them."""
    before_s, began = children_cpu_s(), utc_now()
    ranks = fork_ranks(command, environ, meeting)
    first_step = wait_for_first_step(ranks, root)
    end(ranks)
    return Start(seconds_between(began, first_step["time"]), children_cpu_s() - before_s, first_step["phases"])


def fork_ranks(
    command: Sequence[str], environ: Mapping[str, str], meeting: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Two processes with torchrun's variables and one thread each."""
    return [
        subprocess.Popen(
            command,
            env={**environ, **local_variables(number, NUM_RANKS, meeting), "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in range(NUM_RANKS)
    ]


def wait_for_first_step(ranks: Sequence[subprocess.Popen[bytes]], root: Path) -> dict[str, Any]:
    """The event of the one run below a folder."""
    while all(rank.poll() is None for rank in ranks):
        for events in root.glob("*/*/events.jsonl"):
            for event in read_lines(events):
                if event["event"] == "first_step":
                    return event
        time.sleep(POLL_S)
    raise RuntimeError(f"a rank ended before its first step: {[rank.poll() for rank in ranks]}")


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill ranks and wait for them, so that their CPU time counts."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()


def new_root(spec: JobSpec) -> Path:
    """A place for the runs of one start."""
    return spec.run_root / str(time.time_ns())


def free_port() -> str:
    """A TCP port that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def children_cpu_s() -> float:
    """CPU seconds of all children that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
