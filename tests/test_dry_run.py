"""What a dry run tells: every line of the script with who asked for it, the ranks, the sizes, Slurm's words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.dry_run import dry_run, report
from cluster.plan import make_plan
from cluster.runs import RunFolder
from cluster.slurm import Forecast
from cluster.spec import SpecError, read_spec
from cluster.submit import script_text
from tests.executables import put_answer

REPOSITORY = Path(__file__).parents[1]
SPEC = """\
name: demo
nodes: 2
gpus_per_node: 2
cpus_per_task: 4
time_limit: 30
sbatch: {hold: true}
train: {global_batch_size: 100}
"""
LINES = """\
#SBATCH --cpus-per-task=4    # cpus_per_task, spec.yaml:4
#SBATCH --gpus-per-node=2    # gpus_per_node, spec.yaml:3
#SBATCH --hold               # sbatch.hold, spec.yaml:6
#SBATCH --job-name=demo      # name, spec.yaml:1
#SBATCH --nodes=3            # nodes, command line
#SBATCH --ntasks-per-node=2  # tasks_per_node, default
#SBATCH --open-mode=append   # always
#SBATCH --output=/somewhere/on/shared/storage/logs/batch_%j.log  # run_root, default
#SBATCH --partition=gpu      # partition, command line
#SBATCH --requeue            # requeue.mode, default
#SBATCH --signal=USR2@120    # signal_lead_s, default
#SBATCH --time=00:30:00      # time_limit, spec.yaml:5
ranks       6 on 3 nodes
            node 0: ranks 0-1, 2 GPUs, 8 CPUs
            node 1: ranks 2-3, 2 GPUs, 8 CPUs
            node 2: ranks 4-5, 2 GPUs, 8 CPUs
batch       100 images a step over all ranks  # train.global_batch_size, spec.yaml:7
length      500 steps an epoch, 15000 steps in all
checkpoint  89.4 MB each; the newest 2 and the best are kept
"""
# Standard error of sbatch --test-only, 22.05.8 and 24.11.5, and 26.05.5.
WOULD_START = "sbatch: Job 1 to start at 2026-11-30T09:48:11 using 2 processors on nodes n[1-2] in partition low\n"
WOULD_START_26 = "sbatch: Job 1 to start at 2026-11-30T09:48:11 a using 2 processors on nodes n[1-2] in partition low\n"
WOULD_NOT = "allocation failure: Requested node configuration is not available\n"


def told(folder: Path, *overrides: str, path: str = "/nowhere") -> tuple[list[str], bool]:
    """The report on SPEC, and whether Slurm refuses."""
    (folder / "spec.yaml").write_text(SPEC)
    sourced = read_spec(Path("spec.yaml"), overrides, cwd=folder)
    run = RunFolder(Path("/somewhere/on/shared/storage"))
    plan = make_plan(sourced.spec, run, python=sys.executable)
    found = dry_run(sourced, plan, script_text(plan, run), {"PATH": path})
    return list(report(found, sourced)), found.is_refused


def test_each_line_names_its_key_and_where_it_stands(tmp_path: Path) -> None:
    lines, is_refused = told(tmp_path, "nodes=3", "partition=gpu")
    missing = "Slurm       not asked: sbatch is not on PATH: is this a machine of the cluster?"
    assert ("\n".join(lines), is_refused) == (f"{LINES}{missing}", False)


def test_long_table_of_ranks_has_its_ends(tmp_path: Path) -> None:
    lines, _ = told(tmp_path, "nodes=64", "tasks_per_node=1")
    table = lines[lines.index("ranks       64 on 64 nodes") + 1 :][:8]
    assert [line.strip().partition(",")[0] for line in table] == [
        *(f"node {node}: rank {node}" for node in range(6)),
        "...",
        "node 63: rank 63",
    ]


def test_range_of_nodes_says_with_how_few_it_goes_on(tmp_path: Path) -> None:
    lines, _ = told(tmp_path, "nodes=2-4")
    assert "ranks       8 on 4 nodes (or fewer: it goes on with 2)" in lines
    assert "#SBATCH --nodes=2-4" in [line.partition("  ")[0] for line in lines]


@pytest.mark.parametrize(
    ("words", "exit_code", "line", "is_refused"),
    [
        (WOULD_START, 0, "would start it at 2026-11-30T09:48:11 on n[1-2], as things are now", False),
        (WOULD_START_26, 0, "would start it at 2026-11-30T09:48:11 on n[1-2], as things are now", False),
        (WOULD_NOT, 1, "would refuse it: allocation failure: Requested node configuration is not available", True),
        ("sbatch: error: Unable to contact slurm controller (connect failure)\n", 1, None, False),
    ],
)
def test_slurm_is_asked_and_quoted(
    tmp_path: Path, words: str, exit_code: int, line: str | None, is_refused: bool
) -> None:
    put_answer(tmp_path / "bin", "sbatch", errors=words, exit_code=exit_code)
    lines, refused = told(tmp_path, path=str(tmp_path / "bin"))
    silence = f"not asked: sbatch --test-only: exit code 1: {words.strip()}"
    assert (lines[-1], refused) == (f"Slurm       {line or silence}", is_refused)


def test_json_holds_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    put_answer(tmp_path / "bin", "sbatch", errors=WOULD_START)
    done = subprocess.run(
        [sys.executable, "-m", "cluster.submit", "spec.yaml", "nodes=3", "--dry-run", "--json"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.startswith("warning: not checked against the cluster: ")) == (0, True)
    said = json.loads(done.stdout)
    assert said["directives"][4] == {"option": "--nodes=3", "key": "nodes", "origin": "command line"}
    assert said["ranks"][2] == {"node": 2, "first_rank": 4, "last_rank": 5, "gpus": 2, "cpus": 8}
    assert said["sizes"]["steps_per_epoch"] == 500
    answer = Forecast("2026-11-30T09:48:11", "n[1-2]", WOULD_START.removeprefix("sbatch: ").strip())
    assert said["slurm"] == {"start": answer.start, "nodes": answer.nodes, "words": answer.words}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nodes=two", "command line: nodes: 'two' is no whole number"),
        ("train.lr=fast", "command line: train.lr: 'fast' is no number"),
        ("time_limit='10:00:'", "command line: time_limit: '10:00:' is no Slurm time; use minutes, M:S, H:M:S, D-H, "
         "D-H:M or D-H:M:S"),
    ],
)  # fmt: skip
def test_override_is_typed_like_the_file_and_named_as_the_source_of_its_error(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        told(tmp_path, override)
    assert str(caught.value) == message
