"""Array members: each run is that of one member, though Slurm gives the last one the array's own number.

Sisters of the entry, and what was found:
- cancel, stop, requeue, update and signals named the array by its number: all name ARRAY_TASK, and so do events, the
  claim, the ranks' events, the log's name and the run folder.
- the state was the first line that squeue printed, of whichever member: the lines are searched; waiting members come
  one a line (SQUEUE_ARRAY).
- a job that is submitted from inside a member inherits SLURM_ARRAY_*, so that its supervisor requeued that member:
  Slurm is asked (tests/test_job.py).
- accounting was asked for numbers only, and prune compared ids as numbers: both take ARRAY_TASK.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster import slurm
from cluster.runs import RunFolder
from tests import training
from tests.slurm.test_jobs import has_rank, sbatch
from tests.slurm.test_views import asked, verb
from tests.training import environment, events_of, summary_of, write_spec

ONE_RANK = "nodes: 1\ntime_limit: 10\ntasks_per_node: 1\nrequeue: {max_failures: 1}"


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def submit_array(spec: Path, tasks: str, environ: Mapping[str, str], *flags: str, overrides: str = "") -> str:
    """The raw route as an array; returns its id."""
    size = ["--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10", "-plow"]
    words = [f"--array={tasks}", f"--output={spec.parent}/ddp-%A_%a.log", *size, *flags, "sbatch/ddp.sbatch"]
    raw = {**environ, "SPEC": str(spec), "PYTHON": training.command("")[0]}
    return sbatch(*words, *([overrides] if overrides else []), environ=raw)


def state_of(job_id: str, environ: Mapping[str, str]) -> str:
    job = slurm.maybe_job_state(job_id, environ)
    return "" if job is None else job.state


def wait_for_end(job_id: str, environ: Mapping[str, str]) -> None:
    training.wait_for(f"job {job_id} to end", lambda: slurm.has_ended(slurm.maybe_job_state(job_id, environ)))


def test_cancel_stop_and_a_killed_rank_of_one_member_leave_the_others_alone(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, ONE_RANK)
    array = submit_array(spec, "1-3", environ, "--nodes=1", overrides="train.epochs=9999")
    runs = {task: RunFolder(tmp_path / "runs" / "tiny" / f"{array}_{task}") for task in (1, 2, 3)}
    for task in (1, 2, 3):
        training.wait_for(f"member {task}", lambda task=task: training.last_step(runs[task]) > 7)
    assert verb("cancel", f"{array}_1", environ=environ).returncode == 0
    wait_for_end(f"{array}_1", environ)

    (rank,) = (pid for pid in training.processes_of(runs[3]) if has_rank(pid, 0))
    os.kill(rank, signal.SIGKILL)
    training.wait_for("the restart", lambda: events_of(runs[3], "resumed"))
    (restarted,) = events_of(runs[3], "restarted")
    assert (restarted["job_id"], restarted["cause"]) == (f"{array}_3", "killed")

    assert verb("cancel", runs[3].path, environ=environ).returncode == 0
    wait_for_end(f"{array}_3", environ)
    assert state_of(f"{array}_2", environ) == "RUNNING"
    answer, code = asked("stop", f"{array}_2", environ=environ)
    assert (answer["action"], answer["job_id"], code) == ("signalled", f"{array}_2", 0)
    wait_for_end(f"{array}_2", environ)
    words = {task: asked("status", run.path, environ=environ)[0]["state"] for task, run in runs.items()}
    assert words == {1: "cancelled", 2: "stopped", 3: "cancelled"}
    assert {event["job_id"] for event in runs[2].read_events()} == {f"{array}_2"}


@pytest.mark.long
def test_preempted_member_comes_back_while_another_waits_and_both_end_equal(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(
        tmp_path, staged_data, ONE_RANK.replace("nodes: 1", "nodes: 4").replace("10", "10\npartition: low")
    )
    array = submit_array(spec, "1-2", environ, "--nodes=4", "--exclusive")
    first, second = (RunFolder(tmp_path / "runs" / "tiny" / f"{array}_{task}") for task in (1, 2))
    training.wait_for("member 1", lambda: training.last_step(first) >= 16)
    for pid in [pid for pid in training.processes_of(first) for rank in range(4) if has_rank(pid, rank)]:
        os.kill(pid, signal.SIGSTOP)
    assert state_of(f"{array}_2", environ) == "PENDING"
    sbatch("-phigh", "-N4", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 2", environ=environ)
    training.wait_for("both runs to finish", lambda: first.summary.exists() and second.summary.exists())
    ended = [json.loads(run.verdict(1).read_text())["cause"] for run in (first, second)]
    assert (ended, summary_of(first)["attempts"]) == (["preempted", "finished"], 2)
    assert summary_of(first)["weights_sha256"] == summary_of(second)["weights_sha256"]
    assert (summary_of(first)["lost_steps"], summary_of(first)["bit_exact"]) == (0, True)
    for task in (1, 2):
        wait_for_end(f"{array}_{task}", environ)


def test_run_folder_of_an_older_release_that_holds_the_arrays_number_means_one_member(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    array = sbatch("--array=1-3", "-N1", "-n1", "-o/dev/null", "--wrap=sleep 60", environ=environ)
    members = [f"{array}_{task}" for task in (1, 2, 3)]
    training.wait_for("all members", lambda: [state_of(job, environ) for job in members] == ["RUNNING"] * 3)
    run = RunFolder(tmp_path / "runs" / "demo" / array)
    run.make()
    run.spec.write_text("name: demo\n")
    run.append_event("submitted", attempt=0, job_id=array, route="sbatch")
    seen = asked("status", run.path, environ=environ)[0]
    assert (seen["state"], seen["job_id"], seen["slurm_state"]) == ("starting", f"{array}_3", "RUNNING")
    answer, code = asked("cancel", run.path, environ=environ)
    assert (answer["action"], code) == ("cancelled", 0)
    wait_for_end(f"{array}_3", environ)
    assert [state_of(job, environ) for job in members] == ["RUNNING", "RUNNING", "CANCELLED"]
    slurm.run(["scancel", array], environ)
    for job in members:
        wait_for_end(job, environ)
