"""Allocation: supervise -> [allocation] -> rank.  Which nodes a job step has, and how many tasks run on each.

Only the step's own variables are read: in a step on a part of the job, SLURM_JOB_NODELIST and SLURM_JOB_NUM_NODES
describe the whole job, and the batch shell has SLURM_PROCID=0 and SLURM_NTASKS=4 without being a rank at all.
Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; `scontrol show hostnames` of Slurm 22.05.8 and 24.11.5 for the grammar
of host lists.  Standard library only.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.runs import UsageError

Item = TypeVar("Item")

MAX_NODES = 65_536
"""Longest host or task list, as scontrol bounds one range: `n[1-99999999999]` is an error, not a full memory."""

FIRST_RESERVED_STEP_ID = 0xFFFF_FFF0
"""Step ids from here on are Slurm's own: batch script, extern, and the shell that salloc may open on a node."""

_PLAIN_NAMES = re.compile(r"[^\s,\[\]]+(?:,[^\s,\[\]]+)*")
_HOST_ENTRY = re.compile(r"[^\s,\[\]]*(?:\[[0-9,-]+\][^\s,\[\]]*)*")
_HOST_GROUP = re.compile(r"\[([0-9,-]+)\]")
_HOST_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_TASK_ENTRY = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_INTEGER = re.compile(r"[0-9]{1,18}")


class AllocationError(UsageError):
    """The process is outside a job step, or the step's variables are missing, unreadable or contradict each other."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes and tasks of one job step.  Nodes count from 0 in the order of `nodes`."""

    job_id: str
    """SLURM_JOB_ID: differs for every element of an array."""
    step_id: str
    array_task_id: str | None
    restart_count: int
    """How often Slurm has requeued this job id."""
    nodes: tuple[str, ...]
    """Host names of the step's nodes, shape (num_nodes,); the job may have more."""
    tasks_per_node: tuple[int, ...]
    """Shape (num_nodes,); nodes may differ."""

    @property
    def num_tasks(self) -> int:
        """Tasks of the whole step: the world size."""
        return sum(self.tasks_per_node)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Read the allocation of the job step that this process belongs to.

    Raises AllocationError: this is no task of a step, the job is heterogeneous, or the variables contradict.
    """
    refuse_heterogeneous_job(environ)
    _refuse_outside_step(environ)
    nodes = _read_list(environ, "SLURM_STEP_NODELIST", expand_nodelist)
    tasks_per_node = _read_list(environ, "SLURM_STEP_TASKS_PER_NODE", expand_task_list)
    _check_counts(environ, len(nodes), tasks_per_node)
    return Allocation(
        job_id=read_text(environ, "SLURM_JOB_ID"),
        step_id=read_text(environ, "SLURM_STEP_ID"),
        array_task_id=environ.get("SLURM_ARRAY_TASK_ID"),
        restart_count=read_integer(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
    )


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Expand a host list such as `rack[1-2]n[08-09],x` as `scontrol show hostnames` does, in the same order.

    Text after the last bracket (`n[1-2]s`) is taken as Slurm 24.11 takes it; 22.05 refuses it.
    Raises AllocationError: `text` is empty or no host list, or stands for more than MAX_NODES names.
    """
    if _PLAIN_NAMES.fullmatch(text) and text.count(",") < MAX_NODES:  # 0.2 ms for 4,096 names, where entries take 6 ms
        return tuple(text.split(","))
    names: list[str] = []
    for entry in _split_entries(text):
        names += _expand_entry(entry, text, room=MAX_NODES - len(names))
    return tuple(names)


