"""What a job asks of each node: job spec, partition, site -> [fit_nodes] -> fit.  Pure.

A spec fits when at least as many nodes as it needs have all that it asks for: CPUs, memory, GPUs and other generic
resources, features, and the right names.
Sources: sbatch(1), Slurm 22.05.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from cluster.allocation import AllocationError, expand_nodelist
from cluster.features import maybe_num_nodes, names_of
from cluster.fit_words import Problem, counted, given, near, some
from cluster.site import Site
from cluster.site_answers import Gres, Node, Partition, gres_list, has_default_memory
from cluster.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Demand:
    """One thing that each node must have."""

    key: str
    words: str  # what it is: "32 CPUs"
    met_by: Callable[[Node], bool]
    most: Callable[[Node], int]  # how much of it a node has
    unit: str


def node_problems(spec: JobSpec, partition: Partition, site: Site) -> Iterator[Problem]:
    """Why too few nodes of a partition are fit for the job."""
    yield from _per_node_limits(spec, partition, site)
    nodes = site.nodes_of(partition)
    if not nodes or site.nodes is None:
        return
    named = [*_name_problems(spec, partition, nodes, site.nodes)]
    unmet = [problem for demand in demands(spec, site) for problem in _unmet(spec, demand, partition, nodes)]
    unmet += _feature_problems(spec, partition, nodes, site.nodes)
    yield from (*named, *unmet)
    if not named and not unmet:
        yield from _together(spec, partition, nodes, site)


def node_warnings(spec: JobSpec, partition: Partition, site: Site) -> tuple[Problem, ...]:
    """Nodes that the job needs and that are down or drained at present."""
    nodes = _fit_nodes(spec, site.nodes_of(partition) or (), site)
    if not nodes:
        return ()
    absent = [node for node in nodes if node.is_absent]
    asked = set(_expanded(spec.nodelist) or ())
    if missing := [node for node in absent if node.name in asked]:
        return (Problem("nodelist", f"{_with_states(missing)} take no jobs at present: the job waits for them"),)
    present = _count(spec, [node for node in nodes if not node.is_absent])
    if present >= spec.min_nodes:
        return ()
    are = "is" if len(absent) == 1 else "are"
    words = f"{spec.nodes} asked for, and of {len(nodes)} that fit in partition {partition.name} {len(absent)} {are}"
    return (Problem("nodes", f"{words} down or drained: the job waits for {_with_states(absent)}"),)


def cpus_per_node(spec: JobSpec) -> int:
    """The fewest CPUs that the job takes on a node."""
    extra = spec.sbatch.get("mincpus")
    least = int(extra) if isinstance(extra, int) or (isinstance(extra, str) and extra.isdecimal()) else 0
    return max(spec.tasks_per_node * (spec.cpus_per_task or 1), least)


def memory_per_node_mib(spec: JobSpec) -> int | None:
    """MiB that the job takes on a node; None where the site's default counts."""
    if spec.memory_per_node_mib is not None:
        return spec.memory_per_node_mib
    if spec.memory_per_cpu_mib is not None:
        return spec.memory_per_cpu_mib * cpus_per_node(spec)
    return spec.memory_per_gpu_mib * spec.num_gpus_per_node if spec.memory_per_gpu_mib is not None else None


def cpu_key(spec: JobSpec) -> str:
    """The key to change when there are too few CPUs."""
    if "mincpus" in spec.sbatch and cpus_per_node(spec) > spec.tasks_per_node * (spec.cpus_per_task or 1):
        return "sbatch.mincpus"
    return given(spec, "cpus_per_task", "tasks_per_node", "gpus_per_node", "nodes")


def memory_key(spec: JobSpec) -> str:
    """The key that asks for memory."""
    return next(key for key in ("memory_per_node", "memory_per_cpu", "memory_per_gpu") if getattr(spec, key))


def gpu_type(spec: JobSpec) -> str | None:
    """a100 of a100:8."""
    return spec.gpus_per_node.rpartition(":")[0] or None if spec.gpus_per_node else None


