"""Accounts, QOS and their limits: job spec, site -> [fit_accounts] -> fit.  Pure.

Where Slurm does not enforce associations, QOS or limits, a name that it does not know is accepted, and so it is here.
Sources: sacctmgr(1); resource_limits.html, "Hierarchy"; Slurm 22.05.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.fit_nodes import cpu_key, cpus_per_node, gpu_type, memory_key, memory_per_node_mib
from cluster.fit_words import Problem, counted, given, near, some
from cluster.site import Site
from cluster.site_answers import Association, Limits, Partition, Qos
from cluster.spec import JobSpec
from cluster.spec_units import slurm_time


@dataclass(frozen=True, slots=True)
class Source:
    """Who sets a limit."""

    key: str  # of the spec, to change it
    words: str  # "QOS high"


@dataclass(frozen=True, slots=True)
class Charge:
    """Whom a job is charged to, under which limits: those of the first source that has one count."""

    account: str | None = None  # None: not known
    qos: str | None = None
    qos_flags: frozenset[str] = frozenset()
    sources: tuple[tuple[Source, Limits], ...] = ()

    def lifts(self, flag: str) -> bool:
        """Whether the job's QOS puts its own limit in place of the partition's: PartitionTimeLimit and its like."""
        return flag in self.qos_flags


def charge_of(spec: JobSpec, site: Site) -> Charge:
    """Account and QOS of a job, given or by default, and their limits in Slurm's order but for a partition's QOS."""
    association = maybe_association(spec, site)
    account = spec.account or (association.account if association else None)
    name = spec.qos or (association.default_qos if association else None)
    qos = maybe_qos(name, site)
    sources = []
    if site.enforces("limits"):
        if qos is not None:
            sources.append((Source("qos", f"QOS {qos.name}"), qos.limits))
        if association is not None:
            sources.append((Source("account", f"account {association.account}"), association.limits))
    return Charge(account, name, qos.flags if qos else frozenset(), tuple(sources))


def maybe_association(spec: JobSpec, site: Site) -> Association | None:
    """The user's association that the job falls under; None when it is not known or there is none."""
    default = (partition.name for partition in site.partitions or () if partition.is_default)
    partitions = spec.partition.split(",") if spec.partition else list(default)
    fit = [
        association
        for association in site.associations or ()
        if _same(association.account, spec.account) or (spec.account is None and association.is_default)
    ]
    exact = [association for association in fit if association.partition in partitions]
    general = [association for association in fit if association.partition is None]
    return next(iter(exact + general), None)


def maybe_qos(name: str | None, site: Site) -> Qos | None:
    """What is known of a QOS."""
    return next((qos for qos in site.qos or () if _same(qos.name, name)), None)


def account_problems(spec: JobSpec, site: Site) -> Iterator[Problem]:
    """Whether the user may charge the account, and use the QOS with it."""
    if site.associations is not None and site.enforces("associations"):
        yield from _association_problems(spec, site, site.associations)
    if spec.qos is None or site.qos is None or not site.enforces("qos"):
        return
    if maybe_qos(spec.qos, site) is None:
        yield Problem("qos", f"{spec.qos!r} is no QOS of this cluster{near(spec.qos, [qos.name for qos in site.qos])}")
        return
    association = maybe_association(spec, site)
    if association is not None and association.qos and not any(_same(name, spec.qos) for name in association.qos):
        allowed = some(association.qos)
        yield Problem("qos", f"account {association.account} may not use {spec.qos}; it may use {allowed}")


def _association_problems(spec: JobSpec, site: Site, mine: tuple[Association, ...]) -> Iterator[Problem]:
    accounts = sorted({association.account for association in mine})
    if not mine:
        yield Problem("account", f"user {site.user} has no account on this cluster, which wants one; ask its staff")
    elif spec.account is not None and not any(_same(account, spec.account) for account in accounts):
        if any(_same(account, spec.account) for account in site.accounts or ()):
            words = f"user {site.user} may not charge account {spec.account}; use {some(accounts)}"
        else:
            words = f"{spec.account!r} is no account of this cluster{near(spec.account, accounts)}"
        yield Problem("account", words)
    elif maybe_association(spec, site) is None:
        own = [found for found in mine if _same(found.account, spec.account) or (not spec.account and found.is_default)]
        if own:  # each good for one partition, and not for this one
            where = f"partition {spec.partition}" if spec.partition else "the default partition"
            words = f"{own[0].account} is not for {where}; it is for {some(found.partition or '' for found in own)}"
            yield Problem(given(spec, "account", "partition"), words)


