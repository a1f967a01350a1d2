"""Runs that come back by themselves on a real Slurm, and end bit-equal to the undisturbed one.

Four ranks on four nodes with several gradient buckets; each fault hits between 20 % and 80 % of the run.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import slurm
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox
from tests import training
from tests.slurm.test_jobs import has_rank, job_field, sbatch, wait_until_gone
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, events_of, submit, summary_of, write_spec

FAULT_STEP = 16  # of TOTAL_STEPS, when a test disturbs the run


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, staged_data: Path, slurm_environ: dict[str, str]
) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    environ = {**slurm_environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = submit(write_spec(folder, staged_data, where()), "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    return training.newest_run(folder)


@pytest.fixture
def preempt(environ: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Takes all nodes for a moment by a job of the higher partition."""
    started: list[str] = []

    def start() -> None:
        started.append(sbatch("-phigh", "-N4", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 2", environ=environ))

    yield start
    for job_id in started:
        subprocess.run(["scancel", job_id], env=environ, check=False)


def where(partition: str = "low", limit: str = "10", more: str = "") -> str:
    return f"nodes: 4\ntime_limit: {limit}\npartition: {partition}\nsignal_lead_s: 10\n{more}"


def start_run(folder: Path, data: Path, environ: Mapping[str, str], text: str, *words: str) -> tuple[RunFolder, str]:
    """Submit and wait until the run has reached FAULT_STEP; returns it and the job id."""
    done = submit(write_spec(folder, data, text), *words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    return training.wait_for_step(folder, FAULT_STEP), json.loads(done.stdout)["job_id"]


def check_equal(run: RunFolder, undisturbed: RunFolder, causes: list[str]) -> dict[str, Any]:
    """The run has finished as the undisturbed one did, after attempts that ended by these causes."""
    summary, straight = summary_of(run), summary_of(undisturbed)
    verdicts = [json.loads(run.verdict(number).read_text()) for number in range(1, summary["attempts"] + 1)]
    assert [verdict["cause"] for verdict in verdicts] == [*causes, "finished"], verdicts
    assert summary["weights_sha256"] == straight["weights_sha256"]
    assert summary["samples_sha256"] == straight["samples_sha256"]
    assert summary["bit_exact"] is True
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)
    resumed = [event["from_step"] for event in events_of(run, "resumed")]
    assert all(TOTAL_STEPS * 0.2 <= step <= TOTAL_STEPS * 0.8 for step in resumed), resumed
    return summary


def wait_until_finished(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> None:
    """Wait for the done marker; a job that ends before that fails the test."""
    training.wait_for(
        "the run to finish",
        lambda: run.summary.exists() or slurm.has_ended(slurm.maybe_job_state(job_id, environ)),
    )
    wait_until_gone(job_id, environ)


@pytest.mark.parametrize(
    "partition", ["low", *(pytest.param(name, marks=pytest.mark.long) for name in ("low-nograce", "low-cancel"))]
)
def test_preempted_run_comes_back(
    partition: str,
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(partition))
    hold_still(run)
    preempt()
    wait_until_finished(run, job_id, environ)
    summary = check_equal(run, undisturbed, ["preempted"])
    assert (summary["preemptions"], summary["lost_steps"]) == (1, 0)
    # Slurm 24.11 requeues a job that leaves in its grace period as well, and counts that beside our own requeue.
    assert job_field(job_id, "Restarts", environ) in ("1", "2")


def test_run_at_its_time_limit_comes_back(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    reach_time_limit(run, job_id, environ)
    wait_until_finished(run, job_id, environ)
    summary = check_equal(run, undisturbed, ["time limit"])
    assert summary["lost_steps"] == 0


def hold_still(run: RunFolder) -> None:
    """Stop all ranks, so that a run of seconds is not over before Slurm acts: it sends CONT before each signal."""
    for pid in [pid for pid in training.processes_of(run) for rank in range(4) if has_rank(pid, rank)]:
        os.kill(pid, signal.SIGSTOP)


def reach_time_limit(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> None:
    """Let a running job meet its limit, which Slurm counts in minutes; the next one gets its ten again."""
    subprocess.run(["scontrol", "update", f"JobId={job_id}", "TimeLimit=1"], env=environ, check=True)
    hold_still(run)
    training.wait_for("the requeue", lambda: events_of(run, "requeued"))
    training.wait_for("the job to wait", lambda: job_field(job_id, "JobState", environ) == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job_id}", "TimeLimit=10"], env=environ, check=True)


@pytest.mark.long
def test_job_that_somebody_requeues_comes_back(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    subprocess.run(["scontrol", "requeue", job_id], env=environ, check=True)
    wait_until_finished(run, job_id, environ)
    summary = check_equal(run, undisturbed, ["requeued"])
    assert summary["lost_steps"] == 0


@pytest.mark.long
def test_run_that_takes_what_is_free_goes_on_with_fewer_nodes(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    text = where().replace("nodes: 4", "nodes: 2-4")
    run, job_id = start_run(tmp_path, staged_data, environ, text)
    hold_still(run)
    try:
        drain = ["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test"]
        subprocess.run(drain, env=environ, check=True)
        subprocess.run(["scontrol", "requeue", job_id], env=environ, check=True)
        wait_until_finished(run, job_id, environ)
    finally:
        subprocess.run(["scontrol", "update", "NodeName=n3", "State=RESUME"], env=environ, check=True)
    summary = summary_of(run)
    worlds = [event["world_size"] for event in events_of(run, "attempt_started")]
    assert (worlds, summary["world_size"], summary["bit_exact"]) == ([4, 3], 3, False)
    assert summary["samples_sha256"] == summary_of(undisturbed)["samples_sha256"]
    assert summary["lost_steps"] == 0


def test_killed_rank_is_started_again_in_the_same_allocation(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    (one,) = [pid for pid in training.processes_of(run) if has_rank(pid, 2)]
    os.kill(one, signal.SIGKILL)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["killed"])
    assert json.loads(run.verdict(1).read_text())["rank"] == 2
    assert job_field(job_id, "Restarts", environ) == "0"
    assert events_of(run, "restarted")[0]["cause"] == "killed"


def test_stopped_rank_is_named_and_the_ranks_start_again_in_the_same_allocation(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(), "train.step_timeout_s=4")
    (one,) = [pid for pid in training.processes_of(run) if has_rank(pid, 2)]
    os.kill(one, signal.SIGSTOP)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["hang"])
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["rank"], verdict["action"]) == (2, "restart")
    assert "\nrank 2: no answer for " in run.stacks_of(1).read_text()
    assert job_field(job_id, "Restarts", environ) == "0"


@pytest.mark.long
def test_job_that_slurm_suspends_for_longer_than_its_deadline_goes_on(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where(), "train.step_timeout_s=4")
    hold_still(run)  # until Slurm does the same
    subprocess.run(["scontrol", "suspend", job_id], env=environ, check=True)
    training.wait_for("the suspension", lambda: job_field(job_id, "JobState", environ) == "SUSPENDED")
    time.sleep(20)  # there is nothing to wait for: nothing happens
    subprocess.run(["scontrol", "resume", job_id], env=environ, check=True)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, [])


@pytest.mark.long
def test_rank_0_killed_while_it_saves_is_started_again(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    fault = f"faults:\n- {{at_step: {FAULT_STEP}, rank: 0, do: slow_save}}\n"
    spec = write_spec(tmp_path, staged_data, where(more=fault))
    done = submit(spec, "--json", environ={**environ, "CLUSTER_ALLOW_FAULTS": "1"})
    run = training.wait_for_step(tmp_path, FAULT_STEP)
    training.wait_for("the temporary file", lambda: list(run.checkpoints.glob("step_00000021.pt.*.tmp")))
    (rank_0,) = [pid for pid in training.processes_of(run) if has_rank(pid, 0)]
    os.kill(rank_0, signal.SIGKILL)
    wait_until_finished(run, json.loads(done.stdout)["job_id"], environ)
    check_equal(run, undisturbed, ["killed"])
    assert list(run.checkpoints.glob("*.tmp")) == []


def test_cancelled_job_stays_cancelled(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    subprocess.run(["scancel", job_id], env=environ, check=True)
    training.wait_for("the verdict", run.verdict(1).exists)
    wait_until_gone(job_id, environ)
    assert json.loads(run.verdict(1).read_text())["cause"] == "user cancel"
    state = slurm.maybe_job_state(job_id, environ)
    assert state is not None
    assert (state.state, job_field(job_id, "Restarts", environ)) == ("CANCELLED", "0")
    assert run.latest_attempt() == 1


@pytest.mark.long
@pytest.mark.parametrize("partition", ["low", "low-nograce"])
def test_preempted_raw_job_comes_back(
    partition: str,
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_raw(tmp_path, staged_data, environ, f"--partition={partition}")
    hold_still(run)
    preempt()
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["preempted"])


@pytest.mark.long
def test_raw_job_at_its_time_limit_comes_back(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_raw(tmp_path, staged_data, environ)
    reach_time_limit(run, job_id, environ)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["time limit"])


def start_raw(
    folder: Path, data: Path, environ: Mapping[str, str], *flags: str, more: str = ""
) -> tuple[RunFolder, str]:
    """The same run by raw sbatch."""
    spec = write_spec(folder, data, where(more=more))
    shape = ["--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]
    log = f"--output={folder}/ddp-%j.log"
    raw = {**environ, "SPEC": str(spec), "PYTHON": command("")[0]}
    job_id = sbatch(*shape, "--signal=USR2@10", log, *flags, REPOSITORY / "sbatch/ddp.sbatch", environ=raw)
    return training.wait_for_step(folder, FAULT_STEP), job_id


@pytest.mark.long
def test_run_that_is_preempted_twice_comes_back_twice(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where("low-nograce"))
    hold_still(run)
    preempt()
    training.wait_for("the second attempt", lambda: len(events_of(run, "first_step")) == 2)
    hold_still(run)
    preempt()
    wait_until_finished(run, job_id, environ)
    summary = check_equal(run, undisturbed, ["preempted", "preempted"])
    assert summary["preemptions"] == 2


@pytest.mark.long
def test_run_whose_node_dies_comes_back_and_its_orphan_rank_changes_no_file(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder, sandbox: Sandbox
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    (orphan,) = [pid for pid in training.processes_of(run) if has_rank(pid, 3)]
    node = node_of(orphan)
    slurmd = [sandbox.programs["slurmd"], "-N", node, "-f", str(sandbox.layout.slurm_conf)]
    for pid in [parent_of(orphan), process_with(slurmd)]:
        os.kill(pid, signal.SIGKILL)
    # A rank that notices nothing for now.  Stopped before its parent died, it would get HUP from the kernel.
    os.kill(orphan, signal.SIGSTOP)
    try:
        # SlurmdTimeout is 30 s; 24.11 takes up to 90 s while a step on the node is being ended
        training.wait_for("Slurm to notice", lambda: "DOWN" in node_state(node, environ), patience_s=300)
    finally:
        subprocess.run(slurmd, env=environ, check=True)  # the run needs all four nodes to come back
    training.wait_for("the next attempt", lambda: run.latest_attempt() >= 2)
    os.kill(orphan, signal.SIGCONT)
    training.wait_for("the orphan to go", lambda: orphan not in training.processes_of(run))
    wait_until_finished(run, job_id, environ)
    causes = [json.loads(run.verdict(number).read_text())["cause"] for number in range(1, run.latest_attempt())]
    assert "node failure" in causes
    check_equal(run, undisturbed, causes)
    assert not (run.failures / "a0001_r00003.json").exists()
    assert job_field(job_id, "Restarts", environ) == "1"


def parent_of(pid: int) -> int:
    """The process that started another: a task's step daemon."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def process_with(words: list[str]) -> int:
    """The process with this command line."""
    wanted = "\0".join(words).encode() + b"\0"
    (found,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if read_quietly(path) == wanted]
    return found


def read_quietly(path: Path) -> bytes:
    """A file of a process that may have gone meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def node_state(node: str, environ: Mapping[str, str]) -> str:
    """Slurm's word for a node's state."""
    return slurm.run(["sinfo", "-h", "-n", node, "-o", "%T"], environ).upper()


def node_of(pid: int) -> str:
    """Slurm's name of the node that a task runs on."""
    match = re.search(rb"\0SLURMD_NODENAME=(\w+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    assert match
    return match[1].decode()
