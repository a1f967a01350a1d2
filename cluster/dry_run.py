"""Dry run: spec, plan, script -> [dry run] -> what would be asked, why, and what Slurm says to it.  Submits nothing."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster import slurm
from cluster.fit_words import counted
from cluster.plan import LaunchPlan
from cluster.sizes import Sizes, sizes_of
from cluster.spec import SourcedSpec
from cluster.spec_names import KEY_OF_FLAG

MAX_ALIGNED = 40  # characters of an option beside which the others' keys are aligned
MAX_NODES_SHOWN = 8  # rows of the table of ranks

# Options whose key does not have the name of spec_names.KEY_OF_FLAG; None: always given.
KEY_OF_OPTION: Mapping[str, str | None] = {
    "requeue": "requeue.mode", "no-requeue": "requeue.mode", "output": "run_root", "open-mode": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Directive:
    """One #SBATCH line and who asked for it."""

    option: str  # --nodes=4
    key: str | None  # of the spec, dotted; None: always given
    origin: str  # file:line, command line, default; always


@dataclass(frozen=True, slots=True)
class RanksOfNode:
    """One row of the table of ranks."""

    node: int  # from 0, in the order of the allocation
    first_rank: int
    last_rank: int
    gpus: int
    cpus: int | None  # None: Slurm's default


@dataclass(frozen=True, slots=True)
class DryRun:
    """All that is known of a run before it is submitted."""

    directives: tuple[Directive, ...]
    ranks: tuple[RanksOfNode, ...]
    min_nodes: int
    sizes: Sizes
    time_limit_s: int | None
    slurm: slurm.Forecast | None  # None: not asked, or no answer
    unanswered: str  # why Slurm said nothing

    @property
    def is_refused(self) -> bool:
        """Whether Slurm would not take the job."""
        return self.slurm is not None and self.slurm.start is None


def dry_run(sourced: SourcedSpec, plan: LaunchPlan, script: str, environ: Mapping[str, str]) -> DryRun:
    """Gather everything; on the Slurm route sbatch is asked too."""
    answer, unanswered = None, ""
    if plan.cluster == "slurm":
        try:
            answer = slurm.forecast(script, environ)
        except slurm.SlurmError as error:
            unanswered = str(error)
    spec = sourced.spec
    return DryRun(
        tuple(directives(script, sourced)),
        tuple(ranks_table(plan, spec.num_gpus_per_node)),
        spec.min_nodes,
        sizes_of(spec),
        plan.time_limit_s,
        answer,
        unanswered,
    )


def directives(script: str, sourced: SourcedSpec) -> Iterator[Directive]:
    """The #SBATCH lines of a script, in its order, each with its key and where that stands."""
    for line in script.splitlines():
        if not line.startswith("#SBATCH "):
            continue
        option = line.removeprefix("#SBATCH ")
        name = re.sub("=.*", "", option.removeprefix("--"))
        key = ("sbatch", name) if name in sourced.spec.sbatch else key_of(name)
        yield Directive(option, ".".join(key) or None, sourced.origin(key) if key else "always")


def key_of(option: str) -> tuple[str, ...]:
    """The key that writes an option of sbatch; empty where none does."""
    key = KEY_OF_OPTION[option] if option in KEY_OF_OPTION else KEY_OF_FLAG[option]
    return tuple(key.split(".")) if key else ()


def ranks_table(plan: LaunchPlan, num_gpus: int) -> Iterator[RanksOfNode]:
    """Which ranks run on which node; ranks follow the nodes, as srun places them."""
    per_node = plan.num_tasks_per_node
    cpus = None if plan.cpus_per_task is None else plan.cpus_per_task * per_node
    for node in range(plan.num_nodes):
        yield RanksOfNode(node, node * per_node, (node + 1) * per_node - 1, num_gpus, cpus)


def report(found: DryRun, sourced: SourcedSpec) -> Iterator[str]:
    """The lines for a reader."""
    lengths = [len(directive.option) for directive in found.directives]
    width = max((length for length in lengths if length <= MAX_ALIGNED), default=0)
    for directive in found.directives:
        source = ", ".join(part for part in (directive.key, directive.origin) if part)
        yield f"#SBATCH {directive.option:{width}}  # {source}"
    yield from ranks_lines(found)
    yield from size_lines(found, sourced)
    if found.slurm is not None:
        yield f"Slurm       {slurm_line(found.slurm)}"
    elif found.unanswered:
        yield f"Slurm       not asked: {found.unanswered}"


def ranks_lines(found: DryRun) -> Iterator[str]:
    """The table of ranks, its middle left out when it is long."""
    world_size = found.ranks[-1].last_rank + 1
    fewer = f" (or fewer: it goes on with {found.min_nodes})" if found.min_nodes < len(found.ranks) else ""
    yield f"ranks       {world_size} on {counted(len(found.ranks), 'node')}{fewer}"
    rows = list(found.ranks)
    is_long = len(rows) > MAX_NODES_SHOWN
    for row in [*rows[: MAX_NODES_SHOWN - 2], rows[-1]] if is_long else rows:
        if is_long and row is rows[-1]:
            yield "            ..."
        yield f"            {row_text(row)}"


def row_text(row: RanksOfNode) -> str:
    """`node 0: ranks 0-1, 2 GPUs, 8 CPUs`; what Slurm is not asked for is left out."""
    is_one = row.first_rank == row.last_rank
    parts = [f"node {row.node}: {f'rank {row.first_rank}' if is_one else f'ranks {row.first_rank}-{row.last_rank}'}"]
    parts += [counted(row.gpus, "GPU")] if row.gpus else []
    parts += [counted(row.cpus, "CPU")] if row.cpus is not None else []
    return ", ".join(parts)


def size_lines(found: DryRun, sourced: SourcedSpec) -> Iterator[str]:
    """Batch, length, checkpoints."""
    sizes, train = found.sizes, sourced.spec.train
    key = "global_batch_size" if train.global_batch_size is not None else "batch_size_per_rank"
    yield f"batch       {sizes.global_batch_size} images a step over all ranks  # train.{key}, {origin(sourced, key)}"
    if sizes.steps_per_epoch is None:
        yield "length      not known before the data set is staged: python -m jobs.stage SPEC"
    else:
        yield f"length      {sizes.steps_per_epoch} steps an epoch, {sizes.total_steps} steps in all"
    if sizes.checkpoint_bytes is not None:
        kept = sourced.spec.checkpoint.keep_last
        yield f"checkpoint  {sizes.checkpoint_bytes / 1e6:.1f} MB each; the newest {kept} and the best are kept"


def origin(sourced: SourcedSpec, key: str) -> str:
    """Where a key of the section train stands."""
    return sourced.origin(("train", key))


def slurm_line(answer: slurm.Forecast) -> str:
    """Slurm's verdict in one line."""
    if answer.start is None:
        return f"would refuse it: {answer.words}"
    return (
        answer.words if not answer.start else f"would start it at {answer.start} on {answer.nodes}, as things are now"
    )


def as_fields(found: DryRun) -> dict[str, Any]:
    """For --json."""
    return asdict(found) | {"slurm": None if found.slurm is None else asdict(found.slurm)}
