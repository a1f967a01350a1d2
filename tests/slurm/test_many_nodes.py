"""Thirty-two ranks on sixteen nodes: a run that is preempted, comes back, and ends as the undisturbed one does."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster import slurm
from cluster.runs import RunFolder
from cluster.sandbox import down, up, without_slurm
from tests import training
from tests.slurm.conftest import leftovers, skip_without_slurm
from tests.training import TOTAL_STEPS, environment, events_of, submit, summary_of, write_spec

NUM_NODES, NUM_RANKS = 16, 32
WHERE = f"nodes: {NUM_NODES}\ntasks_per_node: 2\ntime_limit: 60\npartition: low\nsignal_lead_s: 60"
PATIENCE_S = 900.0  # thirty-two interpreters load torch on however few cores there are
SOON = 4  # steps done when the job is preempted


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of its own: the one that all tests share has four nodes."""
    skip_without_slurm()
    parent = Path(tempfile.mkdtemp(prefix="slurm-"))
    sandbox = up(parent / "s", num_nodes=NUM_NODES, gpus_per_node=2, environ=os.environ)
    try:
        yield {**environment(tmp_path), **without_slurm(os.environ), **sandbox.variables(), "OMP_NUM_THREADS": "1"}
    finally:
        down(sandbox.directory)
        shutil.rmtree(parent)
    assert leftovers(sandbox.directory) == []


def start(folder: Path, data: Path, environ: Mapping[str, str]) -> tuple[RunFolder, str]:
    """Submit a run below a new folder; returns it and the job id."""
    folder.mkdir()
    done = submit(write_spec(folder, data, WHERE), "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return RunFolder(Path(answer["run_dir"])), answer["job_id"]


def wait_until_finished(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> None:
    def is_over() -> bool:
        return slurm.has_ended(slurm.maybe_job_state(job_id, environ))

    training.wait_for("the run to finish", lambda: run.summary.exists() or is_over(), patience_s=PATIENCE_S)
    training.wait_for("the job to end", is_over)


@pytest.mark.long
def test_run_of_thirty_two_ranks_is_preempted_and_comes_back_equal(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    straight, job_id = start(tmp_path / "undisturbed", staged_data, environ)
    wait_until_finished(straight, job_id, environ)
    run, job_id = start(tmp_path / "preempted", staged_data, environ)
    training.wait_for("some steps", lambda: training.last_step(run) >= SOON, patience_s=PATIENCE_S)
    preemptor = ["sbatch", "-phigh", f"-N{NUM_NODES}", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 2"]
    subprocess.run(preemptor, env=environ, check=True, capture_output=True)
    wait_until_finished(run, job_id, environ)
    summary, undisturbed = summary_of(run), summary_of(straight)
    told = ("world_size", "steps", "attempts", "preemptions", "lost_steps", "bit_exact")
    assert [undisturbed[key] for key in told] == [NUM_RANKS, TOTAL_STEPS, 1, 0, 0, True]
    assert [summary[key] for key in told] == [NUM_RANKS, TOTAL_STEPS, 2, 1, 0, True]
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert training.metrics_without_timing(run) == training.metrics_without_timing(straight)
    assert [len(event["nodes"]) for event in events_of(run, "attempt_started")] == [NUM_NODES, NUM_NODES]
