"""Submissions whose answer is lost: a controller that hangs, a client that is killed.  There is never a second job."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import orders, slurm
from cluster.identity import RunJob, maybe_shown
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox
from tests.executables import put_executable
from tests.slurm.test_jobs import wait_until_gone
from tests.training import command, environment, events_of, newest_run, submit, summary_of, wait_for, write_spec

HELD = "nodes: 2\ntime_limit: 5\npartition: low\nsbatch: {hold: true}"


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """With a client that waits 3 s for the controller, in place of 10."""
    conf = Path(slurm_environ["SLURM_CONF"])
    (tmp_path / "slurm.conf").write_text(f"{conf.read_text()}\nMessageTimeout=3\n")
    kept = {name: value for name, value in environment(tmp_path).items() if name not in slurm_environ}
    return {**slurm_environ, **kept, "SLURM_CONF": str(tmp_path / "slurm.conf"), "XDG_STATE_HOME": str(tmp_path)}


@pytest.fixture
def controller(sandbox: Sandbox) -> Iterator[int]:
    """The process of slurmctld; it goes on at the end."""
    pid = int((sandbox.directory / "run" / "slurmctld.pid").read_text())
    yield pid
    os.kill(pid, signal.SIGCONT)


def jobs_of(run: RunFolder, environ: dict[str, str]) -> dict[str, str]:
    return slurm.jobs_of(run.path, environ)


def shell(command: str, environ: dict[str, str]) -> str:
    return subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=True).stdout


def test_job_that_slurm_took_without_an_answer_is_found_is_not_submitted_again_and_runs_by_itself(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], controller: int
) -> None:
    os.kill(controller, signal.SIGSTOP)
    done = submit(write_spec(tmp_path, staged_data, HELD), environ=environ)
    os.kill(controller, signal.SIGCONT)
    assert done.returncode == 4
    assert "Socket timed out on send/recv operation" in done.stderr
    run = newest_run(tmp_path)
    wait_for("Slurm to take the job", lambda: jobs_of(run, environ))
    (job_id,) = jobs_of(run, environ)
    to_find, to_resume = re.findall(r"(?m)^(?:Slurm may .* find out|To go on, .* one): (.*)$", done.stderr)
    assert shell(to_find, environ).split()[:2] == [job_id, "PENDING"]
    for asked in (run.path, "tiny"):
        seen = shell(f"{shlex.join(command('cluster.status', asked, '--json'))}", environ)
        assert (json.loads(seen)["state"], json.loads(seen)["job_id"]) == ("pending", job_id)

    words = to_resume.split()
    assert words[:4] == ["python", "-m", "cluster.submit", "--resume"]
    resumed = submit(*words[3:], environ=environ)
    assert (resumed.returncode, list(jobs_of(run, environ))) == (2, [job_id])
    assert resumed.stderr == f"job {job_id} of this run is PENDING: it goes on by itself; to end it: scancel {job_id}\n"

    slurm.run(["scontrol", "release", job_id], environ)
    wait_until_gone(job_id, environ)
    assert summary_of(run)["attempts"] == 1
    (submitted,) = events_of(run, "submitted")
    assert (submitted["job_id"], submitted["noted_by"]) == (job_id, "job")


@pytest.mark.parametrize("name", ["plain", "100%j of [it] \u00e4'\"|x"])
def test_lost_answer_of_a_controller_that_answers_again_is_looked_up(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    real = shell("command -v sbatch", environ).strip()
    lost = f'{real} "$@" >&2; echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'
    put_executable(tmp_path / "bin", "sbatch", lost)
    environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
    spec = write_spec(tmp_path, staged_data, HELD)
    done = submit(spec, f"run_root={json.dumps(str(folder / 'runs'), ensure_ascii=False)}", environ=environ)
    run = newest_run(folder)
    (job_id,) = jobs_of(run, environ)
    assert maybe_shown(job_id, environ) is not None
    orders.cancel([RunJob(job_id, run.path)], environ)
    assert slurm.has_ended(slurm.maybe_job_state(job_id, environ))
    assert (done.returncode, done.stdout) == (0, f"submitted to job {job_id}; run folder: {run.path}\n")
    assert [event["job_id"] for event in events_of(run, "submitted")] == [job_id]
    assert (run.submitit / f"{job_id}_submitted.pkl").exists()


@pytest.mark.long
def test_job_whose_submitting_process_was_killed_runs_by_itself(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    real = shell("command -v sbatch", environ).strip()
    put_executable(tmp_path / "bin", "sbatch", f'{real} "$@" > /dev/null; kill -KILL $PPID')
    killing = {**environ, "PATH": f"{tmp_path / 'bin'}:{environ['PATH']}"}
    where = "nodes: 2\ntime_limit: 5\npartition: low"
    assert submit(write_spec(tmp_path, staged_data, where), environ=killing).returncode == -signal.SIGKILL
    run = newest_run(tmp_path)
    (job_id,) = jobs_of(run, environ)
    wait_until_gone(job_id, environ)
    assert (summary_of(run)["attempts"], events_of(run, "submitted")[0]["noted_by"]) == (1, "job")


@pytest.mark.parametrize(("overrides", "exit_code"), [(["nodes=2"], 0), (["nodes=9", "--force"], 3)])
def test_dry_run_tells_what_slurm_says(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], overrides: list[str], exit_code: int
) -> None:
    done = submit(write_spec(tmp_path, staged_data, HELD), "--dry-run", *overrides, environ=environ)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == exit_code
    expected = (
        r"Slurm       would start it at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d on \S+, as things are now"
        if exit_code == 0
        else "Slurm       would refuse it: allocation failure: Requested node configuration is not available"
    )
    assert re.fullmatch(expected, said), said
    assert not (tmp_path / "runs").exists()
