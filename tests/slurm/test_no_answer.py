"""A Slurm that does not say where the supervisor's own job is: what waits for its answer, and what does not.

Sisters: a controller that stands by, one that is stopped, no squeue at all; a run that is over, one whose ranks may
start again here, one that would have to be requeued (never unasked: tests/test_requeue.py, tests/test_job.py).
"""

import json
import os
import signal
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from tests import training
from tests.executables import put_executable
from tests.slurm.test_comeback import check_equal, environ, start_run, undisturbed, where
from tests.slurm.test_jobs import has_rank, job_field, wait_until_gone

__all__ = ["environ", "undisturbed"]  # fixtures

STANDBY = "slurm_load_jobs error: Slurm backup controller in standby mode"


def without_squeue(folder: Path) -> str:
    """Lines of a spec under which a job's squeue is one that finds only a controller that stands by."""
    put_executable(folder / "bin", "squeue", f"echo {STANDBY!r} >&2; exit 1")
    return f"setup:\n- export PATH={folder}/bin:$PATH\n"


def test_finished_run_leaves_its_nodes_though_squeue_refuses(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(more=without_squeue(tmp_path)))
    wait_until_gone(job_id, environ)
    check_equal(run, undisturbed, [])
    assert job_field(job_id, "JobState", environ) == "COMPLETED"


@pytest.mark.long
def test_killed_rank_is_started_again_though_squeue_refuses(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(more=without_squeue(tmp_path)))
    (rank,) = [pid for pid in training.processes_of(run) if has_rank(pid, 2)]
    os.kill(rank, signal.SIGKILL)
    wait_until_gone(job_id, environ)
    check_equal(run, undisturbed, ["killed"])
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["action"], verdict["why"].endswith(STANDBY)) == ("restart", True)
