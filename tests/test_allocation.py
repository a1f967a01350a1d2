"""Host lists, task lists and the step's variables, with the values that Slurm 22.05.8 set."""

import pytest

from cluster.allocation import (
    MAX_NODES,
    Allocation,
    AllocationError,
    expand_nodelist,
    expand_task_list,
    in_step,
    read_allocation,
    refuse_distribution,
)

UNEVEN_STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
NEEDED = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


def error_of(environ: dict[str, str]) -> str:
    with pytest.raises(AllocationError) as caught:
        read_allocation(environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n3,n1", ["n3", "n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-1]", ["n1"]),
        ("n[3,1]", ["n3", "n1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[001-2]", ["n001", "n002"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n01[1-2]", ["n011", "n012"]),
        ("[1-2]", ["1", "2"]),
        ("10.0.0.[1-2],gpu-a_b.site", ["10.0.0.1", "10.0.0.2", "gpu-a_b.site"]),
        ("n-1[2-3]", ["n-12", "n-13"]),
        ("rack[1-2]n[08-09],x", ["rack1n08", "rack1n09", "rack2n08", "rack2n09", "x"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("a[01,7]b-[1-2]", ["a01b-1", "a01b-2", "a7b-1", "a7b-2"]),
        ("n[1-2]s,x", ["n1s", "n2s", "x"]),  # Slurm 24.11; 22.05 refuses it
        ("n18446744073709551616", ["n18446744073709551616"]),
        ("n[08-09]%d%", ["n08%d%", "n09%d%"]),
    ],
)
def test_host_list_becomes_its_names(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == tuple(names)


def test_three_groups_come_in_the_order_of_scontrol() -> None:
    expected = "a1b3c6 a1b3c7 a2b3c6 a2b3c7 a1b4c6 a1b4c7 a2b4c6 a2b4c7"
    assert " ".join(expand_nodelist("a[1-2]b[3-4]c[6-7]")) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "host list '' has an empty name at character 1"),
        ("a,,b", "host list 'a,,b' has an empty name at character 3"),
        ("n[1-2],", "host list 'n[1-2],' has an empty name at character 8"),
        ("n[]", "host list 'n[]': unexpected '[' at character 2; expected such as n[01-03,7],x"),
        ("n[1-2", "host list 'n[1-2': unexpected '[' at character 2; expected such as n[01-03,7],x"),
        ("n1]", "host list 'n1]': unexpected ']' at character 3; expected such as n[01-03,7],x"),
        ("n[[1-2]]", "host list 'n[[1-2]]': unexpected '[' at character 2; expected such as n[01-03,7],x"),
        ("n[a-b]", "host list 'n[a-b]': unexpected '[' at character 2; expected such as n[01-03,7],x"),
        ("n1 n2", "host list 'n1 n2': unexpected ' ' at character 3; expected such as n[01-03,7],x"),
        ("n[1,]", "host list 'n[1,]': '' is neither a number (7) nor a range (001-003)"),
        ("n[1-2-3]", "host list 'n[1-2-3]': '1-2-3' is neither a number (7) nor a range (001-003)"),
        ("n[-1]", "host list 'n[-1]': '-1' is neither a number (7) nor a range (001-003)"),
        ("n[3-1]", "host list 'n[3-1]': the range '3-1' runs backwards"),
    ],
)
def test_what_is_no_host_list_is_named(text: str, reason: str) -> None:
    with pytest.raises(AllocationError) as caught:
        expand_nodelist(text)
    assert str(caught.value) == reason


def test_host_list_may_be_as_long_as_slurm_allows() -> None:
    assert len(expand_nodelist(f"n[1-{MAX_NODES}]")) == MAX_NODES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n[1-99999999999]", "host list 'n[1-99999999999]': the range '1-99999999999' has more than 65536 numbers"),
        ("n[0-65536]", "host list 'n[0-65536]': the range '0-65536' has more than 65536 numbers"),
        ("a[1-300]b[1-300]", "host list 'a[1-300]b[1-300]' stands for more than 65536 names"),
        ("a[1-60000],b[1-60000]", "host list 'a[1-60000],b[1-60000]' stands for more than 65536 names"),
    ],
)
def test_host_list_without_bound_is_refused(text: str, reason: str) -> None:
    with pytest.raises(AllocationError) as caught:
        expand_nodelist(text)
    assert str(caught.value) == reason


def test_single_names_are_bounded_too() -> None:
    names = [f"n{number}" for number in range(MAX_NODES)]
    assert expand_nodelist(",".join(names)) == tuple(names)
    with pytest.raises(AllocationError) as caught:
        expand_nodelist(",".join([*names, "x"]))
    assert str(caught.value).endswith(",x' stands for more than 65536 names")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (1,)), ("40,8", (40, 8)), ("1(x2)", (1, 1)), ("2(x3),1", (2, 2, 2, 1)), ("4,2,1(x2)", (4, 2, 1, 1))],
)
def test_task_list_becomes_its_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_task_list(text) == counts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "task list '': '' is neither a count (2) nor a repeated one (2(x3))"),
        ("2(x3", "task list '2(x3': '2(x3' is neither a count (2) nor a repeated one (2(x3))"),
        ("-1", "task list '-1': '-1' is neither a count (2) nor a repeated one (2(x3))"),
        ("2,", "task list '2,': '' is neither a count (2) nor a repeated one (2(x3))"),
        ("2,0", "task list '2,0': '0' has a zero; every node of a step runs a task"),
        ("2(x0)", "task list '2(x0)': '2(x0)' has a zero; every node of a step runs a task"),
        ("1(x65536),1", "task list '1(x65536),1' stands for more than 65536 nodes"),
    ],
)
def test_what_is_no_task_list_is_named(text: str, reason: str) -> None:
    with pytest.raises(AllocationError) as caught:
        expand_task_list(text)
    assert str(caught.value) == reason


