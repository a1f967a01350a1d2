"""Time and limits that a job has by other people's choice: a long grace period, a login node's ulimit, a suspension.

Sisters.  Time after TERM: KillWait where no grace is told, a time limit's lead: tests/test_watchdog.py, test_grace.py.
Limits: processor time here; address space, data, file size: tests/test_limits.py; memlock and nofile stay.  Suspended:
cluster.stop here; the supervisor's question while it is: tests/test_job.py; a deadline: tests/test_hangs.py.
"""

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.plan import read_plan, write_plan
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox, down, up, without_slurm
from tests import training
from tests.slurm.test_comeback import FAULT_STEP, check_equal, environ, start_run, undisturbed, where
from tests.slurm.test_jobs import job_field, sbatch, wait_until_gone
from tests.slurm.test_verbs import verb
from tests.training import environment, events_of, submit, summary_of, write_spec

__all__ = ["environ", "undisturbed"]  # fixtures


@pytest.fixture
def patient(short_path: Path) -> Iterator[Sandbox]:
    """A Slurm with a grace period that is much longer than KillWait."""
    settings = ["KillWait=20", "PartitionName=low Default=YES GraceTime=120"]
    sandbox = up(short_path / "s", num_nodes=2, gpus_per_node=0, settings=settings, environ=os.environ)
    yield sandbox
    down(sandbox.directory)


@pytest.mark.long
def test_preempted_run_whose_step_takes_longer_than_kill_wait_saves_within_its_grace_period(
    patient: Sandbox, tmp_path: Path, staged_data: Path
) -> None:
    slurm = {**without_slurm(os.environ), **patient.variables()}
    environ = {**environment(tmp_path), **slurm, "XDG_STATE_HOME": str(tmp_path)}
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 10\nsbatch: {hold: true}")
    job_id = json.loads(submit(spec, "--json", environ=environ).stdout)["job_id"]
    run = training.newest_run(tmp_path)
    write_plan(training.with_stuck_rank(read_plan(run), "pause", 1, FAULT_STEP), run)
    subprocess.run(["scontrol", "release", job_id], env=environ, check=True)
    training.wait_for_step(tmp_path, FAULT_STEP - 2)
    high = sbatch("-phigh", "-N2", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 2", environ=environ)
    training.wait_for("the end of the grace period to be told", run.grace.exists)
    training.wait_for("the run to finish", run.summary.exists, patience_s=240)
    wait_until_gone(high, environ)
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["outcome"], verdict["cause"], summary_of(run)["lost_steps"]) == ("stopped", "preempted", 0)


def test_run_that_was_submitted_under_a_limit_of_processor_time_outlives_it(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (3, resource.RLIM_INFINITY))

    words = training.command("cluster.submit", write_spec(tmp_path, staged_data, where()), "--json")
    done = subprocess.run(words, env=environ, cwd=training.REPOSITORY, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["job_id"]
    wait_until_gone(job_id, environ)
    run = training.newest_run(tmp_path)
    check_equal(run, undisturbed, [])
    assert "ulimit -t: 3 processor seconds of a process" in run.batch_log(job_id).read_text()


def test_suspended_run_that_is_stopped_saves_and_leaves_once_it_goes_on(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    subprocess.run(["scontrol", "suspend", job_id], env=environ, check=True)
    step = training.last_step(run)
    told = verb("stop", run.path, environ=environ)
    assert (told["action"], told["exit_code"]) == ("marked", "0")
    subprocess.run(["scontrol", "resume", job_id], env=environ, check=True)
    wait_until_gone(job_id, environ)
    (stopped,) = events_of(run, "stopped")
    assert step <= stopped["step"] < training.TOTAL_STEPS
    assert (run.summary.exists(), job_field(job_id, "ExitCode", environ)) == (False, "75:0")
