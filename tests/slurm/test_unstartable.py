"""Starts that fail on a real Slurm: a node that can't start ranks or lacks something, a step that is never made.

Kinds and their sisters.  Slurm can't start ranks: a dead slurmd here; an expired credential, a failed prolog, a refused
step, from srun's own words: tests/test_verdict.py.  A node lacks what others have: a line of setup on the job's first
node here; its interpreter: tests/test_node_check.py; a rank's data, GPUs or interpreter: tests/test_verdict.py; a name
that does not resolve yet: tests/test_address.py.  Nobody watches: a step that waits for CPUs here; ranks that hang
before their first line: tests/test_start_watch.py; a supervisor inside a step here.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.runs import RunFolder
from cluster.sandbox import Sandbox
from tests import training
from tests.executables import put_executable
from tests.slurm.test_comeback import (
    FAULT_STEP,
    check_equal,
    environ,
    process_with,
    start_run,
    undisturbed,
    wait_until_finished,
    where,
)
from tests.slurm.test_jobs import has_rank, job_field, wait_until_gone
from tests.slurm.test_views import asked
from tests.training import events_of, submit, summary_of, write_spec

__all__ = ["environ", "undisturbed"]  # fixtures

TWO_NODES = where(more="tasks_per_node: 2\n").replace("nodes: 4", "nodes: 2")


def verdict_of(run: RunFolder, attempt: int) -> dict[str, Any]:
    return dict(json.loads(run.verdict(attempt).read_text()))


@pytest.fixture
def without_slurmd(sandbox: Sandbox, environ: dict[str, str]) -> Iterator[str]:
    """A node whose slurmd is killed by the test, and comes back at its end."""
    node = "n2"
    slurmd = [sandbox.programs["slurmd"], "-N", node, "-f", str(sandbox.layout.slurm_conf)]
    yield node
    subprocess.run(slurmd, env=environ, check=True)
    training.wait_for(
        "the node to come back",
        lambda: (
            subprocess.run(
                ["sinfo", "-h", "-n", node, "-p", "low", "-o", "%t"], env=environ, capture_output=True, text=True
            ).stdout.strip()
            == "idle"
        ),
    )


@pytest.mark.long
def test_node_that_cannot_start_ranks_is_left_out_at_once_and_the_run_goes_on_elsewhere(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    sandbox: Sandbox,
    without_slurmd: str,
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, TWO_NODES)
    assert events_of(run, "attempt_started")[0]["nodes"] == ["n1", "n2"]
    os.kill(
        process_with([sandbox.programs["slurmd"], "-N", "n2", "-f", str(sandbox.layout.slurm_conf)]), signal.SIGKILL
    )
    (rank,) = [pid for pid in training.processes_of(run) if has_rank(pid, 3)]
    os.kill(rank, signal.SIGKILL)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["killed", "launch"])
    verdict = verdict_of(run, 2)
    assert (verdict["node"], verdict["nodes"], verdict["action"]) == ("n2", ["n2"], "requeue")
    assert verdict["reason"] == "Slurm could not start the ranks on n2: Communication connection failure"
    assert [event["node"] for event in events_of(run, "node_excluded")] == ["n2"]
    assert "n2" not in events_of(run, "attempt_started")[2]["nodes"]


def test_first_node_that_lacks_something_on_coming_back_is_left_out_and_the_run_goes_on_elsewhere(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    line = f'test "$SLURMD_NODENAME" != n1 || test ! -e {tmp_path}/gone'
    text = TWO_NODES + f"setup:\n- {json.dumps(line)}\n"
    run, job_id = start_run(tmp_path, staged_data, environ, text)
    (tmp_path / "gone").touch()
    subprocess.run(["scontrol", "requeue", job_id], env=environ, check=True)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["requeued"])
    (event,) = events_of(run, "node_unfit")
    assert (event["node"], event["job_id"]) == ("n1", job_id)
    assert event["reason"].startswith("setup: line 1 of 1 (")
    assert "n1" not in events_of(run, "attempt_started")[1]["nodes"]
    assert job_field(job_id, "ExcNodeList", environ) == "n1"


def test_setup_that_takes_slurms_commands_away_is_told_as_wrong_and_not_as_lost(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    put_executable(tmp_path / "bin", "env", 'exec /usr/bin/env "$@"')  # a module purge leaves the system's own
    spec = write_spec(tmp_path, staged_data, f"nodes: 1\ntime_limit: 5\nsetup: ['export PATH={tmp_path}/bin']")
    job_id = json.loads(submit(spec, "--json", environ=environ).stdout)["job_id"]
    wait_until_gone(job_id, environ)
    why, code = asked("why", job_id, environ=environ)
    assert (why["state"], why["class"], code) == ("failed", "usage", 1)
    assert why["cause"] == (
        f"srun, squeue, scontrol: not on PATH after setup ({tmp_path}/bin); load your site's module of Slurm there, or "
        "leave PATH as it was"
    )


@pytest.mark.long
def test_srun_that_starts_no_rank_since_another_step_has_the_cpus_is_ended_and_the_job_requeued(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    holder = "srun --nodes=2 --ntasks=2 --output=/dev/null sleep 600 &"
    lines = json.dumps([f'if [ -z "$SLURM_RESTART_COUNT" ]; then {holder} sleep 2; fi'])
    spec = write_spec(tmp_path, staged_data, f"nodes: 2\ntime_limit: 5\nsetup: {lines}")
    job_id = json.loads(submit(spec, "train.start_timeout_s=20", "--json", environ=environ).stdout)["job_id"]
    run = training.newest_run(tmp_path)
    training.wait_for("the run to finish", run.summary.exists, patience_s=240)
    verdict = verdict_of(run, 1)
    assert (verdict["cause"], verdict["action"], summary_of(run)["attempts"]) == ("launch", "requeue", 2)
    begin, _, steps = verdict["reason"].partition("; steps of this job: ")
    assert begin.startswith("no rank has begun within 40 s (see train.start_timeout_s)")
    assert steps == f"{job_id}.0 (sleep) (srun --overlap leaves the ranks their CPUs)"


@pytest.mark.long
def test_supervisor_in_a_shell_that_is_a_step_shares_its_cpus(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 1\ntime_limit: 5")
    inside = ["srun", "-n1", "-mblock", *training.command("cluster.supervise", spec)]
    done = subprocess.run(
        ["salloc", "-N1", "-n1", "-t5", *inside],
        env=environ,
        cwd=training.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert summary_of(training.newest_run(tmp_path))["world_size"] == 1


@pytest.mark.long
def test_killed_srun_is_a_cause_of_its_own_and_the_ranks_start_again(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], undisturbed: RunFolder
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, where())
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in training.processes_of(run)}
    for pid in [pid for pid, line in lines.items() if line.startswith(b"srun\0")]:  # srun and its helper
        os.kill(pid, signal.SIGKILL)
    wait_until_finished(run, job_id, environ)
    check_equal(run, undisturbed, ["srun killed"])
    assert verdict_of(run, 1)["reason"] == "srun was ended by SIGKILL, and with it all ranks"
    assert training.last_step(run) >= FAULT_STEP
