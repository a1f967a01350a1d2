"""How ranks get into an image: whole command lines, since neither pyxis nor apptainer is installed here."""

from pathlib import Path

import pytest

from cluster.container import Entrance, all_mounts, variables_inside
from cluster.launch import Shape, srun_command
from cluster.plan import LaunchPlan, make_plan
from cluster.runs import RunFolder
from cluster.spec import dump_spec, load_spec
from tests.specs import load, problems

RUN = RunFolder(Path("/shared/runs/demo/1"))
SPEC = """\
name: demo
nodes: 2
gpus_per_node: 2
time_limit: 60
env: {NCCL_DEBUG: INFO, WORD: 'a, b'}
run_root: /shared/runs
dataset: {root: /data}
container:
  image: IMAGE
  runtime: RUNTIME
  mounts: [/scratch, '/licences:/opt/licences:ro']
"""
NAMES = (
    "CLUSTER_MASTER_ADDR,CLUSTER_MASTER_PORTS,CLUSTER_TOKEN,CLUSTER_ATTEMPT,CLUSTER_SPEC,CLUSTER_KILL_WAIT_S,"
    "OMP_NUM_THREADS,PYTHONDONTWRITEBYTECODE,NCCL_DEBUG,WORD"
)
MOUNTS = "/shared/runs/demo/1:/shared/runs/demo/1,/data:/data,/scratch:/scratch,/licences:/opt/licences:ro"
TRAIN = ["/shared/runs/demo/1/code/cluster/start.py", "jobs.train", "/shared/runs/demo/1/spec.yaml", "--run-dir"]


def plan_of(folder: Path, image: str, runtime: str, *overrides: str) -> LaunchPlan:
    spec = load(folder, SPEC.replace("IMAGE", image).replace("RUNTIME", runtime), *overrides)
    return make_plan(spec, RUN, python="/opt/python", maybe_code_root=RUN.code)


def test_pyxis_gets_its_options_from_srun_and_the_supervisor_stays_outside(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "nvcr.io#nvidia/pytorch:25.09-py3", "pyxis")
    assert srun_command(plan, Shape(2, 4, 2), Path("/a.log"), {}) == [
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--mem=0",
        "--kill-on-bad-exit=1",
        "--wait=30",
        "--mpi=none",
        "--export=ALL",
        "--output=/a.log",
        "--error=/a.log",
        "--open-mode=append",
        "--container-image=nvcr.io#nvidia/pytorch:25.09-py3",
        f"--container-mounts={MOUNTS}",
        "--container-workdir=/shared/runs/demo/1",
        f"--container-env={NAMES}",
        "python3",
        *TRAIN,
        "/shared/runs/demo/1",
    ]
    starter = "/shared/runs/demo/1/code/cluster/start.py"
    assert plan.supervisor == ("/opt/python", starter, "cluster.supervise", "/shared/runs/demo/1")
    assert (plan.image_variables, plan.image_prefix) == (tuple(NAMES.split(",")), "")
    assert "--check /shared/runs/demo/1 submitit pydantic yaml 2>&1)" in plan.shell_lines[-1]


@pytest.mark.parametrize(
    ("runtime", "override", "gpus"),
    [("apptainer", "name=demo", ["--nv"]), ("singularity", "train.device=cpu", [])],
)
def test_apptainer_is_part_of_each_ranks_command(tmp_path: Path, runtime: str, override: str, gpus: list[str]) -> None:
    plan = plan_of(tmp_path, "/images/torch.sif", runtime, "container.python=/opt/conda/bin/python", override)
    assert list(plan.rank) == [
        runtime,
        "exec",
        *gpus,
        f"--bind={MOUNTS}",
        "--pwd=/shared/runs/demo/1",
        "/images/torch.sif",
        "/opt/conda/bin/python",
        *TRAIN,
        "/shared/runs/demo/1",
    ]
    assert (plan.srun, plan.image_variables, plan.image_prefix) == (
        (),
        tuple(NAMES.split(",")),
        f"{runtime.upper()}ENV_",
    )


