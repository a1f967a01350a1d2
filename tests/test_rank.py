"""The place of a process on every route.  Slurm's values are those that 22.05.8 set; torchrun's are of torch 2.14.1."""

import tracemalloc
from dataclasses import replace

import pytest

from cluster.allocation import AllocationError
from cluster.rank import MASTER_PORTS, RankEnv, RankError, draw_master_ports, read_rank

# The third task, alone on n4, of `srun -N2 -n3` on a part of a job on four nodes.
LAST_TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "n[2,4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
LAST_TASK_ENV = RankEnv(2, 0, 3, 1, 1, 2, "n2", draw_master_ports("17.3.0"), "17.3.0", False, "srun")
FIRST_TASK = LAST_TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
ONE_TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SIX = PLACE | {"MASTER_ADDR": "gpu-7.site", "MASTER_PORT": "29500"}
TORCHRUN = SIX | {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCHRUN_ENV = RankEnv(5, 1, 8, 4, 1, 2, "gpu-7.site", (29500,), "none.0", True, "torchrun")
SUPERVISOR = {
    "CLUSTER_MASTER_ADDR": "10.0.0.2",
    "CLUSTER_MASTER_PORTS": "23111,24112",
    "CLUSTER_TOKEN": "20260102-030405-ab12.3",
    "CLUSTER_ATTEMPT": "3",
}


def error_of(environ: dict[str, str], local_rank_argument: int | None = None) -> str:
    with pytest.raises((RankError, AllocationError)) as caught:
        read_rank(environ, local_rank_argument)
    return str(caught.value)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# A job step


def test_last_task_of_uneven_step() -> None:
    assert read_rank(LAST_TASK) == LAST_TASK_ENV


def test_second_task_of_cyclic_step_runs_on_the_second_node() -> None:
    cyclic = LAST_TASK | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "1"}
    assert read_rank(cyclic) == replace(LAST_TASK_ENV, rank=1, world_size=4, local_world_size=2)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_missing_variable_of_a_task_is_named(name: str) -> None:
    expected = f"{name} is not set: start this process with srun, inside a Slurm job"
    assert error_of(without(LAST_TASK, name)) == expected


@pytest.mark.parametrize(
    ("procid", "localid", "nodeid"), [("3", "0", "1"), ("2", "1", "1"), ("2", "0", "2")], ids=["rank", "local", "node"]
)
def test_task_outside_its_step_is_refused(procid: str, localid: str, nodeid: str) -> None:
    environ = LAST_TASK | {"SLURM_PROCID": procid, "SLURM_LOCALID": localid, "SLURM_NODEID": nodeid}
    assert error_of(environ) == (
        f"SLURM_PROCID={procid}, SLURM_LOCALID={localid} on SLURM_NODEID={nodeid} is outside step 17.3, which has "
        "(2, 1) tasks on its nodes: start this process with srun and set none of these"
    )


def test_job_shell_is_no_rank() -> None:
    shell = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert error_of(shell) == (
        "SLURM_JOB_ID=17, but SLURM_STEP_ID=(not set): this is the job's shell and none of its tasks; start this with "
        "srun, or with torchrun for processes on this node only"
    )


def test_heterogeneous_job_is_refused_under_every_launcher() -> None:
    expected = (
        "SLURM_HET_SIZE=2: heterogeneous jobs (components split by ':') are not supported, as Slurm's variables then "
        "describe one component only; submit one component"
    )
    het = {"SLURM_HET_SIZE": "2"}
    assert [error_of(LAST_TASK | het), error_of(TORCHRUN | het)] == [expected, expected]


@pytest.mark.parametrize(
    ("changes", "launcher"),
    [
        ({}, "srun, one task in a job of 2 nodes"),
        ({"SLURM_JOB_NUM_NODES": "1"}, "srun, one task"),
        ({"SLURM_PTY_PORT": "40311", "SLURM_JOB_NUM_NODES": "1"}, "srun --pty, one task"),
        ({"SLURM_PTY_PORT": "40311"}, "srun --pty, one task in a job of 2 nodes"),
    ],
)
def test_one_task_step_says_what_it_leaves_unused(changes: dict[str, str], launcher: str) -> None:
    env = RankEnv(0, 0, 1, 1, 0, 1, "n1", draw_master_ports("17.1.0"), "17.1.0", False, launcher)
    assert read_rank(ONE_TASK | changes) == env


