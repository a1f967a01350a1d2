"""Launch plan: what Slurm is asked for, and what is kept of it."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from cluster.early_signals import BLOCKING_ENV, STOP_SIGNAL
from cluster.plan import LaunchPlan, make_plan, python_at, read_plan, write_plan
from cluster.runs import RunError, RunFolder
from cluster.setup import preamble
from cluster.signals import STOP_SIGNALS
from cluster.spec import JobSpec, load_spec
from tests.specs import load

REPOSITORY = Path(__file__).parents[1]
RUN = RunFolder(Path("/shared/runs/demo/20260102-030405-0a1b"))
PYTHON = "/opt/python"

# Every key that Slurm hears of, but for the two other ways to ask for memory.
EVERY_KEY = """\
name: demo
nodes: 2
gpus_per_node: a100:8
tasks_per_node: 4
cpus_per_task: 6
memory_per_node: 64G
partition: gpu
account: '0042'
qos: low
constraint: a100|h100
nodelist: n[1-2]
exclude: n[3,5]
reservation: maintenance
exclusive: true
time_limit: 1-12
signal_lead_s: 60
comment: for the paper
mail_user: me@example.org
mail_type: END,FAIL
setup: [module load cuda]
env: {NCCL_DEBUG: INFO, TEXT: it's}
sbatch: {licenses: 'fluent:1', nice: 100, hold: true}
train: {threads_per_rank: 3}
"""


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return load(tmp_path, EVERY_KEY)


def test_every_key_of_a_spec_becomes_its_flag(spec: JobSpec) -> None:
    assert make_plan(spec, RUN, python=PYTHON).sbatch == {
        "job-name": "demo",
        "nodes": 2,
        "ntasks-per-node": 4,
        "cpus-per-task": 6,
        "gpus-per-node": "a100:8",
        "mem": "65536M",
        "partition": "gpu",
        "account": "0042",
        "qos": "low",
        "constraint": "a100|h100",
        "nodelist": "n[1-2]",
        "exclude": "n[3,5]",
        "reservation": "maintenance",
        "exclusive": True,
        "time": "1-12:00:00",
        "comment": "for the paper",
        "mail-user": "me@example.org",
        "mail-type": "END,FAIL",
        "requeue": True,
        "open-mode": "append",
        "signal": "USR2@60",
        "output": "/shared/runs/demo/20260102-030405-0a1b/logs/batch_%j.log",
        "licenses": "fluent:1",
        "nice": 100,
        "hold": True,
    }


def test_run_that_takes_what_is_free_leaves_the_tasks_to_srun(spec: JobSpec) -> None:
    """With --ntasks-per-node Slurm gives the fewest nodes; so the job asks for the CPUs of all of a node's ranks."""
    train = spec.train.model_copy(update={"batch_size_per_rank": None, "global_batch_size": 512})
    plan = make_plan(spec.model_copy(update={"nodes": "2-4", "train": train}), RUN, python=PYTHON)
    flags = {name: plan.sbatch.get(name) for name in ("nodes", "ntasks-per-node", "cpus-per-task")}
    assert flags == {"nodes": "2-4", "ntasks-per-node": None, "cpus-per-task": 24}
    assert (plan.num_nodes, plan.num_tasks_per_node, plan.cpus_per_task, plan.is_elastic) == (4, 4, 6, True)


def test_rest_of_a_plan_is_what_the_supervisor_starts(spec: JobSpec) -> None:
    plan = make_plan(spec, RUN, python=PYTHON, maybe_visible_gpus="2,3")
    assert dataclasses.replace(plan, sbatch={}) == LaunchPlan(
        run_dir=str(RUN.path),
        name="demo",
        cluster="slurm",
        sbatch={},
        preamble=preamble(
            {"NCCL_DEBUG": "INFO", "TEXT": "it's"},
            ["module load cuda"],
            (PYTHON, f"{REPOSITORY}/cluster/start.py", "cluster.setup", str(RUN.path)),
        ),
        supervisor=(PYTHON, f"{REPOSITORY}/cluster/start.py", "cluster.supervise", str(RUN.path)),
        rank=(
            PYTHON,
            f"{REPOSITORY}/cluster/start.py",
            "jobs.train",
            f"{RUN.path}/spec.yaml",
            "--run-dir",
            str(RUN.path),
        ),
        num_nodes=2,
        num_tasks_per_node=4,
        cpus_per_task=6,
        signal_lead_s=60,
        time_limit_s=129_600,
        threads_per_rank=3,
        max_failures=0,
        policy={},
        requeue_mode="auto",
        num_successors=3,
        submit_from="job",
        maybe_visible_gpus="2,3",
    )
    assert plan.world_size == 8


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("memory_per_cpu: 4G", {"mem-per-cpu": "4096M"}),
        ("gpus_per_node: 2\nmemory_per_gpu: 1.5G", {"gpus-per-node": "2", "mem-per-gpu": "1536M"}),
        ("exclusive: false", {}),
    ],
)
def test_spec_that_leaves_keys_out_asks_for_nothing_more(tmp_path: Path, line: str, flag: dict[str, str]) -> None:
    asked = make_plan(load(tmp_path, f"name: demo\ntime_limit: 60\n{line}\n"), RUN, python=PYTHON).sbatch
    assert asked == flag | {
        "job-name": "demo",
        "nodes": 1,
        "ntasks-per-node": 2 if "gpus-per-node" in flag else 1,
        "time": "01:00:00",
        "requeue": True,
        "open-mode": "append",
        "signal": "USR2@120",
        "output": "/shared/runs/demo/20260102-030405-0a1b/logs/batch_%j.log",
    }


