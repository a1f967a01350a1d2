"""Fit: job spec, site -> [fit] -> preflight.  Whether the cluster can ever run what a spec asks for.  Pure.

Without EnforcePartLimits Slurm takes jobs that no partition can run, and lets them wait for ever; here each of them
is a problem that names the limit.  Nodes that are down or drained come back, so they are only warned of.  What the
site did not tell is not judged.
Sources: sbatch(1), slurm.conf(5), resource_limits.html; pending reasons tried on 22.05.8.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.fit_accounts import Charge, account_problems, charge_of, limit_problems
from cluster.fit_nodes import node_problems, node_warnings
from cluster.fit_words import Problem, counted, near, some
from cluster.site import Site
from cluster.site_answers import Partition
from cluster.spec import JobSpec
from cluster.spec_units import slurm_time

__all__ = ["Problem", "Verdict", "judge", "problems"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a spec."""

    problems: tuple[Problem, ...] = ()  # the job would never run, or be refused
    warnings: tuple[Problem, ...] = ()  # it waits for something that is not there at present
    notes: tuple[Problem, ...] = ()  # limits that may hold it back


def problems(spec: JobSpec, site: Site) -> tuple[Problem, ...]:
    """Why the cluster can never run the job; nothing for one that it can."""
    return judge(spec, site).problems


def judge(spec: JobSpec, site: Site) -> Verdict:
    """Hold a spec against a site.  Only specs for Slurm are judged."""
    if spec.cluster != "slurm":
        return Verdict()
    charge = charge_of(spec, site)
    chosen, unknown = _choose_partitions(spec, site)
    names = [*unknown, *account_problems(spec, site)]
    found = [*_reservation_problems(spec, site)]
    warnings: list[Problem] = []
    # Behind a site's plug-in a job may get another partition, account or QOS than it asked for, by names of its own.
    (warnings if _has_plugin(site) else found).extend(names)
    each = [(partition, [*_partition_problems(spec, partition, site, charge)]) for partition in chosen]
    fitting = [partition for partition, misfits in each if not misfits]
    misfits = [problem for _, misfits in each for problem in misfits]
    warnings += [problem for partition in chosen for problem in _account_warnings(partition, charge)]
    must_fit_all = (site.config or {}).get("EnforcePartLimits") == "ALL"
    if fitting and not must_fit_all:
        warnings += misfits
    else:
        found += misfits
    if not found:
        warnings += _down_warnings(fitting)
        warnings += _waits(node_warnings(spec, partition, site) for partition in fitting)
    return Verdict(_once(found), _once(warnings), _once(_notes(charge)))


