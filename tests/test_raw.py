"""Raw sbatch route: the spec as the allocation has it, frozen once per job."""

import logging
import re
from datetime import datetime
from pathlib import Path

import pytest

from cluster import raw
from cluster.plan import read_plan
from cluster.runs import RELEASE, RunError, utc_text
from cluster.spec import load_spec
from tests.executables import put_answer

SPEC = "name: demo\nnodes: 4\ngpus_per_node: 2\ncpus_per_task: 4\ntime_limit: 8:00:00\npartition: gpu\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of an allocation that is just what SPEC asks for."""
    put_answer(tmp_path / "bin", "squeue", "8:00:00\n")
    show(tmp_path)
    return {
        "PATH": str(tmp_path / "bin"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "SLURM_CLUSTER_NAME": "here",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_NTASKS": "8",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "the site's default",
    }


def show(folder: Path, start: str = "2026-01-02T03:04:05", restarts: int = 0) -> None:
    """What scontrol says of job 17."""
    paths = "   Command=/home/me/ddp.sbatch spec.yaml\n   StdOut=/home/me/ddp-17.log\n"
    shown = f"JobId=17 JobName=ddp\n   Requeue=1 Restarts={restarts}\n   StartTime={start}\n{paths}\n"
    put_answer(folder / "bin", "scontrol", shown)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, also where a test before made the logger of a supervisor."""
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    return caplog


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "source.yaml"
    path.write_text(f"{SPEC}run_root: {tmp_path}/runs\n")
    return path


def test_run_folder_bears_the_job_id_and_holds_the_spec_and_its_plan(
    spec: Path, tmp_path: Path, environ: dict[str, str], log: pytest.LogCaptureFixture
) -> None:
    run = raw.make_run(spec, ["train.lr=0.5"], "17", environ)
    assert run.path == tmp_path / "runs" / "demo" / "17"
    assert load_spec(run.spec, cwd=run.path) == load_spec(spec, ["train.lr=0.5"], cwd=Path.cwd())
    assert (read_plan(run).num_nodes, read_plan(run).world_size) == (4, 8)
    events = [{**event, "time": ""} for event in run.read_events()]
    start = utc_text(datetime.fromisoformat("2026-01-02T03:04:05"))
    job = {"command": "/home/me/ddp.sbatch spec.yaml", "start": start, "restarts": 0}
    head = {"attempt": 0, "job_id": "17", "route": "sbatch", "cluster": "here", "job": job}
    told = {**head, "format_version": 1, "release": RELEASE}
    assert events == [{"time": "", "event": "submitted", **told}]
    assert log.messages == []


def test_raw_job_submits_its_successors_itself_as_nobody_has_put_them_in_beforehand(
    spec: Path, environ: dict[str, str]
) -> None:
    run = raw.make_run(spec, ["requeue.mode=successor", "requeue.submit_from=login"], "17", environ)
    plan = read_plan(run)
    assert (plan.requeue_mode, plan.submit_from, plan.sbatch["no-requeue"]) == ("successor", "job", True)


def test_allocation_wins_over_the_spec_with_one_warning(
    spec: Path, tmp_path: Path, environ: dict[str, str], log: pytest.LogCaptureFixture
) -> None:
    put_answer(tmp_path / "bin", "squeue", "1-00:00:00\n")
    tasks = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}
    run = raw.make_run(spec, [], "17", environ | tasks | {"SLURM_GPUS_ON_NODE": "1"})
    assert log.messages == [
        "the allocation wins over the spec: nodes: 4 -> 2; gpus_per_node: 2 -> 1; tasks_per_node: 2 -> 1; "
        "time_limit: 08:00:00 -> 1-00:00:00"
    ]
    overrides = ["nodes=2", "gpus_per_node=1", "tasks_per_node=1", "time_limit=1-00:00:00"]
    assert load_spec(run.spec, cwd=run.path) == load_spec(spec, overrides, cwd=Path.cwd())


def test_requeued_job_goes_on_with_its_frozen_spec_though_the_source_was_edited(
    spec: Path, environ: dict[str, str]
) -> None:
    run = raw.make_run(spec, [], "17", environ)
    frozen = run.spec.read_text()
    spec.write_text(f"{spec.read_text()}train: {{lr: 0.5}}\n")
    requeued = environ | {"SLURM_RESTART_COUNT": "1"}
    assert (raw.maybe_known_run("17", environ), raw.maybe_known_run("17", requeued)) == (None, run)
    assert raw.maybe_known_run("18", requeued | {"SLURM_JOB_ID": "18"}) is None
    assert raw.make_run(spec, [], "17", requeued) == run  # where the index is lost
    assert run.spec.read_text() == frozen


def test_second_run_in_one_allocation_needs_another_name_unless_its_spec_is_the_same(
    spec: Path, environ: dict[str, str]
) -> None:
    run = raw.make_run(spec, [], "17", environ)
    assert raw.make_run(spec, [], "17", environ) == run
    with pytest.raises(RunError) as caught:
        raw.make_run(spec, ["train.lr=0.5"], "17", environ)
    assert str(caught.value) == (
        f"{run.path} holds a run of this job with another spec (train.lr): give this one another name, "
        f"or go on with that one by python -m cluster.supervise {run.path}"
    )
    assert (
        raw.make_run(spec, ["train.lr=0.5", "name=other"], "17", environ).path == run.path.parents[1] / "other" / "17"
    )


def test_job_of_another_cluster_or_of_a_later_count_gets_a_folder_of_its_own_and_finds_it_again(
    spec: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    old = raw.make_run(spec, [], "17", environ)
    elsewhere = raw.make_run(spec, [], "17", environ | {"SLURM_CLUSTER_NAME": "there"})
    assert re.fullmatch(r"17-[0-9a-f]{4}", elsewhere.run_id)
    assert raw.make_run(spec, [], "17", environ | {"SLURM_CLUSTER_NAME": "there"}) == elsewhere

    there = environ | {"SLURM_CLUSTER_NAME": "there"}
    show(tmp_path, start="2026-01-03T03:04:05")  # slurmctld has lost its state
    later = raw.make_run(spec, [], "17", there)
    assert later.path not in (old.path, elsewhere.path)
    show(tmp_path, start="2026-01-03T04:04:05", restarts=1)
    assert raw.maybe_known_run("17", there | {"SLURM_RESTART_COUNT": "1"}) == later


@pytest.mark.parametrize("name", ["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"])
def test_missing_variable_of_an_allocation_is_named(spec: Path, environ: dict[str, str], name: str) -> None:
    del environ[name]
    with pytest.raises(RunError) as caught:
        raw.make_run(spec, [], "17", environ)
    assert str(caught.value) == f"{name} is not set: start this inside a Slurm job"


def test_wrong_spec_makes_no_run_folder(spec: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(RunError):
        raw.make_run(spec, ["nodes=many"], "17", environ)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "late"),
    [
        ("#!/bin/bash\n#SBATCH --nodes=4\n\n# why\n#SBATCH --time=60\nexec python\n", ()),
        (
            "#!/bin/bash\n#SBATCH --nodes=4\nmodule load cuda\n  #SBATCH --time=60\ntrap : USR1\n#SBATCH --mem=1G\n",
            ("#SBATCH --time=60", "#SBATCH --mem=1G"),
        ),
        ("", ()),
    ],
)
def test_directives_below_the_first_command_are_found(script: str, late: tuple[str, ...]) -> None:
    assert raw.late_directives(script) == late


def test_flags_that_sbatch_did_not_read_are_warned_of(
    spec: Path, tmp_path: Path, environ: dict[str, str], log: pytest.LogCaptureFixture
) -> None:
    put_answer(tmp_path / "bin", "scontrol", "#!/bin/bash\nmodule load cuda\n#SBATCH --time=60\n")
    raw.make_run(spec, [], "17", {**environ, "ENVIRONMENT": "BATCH"})
    assert log.messages == ["sbatch does not read what is below a script's first command; move up: #SBATCH --time=60"]
