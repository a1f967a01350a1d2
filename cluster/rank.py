"""Rank environment: allocation -> [rank] -> train.  Which process this is among how many, and where all of them meet.

One function serves every route: tasks of a job step (under the supervisor or a plain srun), torchrun's workers, the
supervisor's processes on one machine, and one process by itself.  Where to meet is decided once and is equal on all
ranks: the supervisor says it, or it follows from values that all tasks of a step share.
Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES", Slurm 22.05 and 24.11; torch.distributed.run, "Environment Variables",
torch 2.14.  Standard library only.
"""

import hashlib
import itertools
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.allocation import (
    Allocation,
    expand_task_list,
    in_step,
    read_allocation,
    read_integer,
    refuse_heterogeneous_job,
)
from cluster.runs import UsageError

MASTER_PORTS = range(20_000, 32_768)
"""TCP; ends where Linux's ephemeral ports begin, any of which an outgoing connection may hold."""

MASTER_ADDR_VARIABLE = "CLUSTER_MASTER_ADDR"
MASTER_PORTS_VARIABLE = "CLUSTER_MASTER_PORTS"
"""Ports in the order of trying, such as "23111,24112"."""
TOKEN_VARIABLE = "CLUSTER_TOKEN"
ATTEMPT_VARIABLE = "CLUSTER_ATTEMPT"
SPEC_VARIABLE = "CLUSTER_SPEC"
"""Text of the run's spec: the supervisor reads the file, so that not every rank has to."""
KILL_WAIT_VARIABLE = "CLUSTER_KILL_WAIT_S"
"""Seconds that Slurm leaves between TERM and KILL."""
PYTHON_VARIABLE = "CLUSTER_PYTHON"
"""Version of the interpreter at submission, which start.py compares with its own; not set in images."""