def test_step_on_a_part_of_its_job_has_the_nodes_of_the_step() -> None:
    expected = Allocation("17", "0", None, 0, ("n2", "n3", "n4"), (2, 1, 1))
    assert (read_allocation(UNEVEN_STEP), expected.num_tasks) == (expected, 4)


def test_array_element_and_restart_are_read() -> None:
    again = UNEVEN_STEP | {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_JOB_ID": "15", "SLURM_RESTART_COUNT": "2"}
    assert read_allocation(again) == Allocation("17", "0", "5", 2, ("n2", "n3", "n4"), (2, 1, 1))


def test_step_without_its_number_of_nodes_is_read_all_the_same() -> None:
    without = {name: value for name, value in UNEVEN_STEP.items() if name != "SLURM_STEP_NUM_NODES"}
    assert read_allocation(without) == read_allocation(UNEVEN_STEP)


@pytest.mark.parametrize("name", NEEDED)
def test_missing_variable_is_named(name: str) -> None:
    without = {key: value for key, value in UNEVEN_STEP.items() if key != name}
    assert error_of(without) == f"{name} is not set: start this process with srun, inside a Slurm job"


@pytest.mark.parametrize("name", NEEDED)
def test_empty_variable_is_named(name: str) -> None:
    expected = f"{name} is empty: start this process with srun, inside a Slurm job"
    assert error_of(UNEVEN_STEP | {name: ""}) == expected


def test_no_job_at_all_is_said() -> None:
    assert error_of({}) == "SLURM_JOB_ID is not set: start this process with srun, inside a Slurm job"


def test_batch_shell_is_no_rank_although_slurm_calls_it_task_0_of_4() -> None:
    assert error_of(BATCH_SHELL) == (
        "SLURM_JOB_ID=17, but SLURM_STEP_ID=(not set): this is the job's shell and none of its tasks; start this with "
        "srun, or with torchrun for processes on this node only"
    )


def test_interactive_step_of_salloc_is_a_shell_too() -> None:
    shell = UNEVEN_STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert error_of(shell) == (
        "SLURM_JOB_ID=17, but SLURM_STEP_ID=4294967290: this is the job's shell and none of its tasks; start this with "
        "srun, or with torchrun for processes on this node only"
    )


def test_only_tasks_are_in_a_step() -> None:
    environs: list[dict[str, str]] = [UNEVEN_STEP, BATCH_SHELL, {}, {"SLURM_STEP_ID": "4294967291"}]
    assert [in_step(environ) for environ in environs] == [True, False, False, False]


def test_heterogeneous_job_is_refused() -> None:
    assert error_of(UNEVEN_STEP | {"SLURM_HET_SIZE": "2"}) == (
        "SLURM_HET_SIZE=2: heterogeneous jobs (components split by ':') are not supported, as Slurm's variables then "
        "describe one component only; submit one component"
    )


@pytest.mark.parametrize("said", ["", "block", "block:cyclic", "block,nopack", "*:block", "BLOCK"])
def test_ranks_that_fill_one_node_after_the_other_are_welcome(said: str) -> None:
    refuse_distribution({"SLURM_DISTRIBUTION": said})
    refuse_distribution({})


@pytest.mark.parametrize("said", ["cyclic", "plane", "arbitrary", "cyclic:block"])  # as Slurm 22.05.8 and 24.11.5 say
def test_job_whose_ranks_are_spread_otherwise_is_refused(said: str) -> None:
    with pytest.raises(AllocationError) as caught:
        refuse_distribution({"SLURM_DISTRIBUTION": said})
    assert str(caught.value) == (
        f"SLURM_DISTRIBUTION={said} does not fill one node after the other, and a rank's number has to tell its node: "
        "use --distribution=block, or leave it out"
    )


def test_unreadable_host_list_names_its_variable() -> None:
    expected = "SLURM_STEP_NODELIST: host list 'n[4-2]': the range '4-2' runs backwards"
    assert error_of(UNEVEN_STEP | {"SLURM_STEP_NODELIST": "n[4-2]"}) == expected


def test_unreadable_task_list_names_its_variable() -> None:
    expected = "SLURM_STEP_TASKS_PER_NODE: task list '2(x': '2(x' is neither a count (2) nor a repeated one (2(x3))"
    assert error_of(UNEVEN_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}) == expected


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_RESTART_COUNT"])
def test_variable_that_is_no_number_is_named(name: str) -> None:
    expected = f"{name}='4x' is no whole number >= 0: start this process with srun"
    assert error_of(UNEVEN_STEP | {name: "4x"}) == expected


@pytest.mark.parametrize(
    ("changes", "contradiction"),
    [
        (
            {"SLURM_STEP_NODELIST": "n[1-4]"},
            "SLURM_STEP_NODELIST=n[1-4] has 4 nodes, but SLURM_STEP_TASKS_PER_NODE=2,1(x2) has 3",
        ),
        (
            {"SLURM_STEP_NUM_NODES": "4"},
            "SLURM_STEP_NODELIST=n[2-4] has 3 nodes, but SLURM_STEP_NUM_NODES=4",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            "SLURM_STEP_TASKS_PER_NODE=2,1(x2) adds up to 4 tasks, but SLURM_STEP_NUM_TASKS=8",
        ),
    ],
)
def test_variables_of_two_steps_are_noticed(changes: dict[str, str], contradiction: str) -> None:
    assert error_of(UNEVEN_STEP | changes) == (
        f"{contradiction}: variables of two steps are mixed; start this process with srun and set none of them"
    )