def test_live_code_is_mounted_where_it_lies(tmp_path: Path) -> None:
    spec = load(tmp_path, SPEC.replace("IMAGE", "/x.sif").replace("RUNTIME", "apptainer"), "container.mounts=[]")
    plan = make_plan(spec, RUN, python="/opt/python", maybe_code_root=Path("/home/me/project"))
    assert "--bind=/shared/runs/demo/1:/shared/runs/demo/1,/data:/data,/home/me/project:/home/me/project" in plan.rank


def test_folder_inside_another_is_mounted_once() -> None:
    own = [Path("/shared/runs/1"), Path("/shared"), Path("/shared/runs/1/code"), Path("/shared")]
    assert all_mounts(own, ["/a:/b"]) == ["/shared:/shared", "/a:/b"]


def test_variables_of_the_spec_win_over_the_images_and_the_hosts_python_stays_outside() -> None:
    environ = {"PYTHONPATH": "/host", "PYTHONHOME": "/host", "HOME": "/home/me", "WORD": "a, b", "CLUSTER_TOKEN": "t"}
    names = ("CLUSTER_TOKEN", "WORD", "NOSUCH", "PYTHONDONTWRITEBYTECODE")
    kept = {"HOME": "/home/me", "WORD": "a, b", "CLUSTER_TOKEN": "t", "PYTHONDONTWRITEBYTECODE": "1"}
    assert variables_inside(environ, names, "") == kept
    assert variables_inside(environ, names, "APPTAINERENV_") == kept | {
        "APPTAINERENV_WORD": "a, b",
        "APPTAINERENV_CLUSTER_TOKEN": "t",
        "APPTAINERENV_PYTHONDONTWRITEBYTECODE": "1",
    }
    assert variables_inside(environ, ("PYTHONPATH",), "")["PYTHONPATH"] == "/host"  # the spec's own


def test_spec_without_an_image_has_no_entrance(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: demo\ntime_limit: 60\n")
    plan = make_plan(spec, RUN, python="/opt/python")
    assert (plan.srun, plan.image_variables, plan.image_prefix) == ((), (), "")
    assert Entrance() == Entrance((), (), (), "")
    assert load(tmp_path, dump_spec(spec)) == spec


def test_container_survives_a_dump(tmp_path: Path) -> None:
    spec = load(tmp_path, SPEC.replace("IMAGE", "'a b.sif'").replace("RUNTIME", "apptainer"))
    (tmp_path / "dumped.yaml").write_text(dump_spec(spec))
    assert load_spec(Path("dumped.yaml"), cwd=tmp_path) == spec


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "cluster: local\ncontainer: {image: x.sqsh, runtime: pyxis}",
            "3: container.runtime: pyxis is a plugin of Slurm, but cluster is local; use apptainer or singularity, or "
            "leave container out",
        ),
        (
            "time_limit: 60\ncontainer: {image: x.sif}",
            "3: container.runtime: is required with an image; use pyxis, apptainer or singularity, whichever your "
            "cluster has",
        ),
        (
            "time_limit: 60\ncontainer: {runtime: pyxis}",
            "3: container.runtime: runtime is for a container, but there is no container.image; give one, or leave "
            "runtime out",
        ),
        (
            "time_limit: 60\ncontainer: {image: x.sif, runtime: apptainer}\nrun_root: '/a,b'",
            "4: run_root: /a,b holds , or :, which no container can mount; use another folder",
        ),
        (
            "time_limit: 60\ncontainer: {image: x.sif, runtime: apptainer, mounts: [scratch]}",
            "3: container.mounts: 'scratch' is no mount; write absolute folders, as /scratch, /here:/there or "
            "/here:/there:ro",
        ),
        (
            "time_limit: 60\nsbatch: {container-image: x.sqsh}",
            "3: sbatch.container-image: sbatch's --container-image is written by the key container.image; use that",
        ),
    ],
)
def test_contradicting_container_is_refused_at_its_line(tmp_path: Path, lines: str, said: str) -> None:
    assert problems(tmp_path, f"name: demo\n{lines}\n") == [f"spec.yaml:{said}"]