def demands(spec: JobSpec, site: Site) -> Iterator[Demand]:
    """What each node must have, names and features apart."""
    cpus, memory = cpus_per_node(spec), memory_per_node_mib(spec)
    if spec.sbatch.keys().isdisjoint(("core-spec", "thread-spec")):  # these may free CPUs that are kept for the system
        yield Demand(cpu_key(spec), _cpu_words(spec), lambda node: node.cpus >= cpus, lambda node: node.cpus, "CPU")
    if memory is not None and (spec.memory_per_node or _counts_memory(site)):
        words = f"{memory} MiB of memory"
        yield Demand(memory_key(spec), words, lambda node: node.memory_mib >= memory, lambda n: n.memory_mib, "MiB")
    if spec.gpus_per_node:
        yield _gres_demand("gpus_per_node", Gres("gpu", gpu_type(spec), spec.num_gpus_per_node))
    asked = spec.sbatch.get("gres")
    for gres in gres_list(asked) if isinstance(asked, str) and asked.lower() != "none" else ():
        yield _gres_demand("sbatch.gres", gres)


def _gres_demand(key: str, gres: Gres) -> Demand:
    def count(node: Node) -> int:
        return node.count_gres(gres.name, gres.type)

    noun = " ".join(part for part in (gres.type, "GPU" if gres.name == "gpu" else gres.name) if part)
    return Demand(key, counted(gres.count, noun), lambda node: count(node) >= gres.count, count, noun)


def _cpu_words(spec: JobSpec) -> str:
    each = spec.cpus_per_task or 1
    total = counted(cpus_per_node(spec), "CPU")
    return f"{total} ({spec.tasks_per_node} ranks of {each})" if spec.tasks_per_node > 1 else total


def _counts_memory(site: Site) -> bool:
    """Whether Slurm holds memory per CPU or GPU against a node's; without CR_..._MEMORY it lets such jobs run."""
    return "MEMORY" in (site.config or {}).get("SelectTypeParameters", "").upper()


def _per_node_limits(spec: JobSpec, partition: Partition, site: Site) -> Iterator[Problem]:
    limit, cpus = partition.max_cpus_per_node, cpus_per_node(spec)
    if limit is not None and cpus > limit:
        words = f"{_cpu_words(spec)} on each node are over the limit of partition {partition.name}"
        yield Problem(cpu_key(spec), f"{words}, MaxCPUsPerNode={limit}; use at most that")
    memory, most = memory_per_node_mib(spec), partition.max_memory_per_node_mib
    if most is not None and memory is not None and memory > most:
        words = f"{memory} MiB on each node are over the limit of partition {partition.name}"
        yield Problem(memory_key(spec), f"{words}, MaxMemPerNode={most}; use at most that")
    has_default = partition.has_default_memory or site.config is None or has_default_memory(site.config)
    if most is not None and memory is None and not has_default:
        # Slurm then asks for all memory of a node, and lets the job wait as MaxMemPerLimit, on small nodes too.
        words = f"is needed: partition {partition.name} has MaxMemPerNode={most}, and this cluster no default"
        yield Problem("memory_per_node", f"{words}; use at most {most}M")


def _unmet(spec: JobSpec, demand: Demand, partition: Partition, nodes: Sequence[Node]) -> Iterator[Problem]:
    fit = sum(map(demand.met_by, nodes))
    if fit >= min(spec.min_nodes, len(nodes)):  # too few nodes whatever they have is another problem
        return
    if fit:
        have = f"has {counted(fit, 'such node')}, and nodes is {spec.nodes}"
    else:
        most = max(map(demand.most, nodes))
        have = f"has no such node; the most is {counted(most, demand.unit) if demand.unit != 'MiB' else f'{most} MiB'}"
        if demand.key == "gpus_per_node" and not any(map(demand.most, nodes)):
            have = f"has no such node; its GPUs are {_gpus_of(nodes)}"
    yield Problem(demand.key, f"each node must have {demand.words}; partition {partition.name} {have}")


def _gpus_of(nodes: Sequence[Node]) -> str:
    kinds = {f"{g.type}:{g.count}" if g.type else f"{g.count}" for node in nodes for g in node.gres if g.name == "gpu"}
    return some(kinds) if kinds else "none"


