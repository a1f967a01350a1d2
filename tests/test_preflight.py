"""What a submission says of a spec that the cluster cannot run, and where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.executables import put_answer, put_executable
from tests.sites import put_site

REPOSITORY = Path(__file__).parents[1]

SPEC = """\
name: demo
nodes: 2
time_limit: 10:00:00
gpus_per_node: a100:8
dataset: {kind: synthetic}
sbatch:
  gres: nvme:5
"""
HINT = "the cluster can't run this job, and nothing was submitted; --force submits it all the same"
TIME = "time_limit: 10:00:00 is over the limit of partition gpu, MaxTime=02:00:00; use at most that, or partition long"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user stands: the spec, and a folder `bin` that is all of PATH, with an sbatch that notes its calls."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    put_site(tmp_path / "bin", is_calm=True)
    put_executable(tmp_path / "bin", "sbatch", 'echo called > "${0%/*}/called"; echo 17')
    return tmp_path


def submit(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": str(folder / "bin"), "PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "cluster.submit", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_every_misfit_is_told_with_its_line_or_override_and_nothing_is_submitted(folder: Path) -> None:
    done = submit(folder, "spec.yaml", "cpus_per_task=20", "partition=gpu")
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (
        2,
        "",
        [
            f"spec.yaml:3: {TIME}",
            "spec.yaml:4: gpus_per_node: each node must have 8 a100 GPUs; partition gpu has no such node; the most is "
            "4 a100 GPUs",
            "spec.yaml:7: sbatch.gres: each node must have 5 nvmes; partition gpu has no such node; the most is 2 "
            "nvmes",
            "command line: cpus_per_task: each node must have 160 CPUs (8 ranks of 20); partition gpu has no such "
            "node; the most is 16 CPUs",
            HINT,
        ],
    )
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "spec.yaml"]  # not even the data set was staged
    assert not (folder / "bin/called").exists()


def test_misfit_of_a_key_that_is_not_in_the_file_names_the_key(folder: Path) -> None:
    (folder / "spec.yaml").write_text("name: demo\ntime_limit: 60\n")
    put_site(folder / "bin", is_calm=True)
    done = submit(folder, "spec.yaml", "partition=lab", "--dry-run")
    assert (done.returncode, done.stderr.splitlines()) == (
        2, ["spec.yaml: nodes: 1 is under the limit of partition lab, MinNodes=2; use 2", HINT],
    )  # fmt: skip


def test_node_that_is_gone_is_named_with_the_key_that_left_it_out(folder: Path) -> None:
    (folder / "spec.yaml").write_text("name: demo\ntime_limit: 60\nexclude: n1,h200-dev-145-040\n")
    done = submit(folder, "spec.yaml")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["spec.yaml:3: exclude: 'h200-dev-145-040' is no node of this cluster; there are n1, n2, n3, n4", HINT],
    )


def test_dry_run_judges_as_a_submission_does(folder: Path) -> None:
    done = submit(folder, "spec.yaml", "--dry-run", "gpus_per_node=a100:4", "sbatch.gres=nvme:1", "nodes=1")
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [f"spec.yaml:3: {TIME}", HINT])


def test_force_submits_and_warns(folder: Path) -> None:
    words = ("time_limit=10:00:00", "gpus_per_node=a100:4", "sbatch.gres=nvme:1", "nodes=1")
    (folder / "data/staged").mkdir(parents=True)
    (folder / "data/staged/synthetic_2048_512.pt").touch()
    done = submit(folder, "spec.yaml", *words, "--force", "--json")
    assert (done.returncode, done.stderr) == (0, f"warning: command line: {TIME}\n")
    assert json.loads(done.stdout)["job_id"] == "17"


def test_resumed_run_is_judged_too(folder: Path) -> None:
    fits = ("time_limit=2:00:00", "gpus_per_node=a100:4", "sbatch.gres=nvme:1", "nodes=1")
    (folder / "data/staged").mkdir(parents=True)
    (folder / "data/staged/synthetic_2048_512.pt").touch()
    put_answer(folder / "bin", "squeue", errors="slurm_load_jobs error: Invalid job id specified", exit_code=1)
    first = json.loads(submit(folder, "spec.yaml", *fits, "--json").stdout)
    (folder / "bin/called").unlink()
    done = submit(folder, "--resume", first["run_dir"], "time_limit=3:00:00")
    words = TIME.replace("10:00:00", "3:00:00")
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"command line: {words}", HINT])
    assert not (folder / "bin/called").exists()


def test_cluster_that_does_not_answer_gives_one_warning_and_no_verdict(folder: Path) -> None:
    down = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    put_answer(folder / "bin", "scontrol", errors=down, exit_code=1)
    done = submit(folder, "spec.yaml", "--dry-run")
    assert (done.returncode, done.stdout.count("#SBATCH --time=10:00:00")) == (0, 1)
    assert done.stderr.partition("#SBATCH")[0] == (
        f"warning: not checked against the cluster: scontrol --all --oneliner show partition: exit code 1: {down}; "
        "no answer to scontrol show node, scontrol show reservation, scontrol show config either\n"
    )


def test_local_run_asks_no_cluster(folder: Path) -> None:
    put_executable(folder / "bin", "scontrol", 'echo asked > "${0%/*}/asked"; exit 1')
    (folder / "spec.yaml").write_text("name: demo\ncluster: local\n")
    done = submit(folder, "spec.yaml", "--dry-run")
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, "ranks       1 on 1 node")
    assert not (folder / "bin/asked").exists()


@pytest.mark.parametrize("key", ["run_root", "dataset.root"])
def test_folder_that_the_nodes_do_not_see_is_refused_unless_all_nodes_are_this_machine(folder: Path, key: str) -> None:
    (folder / "spec.yaml").write_text(SPEC.partition("sbatch:")[0].replace("a100:8", "2"))
    folders = {"run_root": "/shared", "dataset.root": "/shared", key: "/tmp/x"}
    words = ["spec.yaml", "--dry-run", "time_limit=60", *(f"{name}={path}" for name, path in folders.items())]
    assert submit(folder, *words).returncode == 0
    put_site(folder / "bin", is_calm=True, node_address="192.0.2.7")  # RFC 5737: nobody's
    done = submit(folder, *words)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            f"command line: {key}: /tmp/x is not seen by the nodes: each node has its own /tmp; use storage that all "
            "of them share",
            HINT,
        ],
    )