def _once(found: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(dict.fromkeys(found))


def _waits(warnings: Iterable[Sequence[Problem]]) -> Sequence[Problem]:
    """What each partition makes the job wait for; nothing if one of them does not."""
    each = list(warnings)
    return [problem for found in each for problem in found] if all(each) else []


def _down_warnings(partitions: Sequence[Partition]) -> list[Problem]:
    if any(partition.state != "DOWN" for partition in partitions):
        return []
    return [Problem("partition", f"{part.name} is DOWN: the job waits until it is up again") for part in partitions]


def _notes(charge: Charge) -> Iterator[Problem]:
    for source, limits in charge.sources:
        if limits.max_jobs is not None:
            yield Problem(source.key, f"{source.words} runs at most {limits.max_jobs} jobs of a user at once (MaxJobs)")
        if limits.max_submitted is not None:
            yield Problem(source.key, f"{source.words} takes at most {limits.max_submitted} jobs of a user (MaxSubmit)")


def _choose_partitions(spec: JobSpec, site: Site) -> tuple[list[Partition], list[Problem]]:
    """The partitions that the job may run in, and what is wrong with their names."""
    if site.partitions is None:
        return [], []
    by_name = {partition.name: partition for partition in site.partitions}
    if spec.partition is None:
        default = [partition for partition in site.partitions if partition.is_default]
        if default:
            return default, []
        return [], [Problem("partition", f"is needed: this cluster has no default; use {some(by_name)}")]
    names = spec.partition.split(",")
    unknown = [
        Problem("partition", f"{name!r} is no partition of this cluster{near(name, by_name)}")
        for name in names
        if name not in by_name
    ]
    return [by_name[name] for name in names if name in by_name], unknown


def _has_plugin(site: Site) -> bool:
    return (site.config or {}).get("JobSubmitPlugins", "(null)") not in ("(null)", "")


def _partition_problems(spec: JobSpec, partition: Partition, site: Site, charge: Charge) -> Iterator[Problem]:
    yield from _admission_problems(spec, partition, site, charge)
    yield from _time_problems(spec, partition, site, charge)
    yield from _count_problems(spec, partition, charge)
    yield from node_problems(spec, partition, site)
    yield from limit_problems(spec, partition, site, charge)


def _admission_problems(spec: JobSpec, partition: Partition, site: Site, charge: Charge) -> Iterator[Problem]:
    """Whether the partition takes jobs of this user, account and QOS at all."""
    name = partition.name
    if partition.state in ("DRAIN", "INACTIVE"):
        yield Problem(
            "partition", f"{name} is {partition.state}, and takes no jobs; use another, or wait until it is UP"
        )
    if partition.needs_reservation and spec.reservation is None:
        yield Problem("partition", f"{name} is for jobs with a reservation only; give the key reservation")
    if partition.is_root_only and not site.is_root:
        yield Problem("partition", f"{name} is for root only; use another")
    if partition.refuses_root and site.is_root:
        yield Problem("partition", f"{name} takes no jobs of root; submit as another user")
    allowed, groups = partition.allow_groups, site.groups
    if allowed is not None and groups is not None and not site.is_root and groups.isdisjoint(allowed):
        yield Problem("partition", f"{name} is for the groups {some(allowed)}, and {site.user} is in none of them")
    lists = (
        ("account", charge.account, partition.allow_accounts, partition.deny_accounts, "Accounts"),
        ("qos", charge.qos, partition.allow_qos, partition.deny_qos, "Qos"),
    )
    for key, maybe_value, allow, deny, word in lists:
        value = (maybe_value or "").lower()
        if not value:
            continue
        if key == "qos" and allow is not None and not _is_listed(value, allow):
            yield Problem(key, f"{maybe_value} may not use partition {name}, Allow{word}={','.join(allow)}")
        elif allow is None and _is_listed(value, deny):
            yield Problem(key, f"{maybe_value} may not use partition {name}, Deny{word}={','.join(deny)}")


def _account_warnings(partition: Partition, charge: Charge) -> Iterator[Problem]:
    """An account that a partition does not list; newer releases let in accounts below those listed."""
    allow = partition.allow_accounts
    if charge.account and allow is not None and not _is_listed(charge.account, allow):
        listed = f"AllowAccounts={','.join(allow)}"
        words = f"{charge.account} is not one of partition {partition.name}'s {listed}"
        yield Problem("account", f"{words}: the job may wait for ever, unless it is below one of them")


def _is_listed(name: str, names: Iterable[str]) -> bool:
    """Slurm takes names of accounts and QOS in any case."""
    return name.lower() in (item.lower() for item in names)


def _time_problems(spec: JobSpec, partition: Partition, site: Site, charge: Charge) -> Iterator[Problem]:
    limit, wanted = partition.max_time_s, spec.time_limit_s
    if limit is None or wanted is None or charge.lifts("PartitionTimeLimit"):
        return
    if whole_minutes(wanted) > limit:
        others = [part.name for part in site.partitions or () if _is_open_for(part, spec)]
        advice = f", or partition {' or '.join(others[:4])}" if others else ""
        yield Problem(
            "time_limit",
            f"{spec.time_limit} is over the limit of partition {partition.name}, MaxTime={slurm_time(limit)}; "
            f"use at most that{advice}",
        )


def _is_open_for(partition: Partition, spec: JobSpec) -> bool:
    """Whether a partition that lets everybody in has the nodes and the time."""
    is_open = partition.state == "UP" and not (partition.is_root_only or partition.needs_reservation)
    is_for_all = partition.allow_groups is partition.allow_accounts is partition.allow_qos is None
    has_nodes = spec.min_nodes <= partition.num_nodes and spec.max_nodes <= (partition.max_nodes or spec.max_nodes)
    limit = partition.max_time_s
    return is_open and is_for_all and has_nodes and (limit is None or whole_minutes(spec.time_limit_s or 0) <= limit)


def whole_minutes(seconds: int) -> int:
    """Seconds as Slurm takes them: rounded up to minutes."""
    return -(-seconds // 60) * 60


def _count_problems(spec: JobSpec, partition: Partition, charge: Charge) -> Iterator[Problem]:
    """Nodes asked for against the partition's own limits on their number."""
    name, limit = partition.name, partition.max_nodes
    if limit is not None and spec.max_nodes > limit and not charge.lifts("PartitionMaxNodes"):
        # Of 2-4 Slurm wants the 4 to be within the limit as well.
        use = f"{spec.min_nodes}-{limit}" if spec.min_nodes < limit and spec.min_nodes < spec.max_nodes else f"{limit}"
        yield Problem("nodes", f"{spec.nodes} is over the limit of partition {name}, MaxNodes={limit}; use {use}")
    elif partition.num_nodes and spec.min_nodes > partition.num_nodes:
        has = counted(partition.num_nodes, "node")
        yield Problem("nodes", f"{spec.nodes} is more than partition {name} has, {has}; use at most that")
    if spec.max_nodes < partition.min_nodes and not charge.lifts("PartitionMinNodes"):
        least = partition.min_nodes
        yield Problem("nodes", f"{spec.nodes} is under the limit of partition {name}, MinNodes={least}; use {least}")


def _reservation_problems(spec: JobSpec, site: Site) -> Iterator[Problem]:
    if spec.reservation is None or site.reservations is None:
        return
    by_name = {reservation.name: reservation for reservation in site.reservations}
    for name in spec.reservation.split(","):
        found = by_name.get(name)
        if found is None:
            yield Problem("reservation", f"{name!r} is no reservation that {site.user} may see{near(name, by_name)}")
        elif found.users and site.user not in found.users and not site.is_root:
            yield Problem(
                "reservation", f"{name} is for {some(found.users)}, not for {site.user}; use another, or none"
            )
        elif (
            found.num_nodes
            and spec.min_nodes > found.num_nodes
            and not found.is_flexible
            and "," not in spec.reservation
        ):
            yield Problem(
                "nodes", f"{spec.nodes} is more than reservation {name} has, {counted(found.num_nodes, 'node')}"
            )