def test_users_address_and_port_are_kept_as_typed() -> None:
    typed = LAST_TASK | {"MASTER_ADDR": "Login.Example", "MASTER_PORT": "29501"}
    assert read_rank(typed) == replace(LAST_TASK_ENV, master_addr="Login.Example", master_ports=(29501,))


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "29500,29501"])
def test_users_port_that_is_none_is_refused(port: str) -> None:
    expected = f"MASTER_PORT: {port!r} is no TCP port; expected 1 to 65535"
    assert error_of(LAST_TASK | {"MASTER_PORT": port}) == expected


def test_rank_0_away_from_the_first_node_is_refused() -> None:
    arbitrary = LAST_TASK | {"SLURM_PROCID": "0"}
    assert error_of(arbitrary) == (
        "SLURM_PROCID=0 runs on n4 (SLURM_NODEID=1), but all look for it on n2: leave out --distribution=arbitrary, or "
        "set MASTER_ADDR=n4"
    )


@pytest.mark.parametrize("rank", [FIRST_TASK, LAST_TASK], ids=["rank 0", "rank 2"])
def test_arbitrary_distribution_is_refused_by_every_rank(rank: dict[str, str]) -> None:
    assert error_of(rank | {"SLURM_DISTRIBUTION": "arbitrary"}) == (
        "SLURM_DISTRIBUTION=arbitrary: rank 0 may be on any node, but all look for it on n2; leave out "
        "--distribution=arbitrary, or set MASTER_ADDR to rank 0's node"
    )
    assert read_rank(rank | {"SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "n4"}).master_addr == "n4"


def test_rank_0_away_from_the_first_node_is_found_by_the_users_address() -> None:
    arbitrary = LAST_TASK | {"SLURM_PROCID": "0", "MASTER_ADDR": "n4"}
    assert read_rank(arbitrary) == replace(LAST_TASK_ENV, rank=0, master_addr="n4")


def test_supervisors_meeting_point_goes_before_the_users() -> None:
    supervised = LAST_TASK | SUPERVISOR | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"}
    assert read_rank(supervised) == replace(
        LAST_TASK_ENV,
        master_addr="10.0.0.2",
        master_ports=(23111, 24112),
        token="20260102-030405-ab12.3",
        launcher="supervisor",
    )


@pytest.mark.parametrize("name", ["CLUSTER_MASTER_ADDR", "CLUSTER_MASTER_PORTS"])
def test_missing_variable_of_the_supervisor_is_named(name: str) -> None:
    assert error_of(without(LAST_TASK | SUPERVISOR, name)) == (
        f"{name} not set: the supervisor sets all of CLUSTER_MASTER_ADDR, CLUSTER_MASTER_PORTS, CLUSTER_TOKEN, or none"
    )


def test_rank_that_agrees_with_slurm_may_be_set_in_a_step() -> None:
    exported = LAST_TASK | {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    assert read_rank(exported) == LAST_TASK_ENV


@pytest.mark.parametrize(
    ("leftovers", "seen"),
    [
        ({"RANK": "0"}, "RANK=0 (Slurm says 2)"),
        (SIX, "RANK=5 (Slurm says 2), LOCAL_RANK=1 (Slurm says 0), WORLD_SIZE=8 (Slurm says 3), "
              "LOCAL_WORLD_SIZE=4 (Slurm says 1)"),
        (SIX | SUPERVISOR, "RANK=5 (Slurm says 2), LOCAL_RANK=1 (Slurm says 0), WORLD_SIZE=8 (Slurm says 3), "
              "LOCAL_WORLD_SIZE=4 (Slurm says 1)"),
    ],
    ids=["partly", "fully", "under the supervisor"],
)  # fmt: skip
def test_rank_left_over_in_a_step_is_refused(leftovers: dict[str, str], seen: str) -> None:
    assert error_of(LAST_TASK | leftovers) == (
        f"{seen}: left over from another launcher; unset them before srun, or run torchrun under srun "
        "--ntasks-per-node=1"
    )


def test_local_rank_argument_that_contradicts_slurm_is_refused() -> None:
    expected = "--local-rank=1, but SLURM_LOCALID=0: leave the argument out"
    assert (error_of(LAST_TASK, 1), read_rank(LAST_TASK, 0)) == (expected, LAST_TASK_ENV)


# Ports


def test_ports_are_eight_different_ones_below_the_ephemeral_range() -> None:
    ports = draw_master_ports("17.3.0")
    assert (len(set(ports)), all(port in MASTER_PORTS for port in ports), MASTER_PORTS.stop) == (8, True, 32_768)


def test_ports_stay_the_same_for_ever() -> None:
    """Ranks of one run may be started by different Pythons."""
    assert draw_master_ports("1234567.0.0", 3) == (26042, 27568, 26617)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_STEP_ID": "4"},
        {"SLURM_JOB_ID": "10017"},
        {"SLURM_ARRAY_TASK_ID": "3"},
    ],
    ids=["restart", "step", "job", "array task"],
)
def test_ports_and_token_change_with(changes: dict[str, str]) -> None:
    env = read_rank(LAST_TASK | changes)
    shared = set(env.master_ports) & set(LAST_TASK_ENV.master_ports)
    assert (shared, env.token == LAST_TASK_ENV.token) == (set(), False)


def test_all_ranks_of_a_step_meet_at_one_point() -> None:
    envs = [read_rank(FIRST_TASK), read_rank(FIRST_TASK | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}), LAST_TASK_ENV]
    assert {(env.master_addr, env.master_ports, env.token) for env in envs} == {
        ("n2", draw_master_ports("17.3.0"), "17.3.0")
    }


