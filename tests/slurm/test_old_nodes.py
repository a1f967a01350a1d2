"""Runs on nodes with an older system than ours: coreutils 8.30 of RHEL, Rocky and Alma 8, whose `env` blocks nothing.

Sisters looked for: the batch script of a submission, its start without submitit's pickle, a successor's script and
sbatch/ddp.sbatch (all begin the supervisor by the same function, or as it does), the ranks under srun (each node tries
its own `env`), local ranks and those in a pyxis image (they need no `env` at all).
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from tests import training
from tests.executables import put_old_env
from tests.slurm.test_comeback import (
    check_equal,
    hold_still,
    preempt,
    start_run,
    undisturbed,
    wait_until_finished,
    where,
)
from tests.slurm.test_jobs import TINY, sbatch, wait_until_gone
from tests.training import REPOSITORY, command, environment, submit, summary_of, write_spec

__all__ = ["preempt", "undisturbed"]  # fixtures


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The old `env` is first on PATH: where the job is submitted, in the batch script and before each rank."""
    put_old_env(tmp_path / "old")
    variables = {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return {**variables, "PATH": f"{tmp_path / 'old'}:{os.environ['PATH']}"}


def test_run_on_nodes_with_an_old_env_finishes(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    refused = subprocess.run(["env", "--block-signal=TERM", "true"], env=environ, capture_output=True, check=False)
    assert refused.returncode == 125
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 5")
    done = submit(spec, "train.max_steps=3", "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    assert summary_of(training.newest_run(tmp_path))["world_size"] == 2


@pytest.mark.long
def test_raw_sbatch_on_nodes_with_an_old_env_finishes(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = tmp_path / "4node.yaml"
    shutil.copy(REPOSITORY / "configs/4node.yaml", spec)
    words = [*TINY, f"dataset.root={staged_data}", f"run_root={tmp_path / 'runs'}"]
    raw = {**environ, "SPEC": str(spec), "PYTHON": command("")[0]}
    flags = [f"--output={tmp_path}/ddp-%j.log", "--nodes=2", "--time=5"]
    job_id = sbatch(*flags, "sbatch/ddp.sbatch", *words, environ=raw)
    wait_until_gone(job_id, environ)
    assert summary_of(RunFolder(tmp_path / "runs/4node" / job_id))["world_size"] == 4


@pytest.mark.long
def test_preempted_run_on_nodes_with_an_old_env_comes_back(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    hold_still(run)
    preempt()
    wait_until_finished(run, job_id, environ)
    summary = check_equal(run, undisturbed, ["preempted"])
    assert (summary["preemptions"], summary["lost_steps"]) == (1, 0)
