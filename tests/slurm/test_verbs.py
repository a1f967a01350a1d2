"""cluster.stop and cluster.cancel on a real Slurm: the ranks save, the queue empties, and the marks are obeyed."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster import slurm
from cluster.runs import RunFolder, manifest_steps
from tests import training
from tests.slurm.test_jobs import job_field, wait_until_gone
from tests.training import REPOSITORY, command, environment, events_of, submit, write_spec

WHERE = "nodes: 2\ntime_limit: 5\npartition: low"
HELD = f"{WHERE}\nsbatch:\n  hold: true"


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path)}


def start(folder: Path, data: Path, environ: Mapping[str, str], where: str) -> tuple[RunFolder, str]:
    """Submit a run that nobody else would end within a test; returns it and the job id."""
    done = submit(write_spec(folder, data, where), "train.epochs=400", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    return RunFolder(Path(submitted["run_dir"])), submitted["job_id"]


def verb(name: str, *words: object, environ: Mapping[str, str]) -> dict[str, str]:
    """`python -m cluster.<name> words --json`; its object, with the exit code."""
    words = (*words, "--json")
    done = subprocess.run(
        command(f"cluster.{name}", *words), env=dict(environ), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "exit_code": str(done.returncode)}


def pruned(reference: str, environ: Mapping[str, str]) -> tuple[int, str, str | None]:
    """Exit code, and what `cluster.prune --yes` says of the one run that is meant."""
    words = command("cluster.prune", reference, "--yes", "--json")
    done = subprocess.run(words, env=dict(environ), cwd=REPOSITORY, capture_output=True, text=True)
    (one,) = json.loads(done.stdout)["runs"]
    return done.returncode, one["state"], one["reason"]


def answered(run: RunFolder, job_id: str | None, action: str, exit_code: int = 0) -> dict[str, str | None]:
    """What a verb is expected to say."""
    told = {"run_dir": str(run.path), "run_id": run.run_id, "job_id": job_id, "action": action}
    return {**told, "exit_code": str(exit_code)}


def state_of(job_id: str, environ: Mapping[str, str]) -> str:
    job = slurm.maybe_job_state(job_id, environ)
    return job.state if job else "gone"


def test_running_job_saves_and_leaves_and_the_run_goes_on_by_hand(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start(tmp_path, staged_data, environ, WHERE)
    training.wait_for_step(tmp_path, 3)
    assert verb("stop", job_id, environ=environ) == answered(run, job_id, "signalled")
    wait_until_gone(job_id, environ)
    stopped = events_of(run, "stopped")[0]
    assert run.checkpoints.joinpath(f"step_{stopped['step']:08d}.json").exists()
    assert (job_field(job_id, "ExitCode", environ), job_field(job_id, "Restarts", environ)) == ("75:0", "0")

    run.stop_mark.unlink()
    assert verb("stop", run.path, environ=environ) == answered(run, None, "none", exit_code=1)
    assert not run.stop_mark.exists()


def test_job_that_is_stopped_before_its_ranks_are_there_trains_nothing_more(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start(tmp_path, staged_data, environ, WHERE)
    training.wait_for("the job to start", lambda: state_of(job_id, environ) != "PENDING")
    assert verb("stop", run.run_id, environ=environ)["exit_code"] == "0"
    wait_until_gone(job_id, environ)
    assert job_field(job_id, "ExitCode", environ) == "75:0"
    assert not run.summary.exists()


def test_waiting_job_is_taken_out_of_the_queue_and_its_run_can_be_cancelled_still(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start(tmp_path, staged_data, environ, HELD)
    assert verb("stop", "tiny", "--requeue", environ=environ) == answered(run, job_id, "left")
    assert (run.stop_mark.exists(), state_of(job_id, environ)) == (False, "PENDING")
    assert verb("stop", "tiny", environ=environ) == answered(run, job_id, "dequeued")
    assert (run.stop_mark.exists(), state_of(job_id, environ)) == (True, "CANCELLED")
    assert verb("cancel", "tiny", environ=environ) == answered(run, None, "marked")
    refused = submit("--resume", "tiny", environ=environ)
    assert (refused.returncode, refused.stderr) == (2, f"{run.path} was cancelled by its user and stays ended\n")


def test_cancelled_job_saves_and_stays_ended(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    run, job_id = start(tmp_path, staged_data, environ, WHERE)
    training.wait_for_step(tmp_path, 3)
    assert verb("cancel", job_id, environ=environ) == answered(run, job_id, "cancelled")
    wait_until_gone(job_id, environ)
    assert (state_of(job_id, environ), job_field(job_id, "Restarts", environ)) == ("CANCELLED", "0")
    assert [event["step"] for event in events_of(run, "stopped")] == [max(manifest_steps(run.checkpoints))]
    assert verb("cancel", job_id, environ=environ) == answered(run, None, "marked")


def test_cancelled_waiting_job_never_starts(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    run, job_id = start(tmp_path, staged_data, environ, HELD)
    assert pruned(job_id, environ) == (1, "alive", f"job {job_id} is in the queue, or runs")
    assert verb("cancel", job_id, environ=environ) == answered(run, job_id, "cancelled")
    wait_until_gone(job_id, environ)
    assert (state_of(job_id, environ), run.latest_attempt()) == ("CANCELLED", 0)
    assert list(run.submitit.iterdir()) != []
    assert pruned(job_id, environ) == (0, "cancelled", None)
    assert list(run.submitit.iterdir()) == []
