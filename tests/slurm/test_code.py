"""Jobs on a real Slurm whose source is edited while they wait, or whose environment is not what it was."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from cluster.code import copy_project, find_project
from cluster.launch import Shape, srun_command
from cluster.runs import RunFolder
from tests import training
from tests.slurm.test_jobs import environ, job_field, sbatch, wait_until_gone
from tests.test_launch import make_plan
from tests.training import REPOSITORY, command, events_of, summary_of, write_spec

__all__ = ["environ"]
ONE_NODE = "time_limit: 5\npartition: low\nsbatch: {hold: true}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this repository's packages, to edit."""
    copy_project(find_project(REPOSITORY, {"PATH": "/nonexistent"}), tmp_path / "project")
    return tmp_path / "project"


def submit_from(project: Path, *words: object, environ: dict[str, str]) -> RunFolder:
    """`python -m cluster.submit words` with a project's code, in its folder."""
    done = subprocess.run(
        command("cluster.submit", *words, "--json"),
        cwd=project,
        env=environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RunFolder(Path(json.loads(done.stdout)["run_dir"]))


def break_code(project: Path) -> None:
    """Edit the source in place, so that whoever still uses it fails."""
    for path in ("cluster/supervise.py", "jobs/train.py", "cluster/runs.py"):
        with (project / path).open("a") as file:
            file.write("\nraise SystemExit('edited after the submission')\n")


def job_of(run: RunFolder) -> str:
    return str(events_of(run, "submitted")[-1]["job_id"])


def test_job_that_waited_while_its_source_was_edited_runs_what_was_submitted(
    tmp_path: Path, project: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, ONE_NODE)
    run = submit_from(project, spec, "train.max_steps=3", environ=environ)
    break_code(project)
    subprocess.run(["scontrol", "release", job_of(run)], env=environ, check=True)
    wait_until_gone(job_of(run), environ)
    assert (summary_of(run)["steps"], summary_of(run)["attempts"]) == (3, 1)
    assert events_of(run, "code_drift") == events_of(run, "environment_drift") == []


@pytest.mark.long
def test_requeued_and_restarted_ranks_run_what_was_submitted(
    tmp_path: Path, project: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, ONE_NODE)
    run = submit_from(project, spec, "train.epochs=60", environ=environ)
    job_id = job_of(run)
    subprocess.run(["scontrol", "release", job_id], env=environ, check=True)
    training.wait_for("step 5", lambda: training.last_step(run) >= 5)
    break_code(project)
    subprocess.run(["scancel", "--signal=KILL", f"{job_id}.0"], env=environ, check=True)
    training.wait_for("a second attempt", lambda: run.latest_attempt() == 2)
    training.wait_for("its first step", lambda: len(events_of(run, "first_step")) == 2)
    subprocess.run(["scontrol", "requeue", job_id], env=environ, check=True)
    training.wait_for("a third attempt", lambda: len(events_of(run, "first_step")) == 3)
    assert events_of(run, "code_drift") == []
    subprocess.run(["scancel", job_id], env=environ, check=True)
    wait_until_gone(job_id, environ)


@pytest.mark.long
def test_live_code_that_was_edited_while_the_job_waited_is_warned_of(
    tmp_path: Path, project: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, ONE_NODE)
    run = submit_from(project, spec, "train.max_steps=3", "code=live", environ=environ)
    with (project / "jobs" / "train.py").open("a") as file:
        file.write("\n# a word\n")
    subprocess.run(["scontrol", "release", job_of(run)], env=environ, check=True)
    wait_until_gone(job_of(run), environ)
    assert [event["files"] for event in events_of(run, "code_drift")] == [["jobs/train.py"]]
    said = f"the code in {project} differs from what was submitted: jobs/train.py"
    assert said in run.batch_log(job_of(run)).read_text()
    assert summary_of(run)["bit_exact"] is True  # nothing was trained before


@pytest.mark.long
def test_another_interpreter_on_the_node_ends_the_job_with_2_and_one_line(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, ONE_NODE)
    run = submit_from(REPOSITORY, spec, environ=environ)
    record = json.loads(run.code_record.read_text())
    run.code_record.write_text(json.dumps(record | {"python": {"version": "3.99.1"}}))
    subprocess.run(["scontrol", "release", job_of(run)], env=environ, check=True)
    wait_until_gone(job_of(run), environ)
    (line,) = run.batch_log(job_of(run)).read_text().splitlines()
    assert ("and the run was submitted with Python 3.99.1" in line, line[:8]) == (True, "python: ")
    assert (job_field(job_of(run), "ExitCode", environ), run.latest_attempt()) == ("2:0", 0)


@pytest.mark.long
def test_image_for_a_plugin_that_srun_does_not_have_ends_the_job_with_2(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    where = "time_limit: 5\ncontainer: {image: /x.sqsh, runtime: pyxis}"
    run = submit_from(REPOSITORY, write_spec(tmp_path, staged_data, where), environ=environ)
    wait_until_gone(job_of(run), environ)
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["cause"], verdict["exit_code"]) == ("usage", 2)
    assert verdict["reason"].endswith("; --container-* options need pyxis, a plugin of Slurm")
    assert job_field(job_of(run), "ExitCode", environ) == "2:0"


def test_every_rank_sees_all_gpus_that_its_job_has_on_the_node(tmp_path: Path, environ: dict[str, str]) -> None:
    """Without --gpu-bind: `none` takes CUDA_VISIBLE_DEVICES away on Slurm 22.05, and leaves it on 24.11."""
    plan = make_plan("sh", "-c", "echo $SLURM_PROCID: $CUDA_VISIBLE_DEVICES")
    srun = shlex.join(srun_command(plan, Shape(1, 2, 2), tmp_path / "ranks", {}))
    flags = ["--wait", "-N1", "--ntasks-per-node=2", "--gpus-per-node=2", "--output=/dev/null"]
    sbatch(*flags, f"--wrap={srun}", environ=environ)
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == ["0: 0,1", "1: 0,1"]


def test_ranks_of_a_spread_job_are_refused_by_their_supervisor(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 5")
    wrapped = f"exec {' '.join(command('cluster.supervise', spec))}"
    flags = ["-N2", "--ntasks-per-node=2", "--distribution=cyclic", f"--output={tmp_path}/log"]
    job_id = sbatch(*flags, f"--wrap={wrapped}", environ=environ)
    wait_until_gone(job_id, environ)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "E SLURM_DISTRIBUTION=cyclic does not fill one node after the other" in line
    assert (job_field(job_id, "ExitCode", environ), (tmp_path / "runs").exists()) == ("2:0", False)
