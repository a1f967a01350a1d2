"""Goodput of a run that is preempted after every minute of training, beside the usual way to come back.

    python -m benchmarks.goodput [--epochs 5] [--epoch-s 40] [--period-s 60]

Takes about nine minutes.  The same job twice: ResNet-18 in fp32, two ranks, epochs of 40 seconds; a short run tells how
many steps that are, and how many make a minute.  So the usual way loses 20 s of each minute, half an epoch, which is
what a kill at a random moment costs it on average; with epochs longer than a minute it would never end.

Goodput is the time in steps that count in the final result / the time for which processes were there, measured from
outside for both; a preempted job is started again at once, so no time in a queue counts.  Ours is told to stop by TERM
to the supervisor; the reference, benchmarks/reference/usual_resume.py, is ended by TERM where it stands.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.start_up import fork_ranks, free_port, prepare
from benchmarks.supervised_run import make_run, num_logged, start_supervisor, wait_for, wait_for_steps
from cluster.launch import rank_variables
from cluster.runs import RunFolder, read_lines
from cluster.spec import JobSpec

LIMIT = 0.90
BATCH_SIZE, NUM_RANKS = 32, 2  # batch size of each rank
NUM_TRIAL_STEPS = 10
PATIENCE = 3  # attempts in a row that save no epoch: then it never ends

SPEC = """\
name: goodput
cluster: local
tasks_per_node: 2
run_root: {folder}/runs
train: {{model: resnet18, precision: fp32, batch_size_per_rank: 32, epochs: EPOCHS, log_every_steps: 1, device: cpu}}
dataset: {{kind: synthetic, root: {folder}/data, num_train: NUM_TRAIN, num_test: 64}}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job that has finished, or never will: then no step counts."""

    counting_s: float  # in steps that count in the final result
    held_s: float  # for which processes were there
    attempts: int

    @property
    def goodput(self) -> float:
        """Between 0 and 1."""
        return self.counting_s / self.held_s

    def text(self) -> str:
        """In words."""
        return (
            f"{self.goodput:.3f} ({self.counting_s:.0f} s of steps in {self.held_s:.0f} s, "
            f"{self.attempts - 1} preemptions)"
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides do."""

    epochs: int
    num_train: int  # images of an epoch
    period: int  # steps of an attempt until the next preemption


def main() -> None:
    """Measure the usual way, then ours."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-s", type=float, default=40.0)
    parser.add_argument("--period-s", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        step_s = step_seconds(spec_in(Path(folder), args.epochs, 2048), os.environ)
        num_train = round(args.epoch_s / step_s) * BATCH_SIZE * NUM_RANKS
        job = Job(args.epochs, num_train, round(args.period_s / step_s))
        spec = spec_in(Path(folder), job.epochs, job.num_train)
        usual = run_usual(job, spec.dataset.staged_path, Path(folder) / "usual", os.environ)
        print(f"usual way: goodput {usual.text()}", flush=True)
        ours, by_summary = run_ours(job, spec, os.environ)
    print(f"ours: goodput {ours.text()}; summary.json says {by_summary:.3f}")
    verdict = "kept" if ours.goodput >= LIMIT else "MISSED"
    ratio = f"{ours.goodput / usual.goodput:.2f}" if usual.goodput else "none, the usual way never ends"
    print(f"ratio {ratio}; limit for ours {LIMIT}, {verdict}")


def spec_in(folder: Path, epochs: int, num_train: int) -> JobSpec:
    """The job with its data staged."""
    return prepare(folder, SPEC.replace("EPOCHS", str(epochs)).replace("NUM_TRAIN", str(num_train)))


def step_seconds(spec: JobSpec, environ: Mapping[str, str]) -> float:
    """How long a step takes here and now."""
    run, plan = make_run(spec, "trial", environ)
    supervisor = start_supervisor(run, plan, environ)
    wait_for_steps(run, 1, NUM_TRIAL_STEPS)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait()
    return float(median(line["step_ms_p50"] for line in read_lines(run.metrics))) / 1e3


def run_ours(job: Job, spec: JobSpec, environ: Mapping[str, str]) -> tuple[Outcome, float]:
    """Our run to its end, and the goodput that its summary tells."""
    run, plan = make_run(spec, "ours", environ)
    held_s = 0.0
    while not run.summary.exists():
        attempt, began = run.latest_attempt() + 1, time.monotonic()
        supervisor = start_supervisor(run, plan, environ)
        wait_for("steps or the end", run, partial(is_due_or_over, run, attempt, job.period, supervisor))
        supervisor.send_signal(signal.SIGTERM)  # does nothing once it is gone
        supervisor.wait()
        held_s += time.monotonic() - began
    steps = [line["step_ms_p50"] / 1e3 for line in read_lines(run.metrics)]
    return Outcome(sum(steps), held_s, run.latest_attempt()), json.loads(run.summary.read_text())["goodput"]


def is_due_or_over(run: RunFolder, attempt: int, period: int, supervisor: "subprocess.Popen[bytes]") -> bool:
    """Whether an attempt has made its steps, or has ended by itself."""
    return num_logged(run, attempt) >= period or supervisor.poll() is not None


def run_usual(job: Job, staged: Path, folder: Path, environ: Mapping[str, str]) -> Outcome:
    """The reference to its end, or until no epoch fits between two preemptions."""
    folder.mkdir()
    script = [sys.executable, "-m", "benchmarks.reference.usual_resume"]
    command = [*script, str(staged), str(folder), str(job.epochs), str(BATCH_SIZE)]
    held_s: list[float] = []
    saved_by = [0]  # epochs, after each attempt
    while saved_by[-1] < job.epochs:
        if len(saved_by) > PATIENCE and saved_by[-1] == saved_by[-1 - PATIENCE]:
            return Outcome(0.0, sum(held_s), len(held_s))
        held_s.append(attempt_usual(command, job.period, environ))
        saved_by.append(len(list(read_lines(folder / "epochs.jsonl"))))
    counting_s = sum(line["step_seconds"] for line in read_lines(folder / "epochs.jsonl"))
    return Outcome(counting_s, sum(held_s), len(held_s))


def attempt_usual(command: Sequence[str], period: int, environ: Mapping[str, str]) -> float:
    """Seconds of one attempt of the reference, which TERM ends unless it ends by itself."""
    began = time.monotonic()
    ranks = fork_ranks(command, environ, rank_variables("127.0.0.1", free_port(), "", 1))
    assert ranks[0].stdout is not None
    said = [ranks[0].stdout.readline() for _ in range(period)]
    if said[-1]:  # it goes on
        for rank in ranks:
            rank.terminate()
    for rank in ranks:
        rank.communicate()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
