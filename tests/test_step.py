"""srun's share of the job: CPUs of a rank, and the variables that must not speak beside the command line."""

import dataclasses
from pathlib import Path

import pytest

from cluster.plan import LaunchPlan
from cluster.step import cpus_per_task, in_whole_cores, step_environment
from tests.executables import put_answer
from tests.test_launch import make_plan

EIGHT_CPUS = {"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_THREADS_PER_CORE": "1"}


def plan_with(cpus: int | None, *, is_elastic: bool = False) -> LaunchPlan:
    """Two ranks on a node."""
    return dataclasses.replace(make_plan("true", cpus_per_task=cpus), is_elastic=is_elastic)


@pytest.mark.parametrize(
    ("cpus", "is_elastic", "variables", "expected"),
    [
        (4, False, {"SLURM_CPUS_PER_TASK": "4"}, 4),
        (4, False, {"SLURM_CPUS_PER_TASK": "6"}, 6),
        (4, False, {}, 4),
        (None, False, {}, 4),
        (None, False, {"SLURM_CPUS_PER_TASK": "2"}, 2),
        (None, True, {"SLURM_CPUS_PER_TASK": "2"}, 4),
        (3, True, {"SLURM_CPUS_PER_TASK": "6"}, 3),
        (3, True, {"SLURM_CPUS_PER_TASK": "8"}, 4),
    ],
    ids=[
        "the spec's",
        "raised by a plugin",
        "the spec's, and no variable",
        "all that the job has, exclusively",
        "raised from nothing",
        "elastic, all that the job has",
        "elastic, the spec's",
        "elastic, raised",
    ],
)
def test_rank_gets_the_cpus_that_its_job_has_for_it(
    cpus: int | None, is_elastic: bool, variables: dict[str, str], expected: int
) -> None:
    assert cpus_per_task(plan_with(cpus, is_elastic=is_elastic), 2, EIGHT_CPUS | variables) == expected


@pytest.mark.parametrize(
    ("cpus", "tasks", "expected"),
    [("16,8(x2)", "4,2(x2)", 4), ("16(x2),6", "2(x3)", 3), ("3(x2)", "2,1", 1), ("2", "4", 1)],
)
def test_least_share_on_any_node_is_every_ranks(cpus: str, tasks: str, expected: int) -> None:
    environ = {"SLURM_JOB_CPUS_PER_NODE": cpus, "SLURM_TASKS_PER_NODE": tasks, "SLURM_THREADS_PER_CORE": "1"}
    assert cpus_per_task(plan_with(None), None, environ) == expected


def test_rank_of_an_allocation_that_does_not_say_its_cpus_is_left_to_srun() -> None:
    assert cpus_per_task(plan_with(None), 2, {}) is None


@pytest.mark.parametrize(
    ("answer", "expected"), [("1\n", [1, 5, 8]), ("2\n", [1, 4, 8]), ("2\n4\n", [1, 4, 8]), ("", [1, 4, 8])]
)
def test_share_is_made_of_whole_cores(tmp_path: Path, answer: str, expected: list[int]) -> None:
    """Three ranks of five CPUs each need nine cores of two threads, and Slurm would let them wait for the ninth."""
    put_answer(tmp_path, "sinfo", answer, exit_code=0 if answer else 1)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]"}
    assert [in_whole_cores(num_cpus, environ) for num_cpus in (1, 5, 8)] == expected


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ({"SLURM_CPUS_PER_TASK": "2", "SRUN_CPUS_PER_TASK": "4", "SLURM_TRES_PER_TASK": "cpu:1"}, {}),
        (
            {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu:1", "SLURM_NTASKS": "4"},
            {"SLURM_TRES_PER_TASK": "gres/gpu:1", "SLURM_NTASKS": "4"},
        ),
        ({"SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_GPU": "2", "SLURM_MEM_PER_NODE": "3"}, {}),
        ({"SLURM_EXPORT_ENV": "NONE", "PATH": "/bin"}, {"PATH": "/bin"}),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1"}, None),
        ({"SLURM_CPU_BIND": "none", "SLURM_HINT": "nomultithread"}, "all"),
    ],
    ids=[
        "CPUs",
        "of several the CPUs",
        "memory",
        "environment",
        "binding of an interactive step",
        "the user's binding",
    ],
)
def test_variables_that_would_speak_beside_the_command_line_do_not_reach_srun(
    found: dict[str, str], kept: dict[str, str] | str | None
) -> None:
    expected = found if kept == "all" else {"SLURM_STEP_ID": "4294967290"} if kept is None else kept
    assert step_environment(found) == expected
