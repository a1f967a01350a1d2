"""Runs whose jobs Slurm does not requeue: they finish through successors, and nobody's job is left in the queue."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cluster import slurm
from cluster.runs import RunFolder
from tests import training
from tests.slurm.test_comeback import (
    FAULT_STEP,
    check_equal,
    environ,
    hold_still,
    node_state,
    preempt,
    start_raw,
    start_run,
    undisturbed,
    where,
)
from tests.slurm.test_jobs import has_rank, job_field, wait_until_gone
from tests.slurm.test_verbs import verb
from tests.training import events_of, submit, summary_of, write_spec

__all__ = ["environ", "preempt", "undisturbed"]  # fixtures

SUCCESSOR = "requeue:\n  mode: successor\n"


def jobs_of(run: RunFolder) -> list[str]:
    """All jobs of a run, oldest first."""
    return [str(event["job_id"]) for event in events_of(run, "submitted")]


def successor_of(run: RunFolder) -> str:
    """The job that waits behind the first one."""
    training.wait_for("a successor", lambda: len(jobs_of(run)) >= 2)
    return jobs_of(run)[1]


def state_of(job_id: str, environ: Mapping[str, str]) -> str:
    job = slurm.maybe_job_state(job_id, environ)
    return job.state if job else "gone"


def check_no_job_left(run: RunFolder, environ: Mapping[str, str]) -> None:
    """All jobs of the run leave the queue."""
    for job_id in jobs_of(run):
        wait_until_gone(job_id, environ)


def wait_until_finished(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Wait for the done marker; a run that nobody goes on with fails the test."""

    def is_over() -> bool:
        return run.summary.exists() or all(
            slurm.has_ended(job) for job in (slurm.maybe_job_state(job_id, environ) for job_id in jobs_of(run))
        )

    training.wait_for("the run to finish", is_over)
    check_no_job_left(run, environ)


@pytest.mark.parametrize(
    "partition", ["low-nograce", *(pytest.param(name, marks=pytest.mark.long) for name in ("low", "low-cancel"))]
)
def test_preempted_run_goes_on_in_its_successor(
    partition: str,
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(partition, more=SUCCESSOR))
    waiting = successor_of(run)
    assert state_of(waiting, environ) == "PENDING"
    hold_still(run)
    preempt()
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["preempted"])
    first, second, third = jobs_of(run)
    assert (first, second) == (job_id, waiting)
    assert [state_of(job, environ) for job in (second, third)] == ["COMPLETED", "CANCELLED"]
    # 22.05 says FAILED of a job that leaves within its grace period, 24.11 PREEMPTED.
    assert state_of(first, environ) in (("PREEMPTED",) if partition == "low-nograce" else ("FAILED", "PREEMPTED"))
    assert [event.get("predecessor") for event in events_of(run, "submitted")] == [None, first, second]
    assert job_field(first, "Requeue", environ) == job_field(second, "Requeue", environ) == "0"


@pytest.mark.long
def test_cancelled_job_ends_its_run_for_good_though_a_successor_waits(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(more=SUCCESSOR))
    waiting = successor_of(run)
    subprocess.run(["scancel", job_id], env=environ, check=True)
    check_no_job_left(run, environ)
    assert run.cancel_mark.exists()
    assert (state_of(job_id, environ), jobs_of(run), run.latest_attempt()) == ("CANCELLED", [job_id, waiting], 1)
    refused = submit("--resume", run.path, environ=environ)
    assert (refused.returncode, refused.stderr) == (2, f"{run.path} was cancelled by its user and stays ended\n")


@pytest.mark.long
def test_node_that_fails_twice_is_left_out_of_the_next_job(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    text = where(more="tasks_per_node: 2\n").replace("nodes: 4", "nodes: 2")
    run, job_id = start_run(tmp_path, staged_data, environ, text)
    bad = events_of(run, "attempt_started")[0]["nodes"][1]
    kill_rank(run, 3)
    training.wait_for("the second attempt", lambda: len(events_of(run, "first_step")) == 2)
    kill_rank(run, 2)  # on the same node
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["killed", "killed"])
    assert [event["node"] for event in events_of(run, "node_excluded")] == [bad]
    assert [json.loads(run.verdict(number).read_text())["action"] for number in (1, 2)] == ["restart", "requeue"]
    first, second, third = events_of(run, "attempt_started")
    assert first["nodes"] == second["nodes"]
    assert bad not in third["nodes"]
    assert (job_field(job_id, "ExcNodeList", environ), job_field(job_id, "Restarts", environ)) == (bad, "1")