def expand_task_list(text: str) -> tuple[int, ...]:
    """Expand a task list, `2(x3),1` -> (2, 2, 2, 1); shape (num_nodes,).

    Raises AllocationError: `text` is no task list, has a zero in it, or stands for more than MAX_NODES nodes.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _TASK_ENTRY.fullmatch(entry)
        if match is None:
            raise AllocationError(f"task list {text!r}: {entry!r} is neither a count (2) nor a repeated one (2(x3))")
        tasks, repeats = int(match[1]), int(match[2] or 1)
        if tasks == 0 or repeats == 0:
            raise AllocationError(f"task list {text!r}: {entry!r} has a zero; every node of a step runs a task")
        if len(counts) + repeats > MAX_NODES:
            raise AllocationError(f"task list {text!r} stands for more than {MAX_NODES} nodes")
        counts += [tasks] * repeats
    return tuple(counts)


def read_text(environ: Mapping[str, str], name: str) -> str:
    """One variable of Slurm, which must be there.

    Raises AllocationError: it is not set, or empty.
    """
    value = environ.get(name, "")
    if not value:
        state = "is empty" if name in environ else "is not set"
        raise AllocationError(f"{name} {state}: start this process with srun, inside a Slurm job")
    return value


def read_integer(environ: Mapping[str, str], name: str) -> int:
    """One variable of Slurm as a whole number >= 0.

    Raises AllocationError: it is not set or no such number.
    """
    value = read_text(environ, name)
    if _INTEGER.fullmatch(value) is None:
        raise AllocationError(f"{name}={value!r} is no whole number >= 0: start this process with srun")
    return int(value)


def refuse_heterogeneous_job(environ: Mapping[str, str]) -> None:
    """Stop in a job of several components, whose variables describe the first component only.

    Raises AllocationError: SLURM_HET_SIZE is above 1.
    """
    size = environ.get("SLURM_HET_SIZE", "1")
    if size not in ("0", "1"):
        raise AllocationError(
            f"SLURM_HET_SIZE={size}: heterogeneous jobs (components split by ':') are not supported, as Slurm's "
            "variables then describe one component only; submit one component"
        )


def fills_node_after_node(distribution: str) -> bool:
    """Whether --distribution gives neighbouring ranks the same node, as in block, *, block:cyclic or block,Pack."""
    return re.split("[:,=]", distribution)[0].lower() in ("block", "*", "")


def refuse_distribution(environ: Mapping[str, str]) -> None:
    """Stop where the job's tasks are spread over its nodes in another order: a rank's number tells its node.

    Raises AllocationError: SLURM_DISTRIBUTION says cyclic, plane or arbitrary.
    """
    distribution = environ.get("SLURM_DISTRIBUTION", "")
    if not fills_node_after_node(distribution):
        raise AllocationError(
            f"SLURM_DISTRIBUTION={distribution} does not fill one node after the other, and a rank's number has to "
            "tell its node: use --distribution=block, or leave it out"
        )


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process (or an ancestor of it) as a task of a job step."""
    step_id = environ.get("SLURM_STEP_ID", "")
    reserved = step_id.isdecimal() and int(step_id) >= FIRST_RESERVED_STEP_ID
    return ("SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ) and not reserved


def _refuse_outside_step(environ: Mapping[str, str]) -> None:
    """Stop in the batch or salloc shell: it looks like rank 0 of 4, and would wait for ranks that never come."""
    job_id = read_text(environ, "SLURM_JOB_ID")
    if in_step(environ):
        return
    raise AllocationError(
        f"SLURM_JOB_ID={job_id}, but SLURM_STEP_ID={environ.get('SLURM_STEP_ID', '(not set)')}: this is the job's "
        "shell and none of its tasks; start this with srun, or with torchrun for processes on this node only"
    )


def _read_list(environ: Mapping[str, str], name: str, expand: Callable[[str], tuple[Item, ...]]) -> tuple[Item, ...]:
    text = read_text(environ, name)
    try:
        return expand(text)
    except AllocationError as error:
        raise AllocationError(f"{name}: {error}") from None


def _check_counts(environ: Mapping[str, str], num_nodes: int, tasks_per_node: tuple[int, ...]) -> None:
    """Hold the two lists of a step against each other and against Slurm's own sums."""
    node_list = f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}"
    task_list = f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']}"
    if len(tasks_per_node) != num_nodes:
        raise AllocationError(
            _contradiction(f"{node_list} has {num_nodes} nodes", f"{task_list} has {len(tasks_per_node)}")
        )
    if "SLURM_STEP_NUM_NODES" in environ and read_integer(environ, "SLURM_STEP_NUM_NODES") != num_nodes:
        said = f"SLURM_STEP_NUM_NODES={environ['SLURM_STEP_NUM_NODES']}"
        raise AllocationError(_contradiction(f"{node_list} has {num_nodes} nodes", said))
    if read_integer(environ, "SLURM_STEP_NUM_TASKS") != sum(tasks_per_node):
        said = f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']}"
        raise AllocationError(_contradiction(f"{task_list} adds up to {sum(tasks_per_node)} tasks", said))


def _contradiction(first: str, second: str) -> str:
    return f"{first}, but {second}: variables of two steps are mixed; start this process with srun and set none of them"


def _split_entries(text: str) -> Iterator[str]:
    """Cut a host list at the commas outside brackets, in one pass."""
    position = 0
    while True:
        end = _HOST_ENTRY.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty string too
        if end < len(text) and text[end] != ",":
            raise AllocationError(
                f"host list {text!r}: unexpected {text[end]!r} at character {end + 1}; expected such as n[01-03,7],x"
            )
        if end == position:
            raise AllocationError(f"host list {text!r} has an empty name at character {position + 1}")
        yield text[position:end]
        if end == len(text):
            return
        position = end + 1


def _expand_entry(entry: str, text: str, room: int) -> list[str]:
    """All names of one entry such as `r[1-2]n[08-09]s`; `text` is the whole list, for messages."""
    first, *rest = _HOST_GROUP.split(entry)  # literal, group, literal, ..., group, literal
    groups = [_parse_group(group, text) for group in rest[::2]]
    if math.prod(sum(len(numbers) for numbers, _ in group) for group in groups) > room:
        raise AllocationError(f"host list {text!r} stands for more than {MAX_NODES} names")
    if not groups:
        return [first]
    *slow, fast = [_labels(group, literal) for group, literal in zip(groups, rest[1::2], strict=True)]
    names = [first]
    for labels in slow:  # scontrol's order: the last group runs fastest, then the first, the second, ...
        names = [name + label for label in labels for name in names]
    return [name + label for name in names for label in fast]


def _parse_group(group: str, text: str) -> list[tuple[range, int]]:
    """The numbers inside one pair of brackets, `001-003,07` -> [(range(1, 4), 3), (range(7, 8), 2)]: values, digits."""
    parts = []
    for part in group.split(","):
        match = _HOST_RANGE.fullmatch(part)
        if match is None:
            raise AllocationError(f"host list {text!r}: {part!r} is neither a number (7) nor a range (001-003)")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise AllocationError(f"host list {text!r}: the range {part!r} runs backwards")
        if high - low >= MAX_NODES:
            raise AllocationError(f"host list {text!r}: the range {part!r} has more than {MAX_NODES} numbers")
        parts.append((range(low, high + 1), len(match[1])))
    return parts


def _labels(group: list[tuple[range, int]], literal: str) -> list[str]:
    """Every number of a group, padded to the width of its range's first, and the text that follows the bracket."""
    after = literal.replace("%", "%%")
    templates = [(numbers, f"%0{width}d{after}") for numbers, width in group]  # half the time of an f-string each
    return [template % number for numbers, template in templates for number in numbers]