PLACE_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TORCHRUN_VARIABLES = (*PLACE_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
ELASTIC_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
"""Set by torchrun's agent only: they tell its workers from processes with a left-over RANK."""


class RankError(UsageError):
    """The variables that place this process are missing, unreadable or contradict each other."""


@dataclass(frozen=True, slots=True)
class RankEnv:
    """One process's place among world_size processes, and where they meet.  Ranks and nodes count from 0."""

    rank: int
    """In [0, world_size), unique in the run."""
    local_rank: int
    """In [0, local_world_size), unique on its node."""
    world_size: int
    local_world_size: int
    """Processes on THIS node; nodes may differ."""
    node: int
    """In [0, num_nodes)."""
    num_nodes: int
    master_addr: str
    """Host name or address of rank 0's node, as the user, the supervisor or Slurm gave it."""
    master_ports: tuple[int, ...]
    """TCP ports that rank 0 tries to bind, in this order; equal on all ranks."""
    token: str
    """Equal on all ranks of this attempt and on no others: tells this run's store from another's."""
    uses_agent_store: bool
    """Whether torchrun's agent serves a store at master_addr:master_ports[0], so that rank 0 must not bind it."""
    launcher: str
    """For people: "supervisor", "srun", "torchrun" or "single"; a one-task step adds what it leaves unused."""


@dataclass(frozen=True, slots=True)
class _MeetingPoint:
    addr: str
    ports: tuple[int, ...]
    token: str


def read_rank(environ: Mapping[str, str], local_rank_argument: int | None = None) -> RankEnv:
    """Place this process; where several launchers left variables, the innermost one wins or contradicts loudly.

    local_rank_argument: what an old launch script passed as `--local_rank` or `--local-rank`.

    Raises AllocationError: this is a job's shell and none of its tasks, or Slurm's variables contradict each other.
    Raises RankError: variables of torchrun or the supervisor are missing, or contradict each other or Slurm's.
    """
    refuse_heterogeneous_job(environ)
    if _is_elastic(environ):
        _refuse_agents_sharing_a_node(environ)
        return _read_torchrun(environ, local_rank_argument)
    if in_step(environ) and not _is_local_child(environ):
        return _read_step(environ, local_rank_argument)
    if any(environ.get(name) for name in PLACE_VARIABLES):
        return _read_torchrun(environ, local_rank_argument)
    if "SLURM_JOB_ID" in environ:
        read_allocation(environ)  # raises: outside a step
    return _read_single(environ, local_rank_argument)


def draw_master_ports(seed: str, count: int = 8) -> tuple[int, ...]:
    """Different ports out of MASTER_PORTS, spread by a hash; the same for the same seed under every Python.

    A hash, as with `job_id % n` every n-th job meets its like.
    """
    digests = (hashlib.sha256(f"{seed}/{draw}".encode()).digest() for draw in itertools.count())
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[MASTER_PORTS[int.from_bytes(next(digests)[:8], "big") % len(MASTER_PORTS)]] = None
    return tuple(ports)


def _read_step(environ: Mapping[str, str], local_rank_argument: int | None) -> RankEnv:
    """A task of a job step."""
    allocation = read_allocation(environ)
    rank, local_rank, node = (read_integer(environ, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID"))
    _check_inside(allocation, rank, local_rank, node)
    local_world_size = allocation.tasks_per_node[node]
    _check_leftovers(environ, rank, local_rank, allocation.num_tasks, local_world_size)
    _check_argument(local_rank_argument, "SLURM_LOCALID", local_rank)
    _check_where_rank_0_runs(environ, allocation, rank, node)
    meeting = _meeting_point_of_step(environ, allocation)
    return RankEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=allocation.num_tasks,
        local_world_size=local_world_size,
        node=node,
        num_nodes=len(allocation.nodes),
        master_addr=meeting.addr,
        master_ports=meeting.ports,
        token=meeting.token,
        uses_agent_store=False,
        launcher="supervisor" if TOKEN_VARIABLE in environ else _describe_step(environ, allocation),
    )


def _check_inside(allocation: Allocation, rank: int, local_rank: int, node: int) -> None:
    tasks_per_node = allocation.tasks_per_node
    if node >= len(tasks_per_node) or local_rank >= tasks_per_node[node] or rank >= allocation.num_tasks:
        raise RankError(
            f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} on SLURM_NODEID={node} is outside step "
            f"{allocation.job_id}.{allocation.step_id}, which has {tasks_per_node} tasks on its nodes: "
            "start this process with srun and set none of these"
        )


def _check_leftovers(environ: Mapping[str, str], *place: int) -> None:
    """RANK and the like may be there in a step (scripts export them), but not with other values than Slurm's."""
    differing = [
        f"{name}={environ[name]} (Slurm says {value})"
        for name, value in zip(PLACE_VARIABLES, place, strict=True)
        if environ.get(name, str(value)) != str(value)
    ]
    if differing:
        raise RankError(
            f"{', '.join(differing)}: left over from another launcher; unset them before srun, or run torchrun under "
            "srun --ntasks-per-node=1"
        )


def _check_argument(argument: int | None, name: str, local_rank: int) -> None:
    if argument not in (None, local_rank):
        raise RankError(f"--local-rank={argument}, but {name}={local_rank}: leave the argument out")


def _check_where_rank_0_runs(environ: Mapping[str, str], allocation: Allocation, rank: int, node: int) -> None:
    """Block and cyclic distribution put rank 0 on the step's first node, where all look for it; arbitrary may not.

    Every rank refuses that: rank 0 alone would leave the others waiting.
    """
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and not environ.get("MASTER_ADDR"):
        raise RankError(
            f"SLURM_DISTRIBUTION={environ['SLURM_DISTRIBUTION']}: rank 0 may be on any node, but all look for it on "
            f"{allocation.nodes[0]}; leave out --distribution=arbitrary, or set MASTER_ADDR to rank 0's node"
        )
    if rank == 0 and node != 0 and not environ.get("MASTER_ADDR"):
        raise RankError(
            f"SLURM_PROCID=0 runs on {allocation.nodes[node]} (SLURM_NODEID={node}), but all look for it on "
            f"{allocation.nodes[0]}: leave out --distribution=arbitrary, or set MASTER_ADDR={allocation.nodes[node]}"
        )


def _describe_step(environ: Mapping[str, str], allocation: Allocation) -> str:
    """ "srun", and for one task what it leaves unused: `srun --pty bash` on four nodes is a world of one, too."""
    if allocation.num_tasks > 1:
        return "srun"
    name = "srun --pty" if "SLURM_PTY_PORT" in environ else "srun"
    num_nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    return f"{name}, one task" if num_nodes == "1" else f"{name}, one task in a job of {num_nodes} nodes"


def _meeting_point_of_step(environ: Mapping[str, str], allocation: Allocation) -> _MeetingPoint:
    """Said by the supervisor; else derived from what is different for every step, array element and requeue."""
    if TOKEN_VARIABLE in environ:
        return _meeting_point_of_supervisor(environ)
    array_task = "" if allocation.array_task_id is None else f"_{allocation.array_task_id}"
    token = f"{allocation.job_id}{array_task}.{allocation.step_id}.{allocation.restart_count}"
    ports = _maybe_users_port(environ) or draw_master_ports(token)
    return _MeetingPoint(environ.get("MASTER_ADDR") or allocation.nodes[0], ports, token)


def _meeting_point_of_supervisor(environ: Mapping[str, str]) -> _MeetingPoint:
    names = (MASTER_ADDR_VARIABLE, MASTER_PORTS_VARIABLE, TOKEN_VARIABLE)
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise RankError(f"{', '.join(missing)} not set: the supervisor sets all of {', '.join(names)}, or none")
    addr, ports, token = (environ[name] for name in names)
    return _MeetingPoint(addr, tuple(_port(MASTER_PORTS_VARIABLE, port) for port in ports.split(",")), token)


def _is_elastic(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in ELASTIC_VARIABLES)


def _is_local_child(environ: Mapping[str, str]) -> bool:
    """Whether the supervisor started this process itself, from a shell that happens to be a one-task step.

    In a step of several tasks the supervisor's ranks are Slurm's tasks, and a RANK is somebody's left-over.
    """
    return TOKEN_VARIABLE in environ and "RANK" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"


def _refuse_agents_sharing_a_node(environ: Mapping[str, str]) -> None:
    """torchrun's LOCAL_RANK counts within one agent, so two agents on a node would share GPU 0."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if in_step(environ) and max(expand_task_list(tasks)) > 1:
        raise RankError(
            f"torchrun was started by srun with SLURM_STEP_TASKS_PER_NODE={tasks}: start one torchrun per node "
            "(srun --ntasks-per-node=1 torchrun ...), or the ranks with srun alone"
        )


def _read_torchrun(environ: Mapping[str, str], local_rank_argument: int | None) -> RankEnv:
    """A process with torchrun's six variables: torchrun's own, or the supervisor's on one machine."""
    given = _given_by_torchrun(environ, local_rank_argument)
    rank, local_rank, world_size, local_world_size = (_integer(given, name) for name in PLACE_VARIABLES)
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise RankError(
            f"{_show(given, PLACE_VARIABLES)}: expected RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= "
            "WORLD_SIZE; start with torchrun, and set none of them"
        )
    is_elastic = _is_elastic(environ)
    supervised = TOKEN_VARIABLE in environ and not is_elastic
    meeting = _meeting_point_of_supervisor(environ) if supervised else _meeting_point_of_torchrun(environ)
    has_groups = is_elastic and "GROUP_RANK" in environ  # torchrun's word for nodes: one agent is one group
    return RankEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node=_integer(environ, "GROUP_RANK") if has_groups else rank // local_world_size,
        num_nodes=_integer(environ, "GROUP_WORLD_SIZE") if has_groups else -(-world_size // local_world_size),
        master_addr=meeting.addr,
        master_ports=meeting.ports,
        token=meeting.token,
        uses_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher="supervisor" if supervised else "torchrun",
    )


def _given_by_torchrun(environ: Mapping[str, str], local_rank_argument: int | None) -> dict[str, str]:
    """All six variables, the local rank from the argument where LOCAL_RANK is not set."""
    given = {name: environ[name] for name in TORCHRUN_VARIABLES if environ.get(name)}
    if local_rank_argument is not None:
        given.setdefault("LOCAL_RANK", str(local_rank_argument))
    missing = [name for name in TORCHRUN_VARIABLES if name not in given]
    if missing:
        seen = _show(given, given) or "none of the others is"
        raise RankError(
            f"{', '.join(missing)} not set, but {seen}: start with torchrun, which sets "
            f"{', '.join(TORCHRUN_VARIABLES)}, or unset them all for one process"
        )
    _check_argument(local_rank_argument, "LOCAL_RANK", _integer(given, "LOCAL_RANK"))
    return given


def _meeting_point_of_torchrun(environ: Mapping[str, str]) -> _MeetingPoint:
    """As torchrun gave it; the count of restarts may differ between its agents."""
    token = f"{environ.get('TORCHELASTIC_RUN_ID', 'torchrun')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return _MeetingPoint(environ["MASTER_ADDR"], (_port("MASTER_PORT", environ["MASTER_PORT"]),), token)


def _read_single(environ: Mapping[str, str], local_rank_argument: int | None) -> RankEnv:
    """One process that nobody launched.  Its ports are drawn at random, so that two runs on a machine don't collide."""
    if local_rank_argument not in (None, 0):
        raise RankError(
            f"--local-rank={local_rank_argument}, but no launcher set {', '.join(PLACE_VARIABLES)}: start with torchrun"
        )
    token = secrets.token_hex(8)
    return RankEnv(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=0,
        num_nodes=1,
        master_addr=environ.get("MASTER_ADDR") or "127.0.0.1",
        master_ports=_maybe_users_port(environ) or draw_master_ports(token),
        token=token,
        uses_agent_store=False,
        launcher="single",
    )


def _maybe_users_port(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The user's MASTER_PORT as a list of one: taken or not, it is the port they want."""
    return (_port("MASTER_PORT", environ["MASTER_PORT"]),) if environ.get("MASTER_PORT") else None


def _port(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text) is None or not 0 < int(text) < 65_536:
        raise RankError(f"{name}: {text!r} is no TCP port; expected 1 to 65535")
    return int(text)


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if re.fullmatch(r"[0-9]{1,18}", value) is None:
        raise RankError(f"{name}={value!r} is no whole number >= 0: start with torchrun, which sets it")
    return int(value)


def _show(environ: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names)