def kill_rank(run: RunFolder, rank: int) -> None:
    """kill -9 of one rank of the running attempt."""
    (pid,) = [pid for pid in training.processes_of(run) if has_rank(pid, rank)]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_bad_node_is_left_out_of_the_successor_that_waits(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    text = where(more=f"tasks_per_node: 2\n{SUCCESSOR}").replace("nodes: 4", "nodes: 2")
    run, _ = start_run(tmp_path, staged_data, environ, text)
    bad = events_of(run, "attempt_started")[0]["nodes"][1]
    kill_rank(run, 3)
    training.wait_for("the second attempt", lambda: len(events_of(run, "first_step")) == 2)
    kill_rank(run, 3)
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["killed", "killed"])
    assert bad not in events_of(run, "attempt_started")[2]["nodes"]
    assert [job_field(job, "ExcNodeList", environ) for job in jobs_of(run)] == ["(null)", bad, bad]


@pytest.mark.long
def test_node_that_dies_twice_is_left_out_though_it_is_back_and_slurm_requeues(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    text = where(more="tasks_per_node: 2\n").replace("nodes: 4", "nodes: 2")
    run, job_id = start_run(tmp_path, staged_data, environ, text)
    bad = events_of(run, "attempt_started")[0]["nodes"][1]
    for attempt in (1, 2):
        training.wait_for("the ranks", lambda number=attempt: len(events_of(run, "first_step")) == number)
        try:
            update_node(bad, "State=down", environ)
            training.wait_for("the verdict", run.verdict(attempt).exists)
            training.wait_for("Slurm's requeue", lambda: job_field(job_id, "JobState", environ) == "PENDING")
        finally:
            if "DOWN" in node_state(bad, environ):  # it may have registered again
                update_node(bad, "State=resume", environ)
    wait_until_finished(run, environ)
    verdicts = [json.loads(run.verdict(number).read_text()) for number in (1, 2)]
    assert [(verdict["cause"], verdict["node"], verdict["action"]) for verdict in verdicts] == [
        ("node failure", bad, "leave")
    ] * 2
    assert [event["node"] for event in events_of(run, "node_excluded")] == [bad]
    assert bad not in events_of(run, "attempt_started")[2]["nodes"]
    assert job_field(job_id, "ExcNodeList", environ) == bad


def update_node(node: str, change: str, environ: Mapping[str, str]) -> None:
    """Take a node down, or bring it back."""
    subprocess.run(["scontrol", "update", f"NodeName={node}", change, "Reason=test"], env=environ, check=True)


@pytest.mark.long
def test_refused_requeue_is_made_up_for_by_a_successor(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    subprocess.run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"], env=environ, check=True)
    hold_still(run)
    preempt()
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["preempted"])
    (requeued,) = events_of(run, "requeued")
    assert jobs_of(run) == [job_id, requeued["successor"]]


@pytest.mark.long
def test_job_that_slurm_may_not_requeue_has_a_successor_from_the_start(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    spec = write_spec(tmp_path, staged_data, where("low-nograce", more="sbatch:\n  hold: true\n"))
    job_id = json.loads(submit(spec, "--json", environ=environ).stdout)["job_id"]
    for words in (["update", f"JobId={job_id}", "Requeue=0"], ["release", job_id]):
        subprocess.run(["scontrol", *words], env=environ, check=True)
    run = training.wait_for_step(tmp_path, FAULT_STEP)
    assert state_of(successor_of(run), environ) == "PENDING"
    hold_still(run)
    preempt()
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["preempted"])


@pytest.mark.long
def test_run_that_fails_for_good_leaves_no_job(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    fault = "faults:\n- {at_step: 5, rank: 1, do: raise}\n"
    spec = write_spec(tmp_path, staged_data, where(more=SUCCESSOR + fault))
    done = submit(spec, "--wait", environ={**environ, "CLUSTER_ALLOW_FAULTS": "1"})
    assert done.returncode == 1
    run = training.newest_run(tmp_path)
    check_no_job_left(run, environ)
    assert [state_of(job, environ) for job in jobs_of(run)] == ["FAILED", "CANCELLED"]
    assert (run.latest_attempt(), run.cancel_mark.exists()) == (1, False)


BEFOREHAND = f"{SUCCESSOR}  submit_from: login\n  successors: 2\n"


@pytest.mark.long
def test_run_goes_on_in_successors_that_were_put_in_beforehand(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, _ = start_run(tmp_path, staged_data, environ, where("low-nograce", more=BEFOREHAND))
    assert [state_of(job, environ) for job in jobs_of(run)] == ["RUNNING", "PENDING", "PENDING"]
    hold_still(run)
    preempt()
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["preempted"])
    assert [state_of(job, environ) for job in jobs_of(run)] == ["PREEMPTED", "COMPLETED", "CANCELLED"]


@pytest.mark.long
def test_cancel_of_a_waiting_successor_ends_the_chain_and_not_the_running_job(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, _ = start_run(tmp_path, staged_data, environ, where(more=BEFOREHAND))
    hold_still(run)
    _, second, third = jobs_of(run)
    subprocess.run(["scancel", second], env=environ, check=True)
    wait_until_gone(third, environ)  # it starts, as its predecessor has ended, and sees that the run is in good hands
    assert [state_of(job, environ) for job in jobs_of(run)] == ["RUNNING", "CANCELLED", "COMPLETED"]
    for pid in training.processes_of(run):
        os.kill(pid, signal.SIGCONT)
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, [])
    assert not run.cancel_mark.exists()


@pytest.mark.long
def test_run_stays_ended_when_a_job_of_those_put_in_beforehand_is_cancelled(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(more=BEFOREHAND))
    subprocess.run(["scancel", job_id], env=environ, check=True)
    check_no_job_left(run, environ)
    assert (run.cancel_mark.exists(), run.summary.exists(), run.latest_attempt()) == (True, False, 1)


@pytest.mark.long
def test_successor_that_starts_after_a_cancel_writes_the_mark_and_trains_nothing(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, where(more=f"{BEFOREHAND}sbatch:\n  hold: true\n"))
    submitted = json.loads(submit(spec, "--json", environ=environ).stdout)
    run = RunFolder(Path(submitted["run_dir"]))
    subprocess.run(["scancel", submitted["job_id"]], env=environ, check=True)
    check_no_job_left(run, environ)
    assert run.cancel_mark.exists()
    assert (run.latest_attempt(), state_of(jobs_of(run)[1], environ)) == (0, "FAILED")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "action", "mark"), [("stop", "signalled", "stop"), ("cancel", "cancelled", "cancelled")]
)
def test_verb_ends_the_running_job_and_takes_its_successor_away(
    name: str, action: str, mark: str, tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(more=SUCCESSOR), "train.epochs=100")
    waiting = successor_of(run)
    alive = submit("--resume", run.path, environ=environ)
    assert (alive.returncode, alive.stderr.split(":")[0]) == (2, f"job {job_id} of this run is RUNNING")
    told = verb(name, waiting, environ=environ)
    assert (told["job_id"], told["action"], told["exit_code"]) == (job_id, action, "0")
    check_no_job_left(run, environ)
    assert state_of(waiting, environ) == "CANCELLED"
    assert (run.path / f"{mark}.json").exists()
    assert (run.latest_attempt(), run.summary.exists(), len(jobs_of(run))) == (1, False, 2)


@pytest.mark.long
def test_raw_job_goes_on_in_its_successor(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_raw(tmp_path, staged_data, environ, "--partition=low-nograce", more=SUCCESSOR)
    hold_still(run)
    preempt()
    wait_until_finished(run, environ)
    check_equal(run, undisturbed, ["preempted"])
    assert jobs_of(run)[0] == job_id == run.run_id
    assert (job_field(job_id, "Requeue", environ), state_of(job_id, environ)) == ("0", "PREEMPTED")


@pytest.mark.long
def test_following_a_run_goes_on_in_its_successor(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], preempt: Callable[[], None]
) -> None:
    spec = write_spec(tmp_path, staged_data, where("low-nograce", more=SUCCESSOR))
    waiting = subprocess.Popen(
        training.command("cluster.submit", spec, "--wait"),
        env=environ,
        cwd=training.REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    run = training.wait_for_step(tmp_path, FAULT_STEP)
    hold_still(run)
    preempt()
    output, _ = waiting.communicate()
    assert (waiting.returncode, output.splitlines()[-1].split(":")[0]) == (0, "finished")
    assert summary_of(run)["attempts"] == 2
    check_no_job_left(run, environ)