# torchrun


def test_torchruns_variables_are_taken_whole() -> None:
    assert read_rank(TORCHRUN) == TORCHRUN_ENV


def test_torchrun_inside_a_step_wins() -> None:
    one_agent_per_node = LAST_TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert read_rank(one_agent_per_node | TORCHRUN) == TORCHRUN_ENV


def test_torchrun_inside_a_supervised_step_wins() -> None:
    assert read_rank(ONE_TASK | SUPERVISOR | TORCHRUN) == TORCHRUN_ENV


def test_two_agents_on_a_node_are_refused() -> None:
    assert error_of(LAST_TASK | TORCHRUN) == (
        "torchrun was started by srun with SLURM_STEP_TASKS_PER_NODE=2,1: start one torchrun per node (srun "
        "--ntasks-per-node=1 torchrun ...), or the ranks with srun alone"
    )


@pytest.mark.parametrize("mark", ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"])
def test_one_mark_is_enough_to_tell_torchrun_inside_a_step(mark: str) -> None:
    environ = ONE_TASK | SIX | {mark: TORCHRUN[mark]}
    assert read_rank(environ).launcher == "torchrun"


def test_restarted_worker_has_a_token_of_its_own() -> None:
    assert read_rank(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}) == replace(TORCHRUN_ENV, token="none.2")


def test_torchrun_without_agent_store_lets_rank_0_bind() -> None:
    environ = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert read_rank(environ) == replace(TORCHRUN_ENV, uses_agent_store=False)


def test_six_variables_without_torchruns_own_tell_the_node_by_the_rank() -> None:
    assert read_rank(SIX) == replace(TORCHRUN_ENV, token="torchrun.0", uses_agent_store=False)


@pytest.mark.parametrize("name", list(SIX))
def test_missing_variable_of_torchrun_is_named(name: str) -> None:
    seen = ", ".join(f"{other}={value}" for other, value in SIX.items() if other != name)
    assert error_of(without(TORCHRUN, name)) == (
        f"{name} not set, but {seen}: start with torchrun, which sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
        "MASTER_ADDR, MASTER_PORT, or unset them all for one process"
    )


def test_rank_without_the_rest_is_no_single_process() -> None:
    assert error_of({"WORLD_SIZE": "4"}) == (
        "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set, but WORLD_SIZE=4: start with torchrun, "
        "which sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or unset them all for "
        "one process"
    )


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_variable_of_torchrun_that_is_no_number_is_named(name: str) -> None:
    expected = f"{name}='-1' is no whole number >= 0: start with torchrun, which sets it"
    assert error_of(TORCHRUN | {name: "-1"}) == expected