def limit_problems(spec: JobSpec, partition: Partition, site: Site, charge: Charge) -> Iterator[Problem]:
    """Limits of QOS and account that the job is over by itself, whatever else runs."""
    if not site.enforces("limits"):
        return
    sources = charge.sources
    if (own := maybe_qos(partition.qos, site)) is not None:  # the partition's QOS counts before the job's
        first = ((Source("partition", f"QOS {own.name} of partition {partition.name}"), own.limits),)
        sources = sources + first if charge.lifts("OverPartQOS") else first + sources
    yield from _wall_problems(spec, sources)
    yield from _tres_problems(spec, sources)


def _wall_problems(spec: JobSpec, sources: tuple[tuple[Source, Limits], ...]) -> Iterator[Problem]:
    for source, limits in sources:
        if limits.max_wall_s is not None:
            wanted = -(-(spec.time_limit_s or 0) // 60) * 60  # Slurm rounds up to minutes
            if wanted > limits.max_wall_s:
                limit = slurm_time(limits.max_wall_s)
                words = f"{spec.time_limit} is over the limit of {source.words}, MaxWall={limit}"
                yield Problem("time_limit", f"{words}; use at most that, or another {source.key}")
            return


def _tres_problems(spec: JobSpec, sources: tuple[tuple[Source, Limits], ...]) -> Iterator[Problem]:
    node, job, keys = _asked_on_a_node(spec), _asked_in_all(spec), _keys_of(spec)
    for word, field, asked in (
        ("MaxTRES", "max_tres", job),
        ("MaxTRESPerNode", "max_tres_per_node", node),
        ("MaxTRESPerUser", "max_tres_per_user", job),
        ("GrpTRES", "grp_tres", job),
    ):
        for name, amount in asked.items():
            found = _maybe_limit(sources, field, name)
            if found is not None and amount > found[1]:
                over = f"{_amount(name, amount)} in {'a node' if asked is node else 'all'} are over the limit of"
                limit = f"{found[1]}M" if name == "mem" else str(found[1])
                advice = f"ask for at most that, or use another {found[0].key}"
                yield Problem(keys[name], f"{over} {found[0].words}, {word} {name}={limit}; {advice}")
    least = _maybe_limit(sources, "min_tres", "node")
    if least is not None and spec.max_nodes < least[1]:
        words = f"{spec.nodes} is under the limit of {least[0].words}, MinTRES node={least[1]}"
        yield Problem("nodes", f"{words}; use {least[1]}")


def _maybe_limit(sources: tuple[tuple[Source, Limits], ...], field: str, name: str) -> tuple[Source, int] | None:
    """The limit that counts, the first one's, and who sets it."""
    found = ((source, getattr(limits, field).get(name)) for source, limits in sources)
    return next(((source, limit) for source, limit in found if limit is not None), None)


def _asked_on_a_node(spec: JobSpec) -> dict[str, int]:
    """Slurm's TRES on one node."""
    asked = {"cpu": cpus_per_node(spec)}
    if (memory := memory_per_node_mib(spec)) is not None:
        asked["mem"] = memory
    if spec.gpus_per_node:
        asked["gres/gpu"] = spec.num_gpus_per_node
        if (kind := gpu_type(spec)) is not None:
            asked[f"gres/gpu:{kind}"] = spec.num_gpus_per_node
    return asked


def _asked_in_all(spec: JobSpec) -> dict[str, int]:
    """TRES of the whole job on the fewest nodes."""
    nodes = spec.min_nodes
    return {"node": nodes} | {name: amount * nodes for name, amount in _asked_on_a_node(spec).items()}


def _keys_of(spec: JobSpec) -> Mapping[str, str]:
    """The key that asks for each."""
    keys = {"node": "nodes", "cpu": cpu_key(spec)}
    if memory_per_node_mib(spec) is not None:
        keys["mem"] = memory_key(spec)
    return keys | {name: "gpus_per_node" for name in _asked_on_a_node(spec) if name.startswith("gres/")}


def _amount(name: str, amount: int) -> str:
    if name == "mem":
        return f"{amount} MiB"
    kind = name.removeprefix("gres/gpu").removeprefix(":")
    return counted(amount, {"node": "node", "cpu": "CPU"}.get(name, f"{kind} GPU".lstrip()))


def _same(one: str | None, other: str | None) -> bool:
    """Slurm takes names of accounts and QOS in any case."""
    return one is not None and other is not None and one.lower() == other.lower()
