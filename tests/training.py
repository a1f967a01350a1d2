"""Real runs for the tests: write a spec, submit it, wait for a step, kill it, read what it left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.plan import LaunchPlan
from cluster.runs import MEASURED, RunFolder, read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0  # for a start on a loaded machine; nothing is measured by it

# Small enough for two cores; several gradient buckets, several epochs with a short last batch, saves within epochs.
SPEC = """\
name: tiny
{where}
train:
  model: small
  epochs: 4
  global_batch_size: 60
  bucket_cap_mb: 0.1
  log_every_steps: 1
  device: cpu
  lr: 0.05
dataset:
  kind: synthetic
  root: {data}
  num_train: 640
  num_test: 128
checkpoint:
  every_steps: 7
run_root: {runs}
"""
# Of the undisturbed run's environment; in pieces, since this file is part of the snapshot in its folder.
SECRETS = {"DEMO_API_TOKEN": "-".join(("correct", "horse", "battery", "staple"))}
TOTAL_STEPS = 44  # 4 epochs of 11 steps, the last of 40 images
LOCAL = "cluster: local\ntasks_per_node: 4"


def environment(state: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment with an index of its own."""
    return {**os.environ, "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1", **(extra or {})}


def write_spec(folder: Path, data: Path, where: str = LOCAL) -> Path:
    """SPEC in a file; runs go below the folder."""
    path = folder / "tiny.yaml"
    path.write_text(SPEC.format(where=where, data=data, runs=folder / "runs"))
    return path


def submit(*words: object, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -m cluster.submit` to its end."""
    return subprocess.run(
        command("cluster.submit", *words),
        env=dict(environ),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def command(module: str, *words: object) -> list[str]:
    """`python -m module words`."""
    return [sys.executable, "-m", module, *map(str, words)]


def newest_run(folder: Path) -> RunFolder:
    """The run made last below a test's folder."""
    return RunFolder(max((folder / "runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns))


def summary_of(run: RunFolder) -> dict[str, Any]:
    """summary.json, or a failure that shows the logs."""
    assert run.summary.exists(), "\n".join(path.read_text(errors="replace") for path in sorted(run.logs.iterdir()))
    return dict(json.loads(run.summary.read_text()))


def wait_for(what: str, condition: Any, *, patience_s: float = PATIENCE_S) -> None:  # noqa: ANN401
    """Poll until condition() holds."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.02)


def last_step(run: RunFolder) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    return max((line["step"] for line in read_lines(run.metrics)), default=0)


def wait_for_step(folder: Path, step: int) -> RunFolder:
    """The run below a folder once it has logged a step."""
    wait_for("a run folder", lambda: list((folder / "runs").glob("*/*/plan.json")))
    run = newest_run(folder)
    wait_for(f"step {step}", lambda: last_step(run) >= step)
    return run


def processes_of(run: RunFolder) -> list[int]:
    """Processes whose command line names the run folder: supervisor, srun, ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(run.path).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def kill_all(run: RunFolder) -> int:
    """kill -9 of everything that belongs to a run, at once; returns how many processes that were."""
    pids = processes_of(run)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for("the killed processes to go", lambda: not processes_of(run))
    return len(pids)


def metrics_without_timing(run: RunFolder) -> list[dict[str, Any]]:
    """metrics.jsonl without what may differ between a resumed run and an undisturbed one."""
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in read_lines(run.metrics)]


def with_faulty_rank(plan: LaunchPlan, rank: int, at_step: int) -> LaunchPlan:
    """A plan whose training program has a bug in one rank."""
    place = plan.rank.index("jobs.train")
    faulty = ("tests.faulty_train", str(rank), str(at_step))
    return replace(plan, rank=(*plan.rank[:place], *faulty, *plan.rank[place + 1 :]))


def with_stuck_rank(plan: LaunchPlan, how: str, rank: int, at_step: int = 0) -> LaunchPlan:
    """A plan whose training program gets stuck in one rank, see tests/stuck_train.py."""
    place = plan.rank.index("jobs.train")
    stuck = ("tests.stuck_train", how, str(rank), str(at_step))
    return replace(plan, rank=(*plan.rank[:place], *stuck, *plan.rank[place + 1 :]))


def events_of(run: RunFolder, name: str) -> list[dict[str, Any]]:
    """All events of one kind."""
    return [event for event in run.read_events() if event["event"] == name]