def test_local_plan_asks_slurm_for_nothing_and_has_no_preamble_without_need(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path, "name: demo\ncluster: local\n"), RUN, python=PYTHON)
    assert (plan.sbatch, plan.preamble, plan.time_limit_s) == ({}, (), None)


@pytest.mark.parametrize(
    ("folder", "output"),
    [
        ("/runs/100%/%j", "/runs/100%%/%%j/logs/batch_%j.log"),
        ("/runs/a_JOB.log/demo", "/runs/a_JOB.log/demo/logs/batch_%j.log"),
    ],
)
def test_only_the_job_id_is_expanded_in_the_path_of_the_log(spec: JobSpec, folder: str, output: str) -> None:
    assert make_plan(spec, RunFolder(Path(folder)), python=PYTHON).sbatch["output"] == output


def test_raw_script_asks_for_what_its_config_asks() -> None:
    lines = (REPOSITORY / "sbatch" / "ddp.sbatch").read_text().splitlines()
    flags = [shlex.split(line)[1].removeprefix("--") for line in lines if line.startswith("#SBATCH ")]
    written = {name: value if equals else True for name, equals, value in (flag.partition("=") for flag in flags)}
    spec = load_spec(Path("configs/4node.yaml"), cwd=REPOSITORY)
    planned = {
        name: True if value is True else str(value) for name, value in make_plan(spec, RUN, python="").sbatch.items()
    }
    site_free = ("output", "error", "job-name")
    assert {name: value for name, value in written.items() if name not in site_free} == {
        name: value for name, value in planned.items() if name not in site_free
    }


def test_plan_read_back_is_the_plan_that_was_written(spec: JobSpec, tmp_path: Path) -> None:
    plan = make_plan(spec, RUN, python=PYTHON)
    run = RunFolder(tmp_path)
    write_plan(plan, run)
    assert read_plan(run) == plan


def test_folder_without_a_plan_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        read_plan(RunFolder(tmp_path))
    assert str(caught.value) == f"{tmp_path} is no run folder: it holds no plan.json"


def test_damaged_plan_is_an_error_that_says_how(spec: JobSpec, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_plan(make_plan(spec, RUN, python=PYTHON), run)
    whole = json.loads(run.plan.read_text())
    damages = {
        json.dumps({**whole, "format_version": "1"}): "is damaged: format_version '1'",
        json.dumps({**whole, "colour": "red"}): "is damaged: missing or unknown keys: colour",
        json.dumps({key: value for key, value in whole.items() if key != "rank"}): (
            "is damaged: missing or unknown keys: rank"
        ),
        "{": "is damaged: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "17": "is damaged: 'int' object is not iterable",
    }
    for text, said in damages.items():
        run.plan.write_text(text)
        with pytest.raises(RunError) as caught:
            read_plan(run)
        assert str(caught.value) == f"{run.plan} {said}"


def test_signal_that_slurm_is_asked_for_is_one_that_ranks_handle_and_hold_back_until_they_do() -> None:
    handled = {number.name.removeprefix("SIG") for number in STOP_SIGNALS}
    assert {STOP_SIGNAL, "TERM"} < handled
    assert BLOCKING_ENV.split() == ["env", f"--block-signal={STOP_SIGNAL}", "--block-signal=TERM"]


def test_interpreter_is_made_absolute_without_following_its_link(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to("/usr/bin/env")
    assert python_at(str(link)) == str(link)
    assert python_at("python") == str(Path.cwd() / "python")