def _feature_problems(
    spec: JobSpec, partition: Partition, nodes: Sequence[Node], all_nodes: Sequence[Node]
) -> Iterator[Problem]:
    if spec.constraint is None:
        return
    known = {feature for node in all_nodes for feature in node.features}
    unknown = [name for name in names_of(spec.constraint) if name not in known]
    for name in unknown:
        yield Problem("constraint", f"{name!r} is a feature of no node{near(name, known)}")
    if not unknown:
        fit = maybe_num_nodes(spec.constraint, [node.features for node in nodes])
        if fit is not None and fit < min(spec.min_nodes, len(nodes)):
            words = f"{spec.constraint} holds for {counted(fit, 'node')} of partition {partition.name}"
            words = f"{words}, and nodes is {spec.nodes}"
            yield Problem("constraint", f"{words}; its features are {some(set().union(*(n.features for n in nodes)))}")


def _name_problems(
    spec: JobSpec, partition: Partition, nodes: Sequence[Node], all_nodes: Sequence[Node]
) -> Iterator[Problem]:
    """Nodes asked for or left out by name."""
    known = _names(all_nodes)
    wanted, left_out = _expanded(spec.nodelist), _expanded(spec.exclude)
    for key, names in (("nodelist", wanted), ("exclude", left_out)):
        for name in names or ():
            if name not in known:
                yield Problem(key, f"{name!r} is no node of this cluster{near(name, sorted(known))}")
    inside = _names(nodes)
    if outside := [name for name in wanted or () if name in known and name not in inside]:
        yield Problem("nodelist", f"{some(outside)} {_is_or_are(outside)} not in partition {partition.name}")
    if both := set(wanted or ()) & set(left_out or ()):
        yield Problem(given(spec, "exclude"), f"{some(both)} {_is_or_are(both)} also in nodelist; take it out of one")
    if wanted is not None and len(wanted) > spec.max_nodes:
        words = (
            f"{spec.nodelist} names {len(wanted)} nodes, which must all be part of the job, and nodes is {spec.nodes}"
        )
        yield Problem("nodelist", f"{words}; name fewer, or ask for {len(wanted)}")


def _together(spec: JobSpec, partition: Partition, nodes: Sequence[Node], site: Site) -> Iterator[Problem]:
    """Enough nodes have each thing; whether enough have all at once."""
    fit = _fit_nodes(spec, nodes, site)
    count = _count(spec, fit)
    if count >= min(spec.min_nodes, len(nodes)):
        return
    left = [demand.words for demand in demands(spec, site)]
    left += [f"the features {spec.constraint}"] if spec.constraint else []
    if spec.exclude and _count(spec, _fit_nodes(spec, nodes, site, ignore_exclude=True)) >= spec.min_nodes:
        words = f"{spec.exclude} leaves {counted(count, 'node')} of partition {partition.name} that fit"
        yield Problem("exclude", f"{words}, and nodes is {spec.nodes}; leave out fewer")
        return
    words = f"{spec.nodes} asked for, and {counted(count, 'node')} of partition {partition.name}"
    yield Problem("nodes", f"{words} with {', '.join(left)} at once; ask for less")


def _fit_nodes(spec: JobSpec, nodes: Sequence[Node], site: Site, *, ignore_exclude: bool = False) -> list[Node]:
    """Nodes that have everything but, perhaps, the features."""
    left_out = set() if ignore_exclude else set(_expanded(spec.exclude) or ())
    wanted = list(demands(spec, site))
    return [node for node in nodes if node.name not in left_out and all(demand.met_by(node) for demand in wanted)]


def _count(spec: JobSpec, nodes: Sequence[Node]) -> int:
    """How many of these nodes one job with the spec's constraint can have."""
    if spec.constraint is None:
        return len(nodes)
    fit = maybe_num_nodes(spec.constraint, [node.features for node in nodes])
    return len(nodes) if fit is None else fit


def _expanded(text: str | None) -> tuple[str, ...] | None:
    """Names in a host list; None without one, for a file of names, or in a form that only Slurm reads."""
    if text is None or "/" in text:
        return None
    try:
        return expand_nodelist(text)
    except AllocationError:
        return None


def _with_states(nodes: Sequence[Node]) -> str:
    return some(f"{node.name} ({'+'.join(sorted(node.states))})" for node in nodes)


def _names(nodes: Sequence[Node]) -> set[str]:
    """What nodes may be called: their names, and those of their hosts where no two share one."""
    hosts = [node.host for node in nodes]
    return {node.name for node in nodes} | {host for host in hosts if host and hosts.count(host) == 1}


def _is_or_are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