@pytest.mark.parametrize(
    "changes", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}, {"WORLD_SIZE": "0"}]
)
def test_rank_outside_torchruns_world_is_refused(changes: dict[str, str]) -> None:
    seen = ", ".join(f"{name}={value}" for name, value in (PLACE | changes).items())
    assert error_of(TORCHRUN | changes) == (
        f"{seen}: expected RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE; start with torchrun, and "
        "set none of them"
    )


def test_local_rank_argument_takes_the_place_of_the_variable() -> None:
    assert read_rank(without(TORCHRUN, "LOCAL_RANK"), 1) == TORCHRUN_ENV


def test_local_rank_argument_that_contradicts_the_variable_is_refused() -> None:
    assert error_of(TORCHRUN, 0) == "--local-rank=0, but LOCAL_RANK=1: leave the argument out"


# The supervisor on one machine


@pytest.mark.parametrize(
    "shell",
    [{}, ONE_TASK, {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}],
    ids=["no Slurm", "from srun --pty bash", "from salloc"],
)
def test_supervisors_local_process_has_its_meeting_point(shell: dict[str, str]) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = shell | SUPERVISOR | place | {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "23111"}
    assert read_rank(environ) == RankEnv(
        1, 1, 2, 2, 0, 1, "10.0.0.2", (23111, 24112), "20260102-030405-ab12.3", False, "supervisor"
    )


# Many nodes

STEPS = {
    "n[00001-16384]": (16_384, "n00001"),
    ",".join(f"host{7 * number}" for number in range(4096)): (4096, "host0"),
    "rack[01-16]chassis[1-32]n[01-32]": (16_384, "rack01chassis1n01"),
}


def task_of_many(nodelist: str, node: int, local_rank: int, tasks: int) -> dict[str, str]:
    num_nodes = STEPS[nodelist][0]
    counts = {"SLURM_STEP_NUM_NODES": str(num_nodes), "SLURM_STEP_NUM_TASKS": str(num_nodes * tasks)}
    lists = {"SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{num_nodes})"}
    place = {"SLURM_PROCID": node * tasks + local_rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node}
    return ONE_TASK | counts | lists | {name: str(value) for name, value in place.items()}


@pytest.mark.parametrize("nodelist", STEPS, ids=lambda text: text[:20])
def test_tasks_of_a_step_on_thousands_of_nodes_have_their_places(nodelist: str) -> None:
    num_nodes, first = STEPS[nodelist]
    for node, local_rank in ((0, 0), (num_nodes // 3, 5), (num_nodes - 1, 7)):
        found = read_rank(task_of_many(nodelist, node, local_rank, tasks=8))
        place = (8 * node + local_rank, local_rank, 8 * num_nodes, 8, node, num_nodes, first)
        assert found == RankEnv(*place, draw_master_ports("17.1.0"), "17.1.0", False, "srun")


@pytest.mark.parametrize("nodelist", STEPS, ids=lambda text: text[:20])
def test_memory_for_finding_a_place_grows_with_nodes_alone_and_is_given_back(nodelist: str) -> None:
    kept, peaks = [], []
    for tasks in (1, 8):
        environ = task_of_many(nodelist, 0, 0, tasks)
        read_rank(environ)  # fills caches, of regular expressions say
        tracemalloc.start()
        found = read_rank(environ)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.num_nodes == STEPS[nodelist][0]
        kept.append(held)
        peaks.append(peak)
    assert max(kept) < 16 << 10  # a list of the nodes has 128 KiB, one of the ranks 1 MiB
    assert max(peaks) < 4 << 20
    assert abs(peaks[1] - peaks[0]) < 16 << 10


# One process


def test_process_without_a_launcher_is_a_world_of_one() -> None:
    env = read_rank({"PATH": "/usr/bin"})
    assert env == RankEnv(0, 0, 1, 1, 0, 1, "127.0.0.1", draw_master_ports(env.token), env.token, False, "single")


def test_two_processes_without_a_launcher_do_not_share_ports() -> None:
    first, second = read_rank({}), read_rank({})
    assert (first.token == second.token, first.master_ports == second.master_ports) == (False, False)


def test_single_process_takes_the_users_port() -> None:
    assert read_rank({"MASTER_PORT": "29500"}).master_ports == (29500,)


def test_local_rank_argument_without_a_launcher_is_refused() -> None:
    assert (read_rank({}, 0).local_rank, error_of({}, 3)) == (
        0,
        "--local-rank=3, but no launcher set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE: start with torchrun",
    )
