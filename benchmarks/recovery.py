"""Recovery: a stop signal to the committed checkpoint and the last exit; a killed rank to the first new step.

    python -m benchmarks.recovery [--repeats 5]

Real processes on this machine: the supervisor and two ranks.  All limits come from the same run:

- A stop (ResNet-18, 90 MB a save): TERM to the supervisor, which is what Slurm's USR2 or TERM to the ranks comes to.
  Limit: two steps + the save + 1 s until the checkpoint is committed, 2 s more until the last process is gone.
- A crash (the small net): kill -9 of one rank, 0 and 1 in turn, and the supervisor starts the ranks again in place.
  Limit until the first new step: a start as benchmarks/start_up.py measures it + 3 s.
"""

import argparse
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.start_up import SPEC as SMALL
from benchmarks.start_up import prepare, start_supervised
from benchmarks.supervised_run import (
    events_of,
    kill_rank,
    make_run,
    start_supervisor,
    wait_for_event,
    wait_for_steps,
)
from cluster.runs import RunFolder, read_lines, seconds_between, utc_now
from cluster.spec import JobSpec

STOP_EXTRA_S, LEAVE_S, CRASH_EXTRA_S = 1.0, 2.0, 3.0
NUM_STEPS = 5  # before each stop

RESNET = """\
name: stop
cluster: local
tasks_per_node: 2
run_root: {folder}/runs
train: {{model: resnet18, batch_size_per_rank: 16, epochs: 100, log_every_steps: 1, device: cpu}}
dataset: {{kind: synthetic, root: {folder}/data, num_train: 2048, num_test: 512}}
"""
CRASHING = SMALL.replace("epochs: 1,", "epochs: 1000, log_every_steps: 1,") + "checkpoint: {{every_steps: 10}}\n"


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop; seconds."""

    committed_s: float  # from the signal to the checkpoint, read back
    left_s: float  # from there to the last exit
    step_s: float
    save_s: float

    @property
    def limit_s(self) -> float:
        """For committed_s."""
        return 2 * self.step_s + self.save_s + STOP_EXTRA_S


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report_stops(measure_stops(prepare(Path(folder), RESNET), args.repeats, os.environ))
    with tempfile.TemporaryDirectory() as folder:
        report_crashes(*measure_crashes(prepare(Path(folder), CRASHING), args.repeats, os.environ))


def report_stops(stops: Sequence[Stop]) -> None:
    """Print what a stop took beside what it may take."""
    limit_s, committed_s, left_s = (
        median(getattr(stop, name) for stop in stops) for name in ("limit_s", "committed_s", "left_s")
    )
    step_s, save_s = median(stop.step_s for stop in stops), median(stop.save_s for stop in stops)
    print(
        f"signal to committed checkpoint: limit 2 x {step_s:.2f} s + {save_s:.2f} s + {STOP_EXTRA_S} s = "
        f"{limit_s:.2f} s, ours {committed_s:.2f} s, ratio {committed_s / limit_s:.2f}, {kept(committed_s, limit_s)}"
    )
    print(
        f"from there to the last exit: limit {LEAVE_S} s, ours {left_s:.2f} s, ratio {left_s / LEAVE_S:.2f}, "
        f"{kept(left_s, LEAVE_S)}; the slowest of {len(stops)}: "
        f"{max(stop.committed_s for stop in stops):.2f} s and {max(stop.left_s for stop in stops):.2f} s"
    )


def report_crashes(starts_s: Sequence[float], crashes_s: Sequence[float]) -> None:
    """Print what a crash took beside what it may take."""
    start_s, crash_s = median(starts_s), median(crashes_s)
    limit_s = start_s + CRASH_EXTRA_S
    print(
        f"killed rank to the first new step: limit a start of {start_s:.2f} s + {CRASH_EXTRA_S} s = {limit_s:.2f} s, "
        f"ours {crash_s:.2f} s, ratio {crash_s / limit_s:.2f}, {kept(crash_s, limit_s)}; "
        f"the slowest of {len(crashes_s)}: {max(crashes_s):.2f} s"
    )


def kept(seconds: float, limit_s: float) -> str:
    """In one word."""
    return "kept" if seconds <= limit_s else "MISSED"


def measure_stops(spec: JobSpec, repeats: int, environ: Mapping[str, str]) -> list[Stop]:
    """Stop one run again and again, each time a few steps after its start."""
    run, plan = make_run(spec, "stop", environ)
    stops = []
    for attempt in range(1, repeats + 1):
        supervisor = start_supervisor(run, plan, environ)
        wait_for_steps(run, attempt, NUM_STEPS)
        signalled = utc_now()
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
        stops.append(stop_of(run, attempt, signalled, utc_now()))
    return stops


def stop_of(run: RunFolder, attempt: int, signalled: str, left: str) -> Stop:
    """One stop, from the events and metrics of its attempt."""
    saved = events_of(run, "checkpoint_saved", attempt)[-1]
    steps_ms = [line["step_ms_p50"] for line in read_lines(run.metrics) if line["attempt"] == attempt]
    committed_s = seconds_between(signalled, saved["time"])
    return Stop(committed_s, seconds_between(saved["time"], left), median(steps_ms[1:]) / 1e3, saved["seconds"])


def measure_crashes(spec: JobSpec, repeats: int, environ: Mapping[str, str]) -> tuple[list[float], list[float]]:
    """Seconds of starts, and from a kill to the next attempt's first step; one after the other in turn."""
    starts_s, crashes_s = [], []
    run, plan = make_run(spec, "crash", environ)
    start_supervised(spec, environ)  # so that all files are in the kernel's cache
    for number in range(repeats):
        starts_s.append(start_supervised(spec, environ).seconds)
        supervisor = start_supervisor(run, plan, environ)
        attempt = 2 * number + 1
        wait_for_event(run, "first_step", attempt)
        wait_for_event(run, "checkpoint_saved", attempt)
        killed = utc_now()
        kill_rank(run, number % 2)
        crashes_s.append(seconds_between(killed, wait_for_event(run, "first_step", attempt + 1)["time"]))
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
    return starts_s, crashes_s


if __name__ == "__main__":
    main()
