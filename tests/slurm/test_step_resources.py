"""What the ranks' step gets of its job: all of the memory, and each rank its CPUs, whatever sbatch left behind.

Sisters of the step that got less than its job, looked for among the variables that srun reads as options:
SLURM_CPUS_PER_TASK, SRUN_CPUS_PER_TASK and SLURM_TRES_PER_TASK (taken out, -c is always given), SLURM_MEM_PER_CPU,
_GPU and _NODE (taken out, --mem=0 is always given), SLURM_CPU_BIND and SLURM_MEM_BIND of a shell that is itself a step
(taken out there alone).  Left in: SLURM_HINT and SLURM_THREADS_PER_CORE (the CPUs of a job are counted by them),
SLURM_NTASKS_PER_NODE (given where it is even; srun takes it for the most there may be), SLURM_DISTRIBUTION (refused
before), SLURM_EXACT and SLURM_OVERLAP (no sbatch sets them; -c implies the first).
"""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.sandbox import Sandbox, down, up, without_slurm
from tests import training
from tests.slurm.test_jobs import sbatch
from tests.training import REPOSITORY, environment, submit, summary_of, write_spec


@pytest.fixture
def sparing(short_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of one node with 8 CPUs of 150 MiB each, which ends what uses more memory than it has."""
    gather = ("Type=jobacct_gather/linux", "Frequency=task=1", "Params=OverMemoryKill")
    limits = ["SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=150", *(f"JobAcctGather{line}" for line in gather)]
    sandbox: Sandbox = up(short_path / "s", num_nodes=1, gpus_per_node=0, settings=limits, environ=os.environ)
    yield {**without_slurm(os.environ), **sandbox.variables(), "OMP_NUM_THREADS": "1"}
    down(sandbox.directory)


def test_ranks_of_an_exclusive_job_may_use_all_of_its_memory_though_it_is_given_by_cpu(
    sparing: dict[str, str], tmp_path: Path, staged_data: Path
) -> None:
    environ = {**environment(tmp_path), **sparing, "XDG_STATE_HOME": str(tmp_path)}
    text = "nodes: 1\ntime_limit: 5\ncpus_per_task: 1\nexclusive: true"
    done = submit(write_spec(tmp_path, staged_data, text), "train.max_steps=5", "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    assert summary_of(training.newest_run(tmp_path))["attempts"] == 1


CASES = {
    "exclusive": (["-N2", "--ntasks-per-node=2", "--exclusive"], ["2", "none", "fixed"], {}, 4, 8),
    "uneven": (["-N2", "-n3", "--exclusive"], ["2", "none", "fixed"], {}, 3, 8),
    "elastic": (["-N1-2", "-c2", "--exclusive"], ["2", "none", "elastic"], {}, 4, 8),
    "elastic, given": (["-N2", "-c6"], ["2", "3", "elastic"], {}, 4, 3),
    "raised": (["-N1", "--ntasks-per-node=2", "-c4"], ["2", "3", "fixed"], {}, 2, 4),
    "left behind": (
        ["-N1", "--ntasks-per-node=2", "-c2", "--mem-per-cpu=100"],
        ["2", "2", "fixed"],
        {"SRUN_CPUS_PER_TASK": "9", "SLURM_TRES_PER_TASK": "cpu:9", "SLURM_MEM_PER_GPU": "7"},
        2,
        2,
    ),
}


@pytest.mark.parametrize("case", ["elastic", *(pytest.param(name, marks=pytest.mark.long) for name in CASES)])
def test_each_rank_gets_the_cpus_that_its_job_has_for_it(
    case: str, slurm_environ: dict[str, str], tmp_path: Path
) -> None:
    flags, words, left, num_ranks, num_cpus = CASES[case]
    # What srun of this release takes for the job's, where that of later ones takes SLURM_CPUS_PER_TASK itself.
    exported = ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *(f"export {name}={left[name]}" for name in left)]
    program = shlex.join([sys.executable, "-m", "tests.step_program", str(tmp_path / "ranks"), *words])
    script = "; ".join([*exported, f"cd {REPOSITORY}", program])
    sbatch("--wait", "-t1", *flags, f"--output={tmp_path}/log", f"--wrap={script}", environ=slurm_environ)
    assert (tmp_path / "log").read_text() == ""
    expected = [f"{rank} of {num_ranks}: {num_cpus} CPUs" for rank in range(num_ranks)]
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == expected


@pytest.mark.long
def test_elastic_run_with_several_ranks_on_a_node_and_no_cpus_finishes(
    tmp_path: Path, staged_data: Path, slurm_environ: dict[str, str]
) -> None:
    environ = {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path)}
    inherits = "setup: ['export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK']"  # as srun does by itself, since 23.11
    text = f"nodes: 1-2\ntasks_per_node: 2\ntime_limit: 5\n{inherits}"
    done = submit(write_spec(tmp_path, staged_data, text), "train.max_steps=3", "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    assert summary_of(training.newest_run(tmp_path))["world_size"] == 4
