"""Slurm's answers about a cluster: text -> [site_answers] -> site.  Standard library only.

A value that is missing, or has a form that is not known here, is read as "no limit": a limit that was misread would
refuse jobs that run.
Sources: scontrol(1), sacctmgr(1); recorded on 22.05.8 and 24.11.5.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cluster.slurm import maybe_seconds

# A word and "=" after white space; a value may hold spaces, as in OS=Linux 6.1 #1 SMP.
FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/()]*)=")
GRES = re.compile(r"(?P<name>[^:(]+)(?::(?P<type>[^:(]+))??(?::no_consume)?(?::(?P<count>\d+[KMGT]?))?(?:\(.*)?")
NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE", "None")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
ABSENT = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "INVAL", "INVALID_REG", "NOT_RESPONDING")
)

ASSOCIATION_FORMAT = (
    "format=cluster,account,partition,qos,defaultqos,defaultaccount,maxwall,maxtres,maxtrespernode,grptres,"
    "maxjobs,maxsubmitjobs"
)
QOS_FORMAT = "format=name,flags,maxwall,maxtres,maxtrespernode,grptres,mintres,maxtrespu,maxjobspu,maxsubmitpu"


@dataclass(frozen=True, slots=True)
class Partition:
    """One of Slurm's queues."""

    name: str
    state: str = "UP"  # UP, DOWN, DRAIN or INACTIVE
    is_default: bool = False
    num_nodes: int = 0
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node_mib: int | None = None
    has_default_memory: bool = False  # of its own, for jobs that name no amount
    allow_groups: tuple[str, ...] | None = None  # None: all
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    qos: str | None = None  # whose limits hold for all of its jobs
    needs_reservation: bool = False
    is_root_only: bool = False
    refuses_root: bool = False


@dataclass(frozen=True, slots=True)
class Gres:
    """Some of a node's generic resources."""

    name: str  # gpu
    type: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    partitions: tuple[str, ...]
    host: str = ""  # where it differs from the name, Slurm may take it in its place
    cpus: int = 0
    memory_mib: int = 0  # for jobs
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()  # IDLE, DRAIN, ...
    address: str = ""  # name or IP address by which Slurm reaches it

    @property
    def is_absent(self) -> bool:
        """Whether it takes no job at present."""
        return bool(self.states & ABSENT)

    def count_gres(self, name: str, maybe_type: str | None) -> int:
        """How many it has of a generic resource; types are told apart only if one is asked for."""
        return sum(
            gres.count
            for gres in self.gres
            if gres.name == name and (maybe_type is None or (gres.type or "").lower() == maybe_type.lower())
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes kept for some."""

    name: str
    num_nodes: int
    users: tuple[str, ...]  # empty: not by user
    is_flexible: bool  # its jobs may also use other nodes


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one job, or of all jobs of a QOS or an account together (grp), in TRES: cpu, mem (MiB), node, gres/gpu."""

    max_wall_s: int | None = None
    max_tres: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_node: Mapping[str, int] = field(default_factory=dict)
    grp_tres: Mapping[str, int] = field(default_factory=dict)
    min_tres: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_user: Mapping[str, int] = field(default_factory=dict)
    max_jobs: int | None = None  # of a user at once
    max_submitted: int | None = None  # waiting or running


@dataclass(frozen=True, slots=True)
class Association:
    """An account that the user may charge."""

    account: str
    partition: str | None = None  # the only one it is good for
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    is_default: bool = False
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service."""

    name: str
    flags: frozenset[str] = frozenset()
    limits: Limits = Limits()


def partitions(text: str) -> tuple[Partition, ...]:
    """What `scontrol --oneliner show partition` tells."""
    return tuple(_partition(facts) for facts in _records(text, "PartitionName"))


def nodes(text: str) -> tuple[Node, ...]:
    """What `scontrol --oneliner show node` tells."""
    return tuple(_node(facts) for facts in _records(text, "NodeName"))


def reservations(text: str) -> tuple[Reservation, ...]:
    """What `scontrol --oneliner show reservation` tells; none where it says that there are none."""
    return tuple(
        Reservation(
            name=facts["ReservationName"],
            num_nodes=_number(facts.get("NodeCnt")) or 0,
            # With an account or a group that lets more users in, or "-name", the list is not the whole truth.
            users=()
            if _words(facts.get("Accounts")) or _words(facts.get("Groups")) or "-" in facts.get("Users", "")
            else _words(facts.get("Users")),
            is_flexible="FLEX" in _words(facts.get("Flags")),
        )
        for facts in _records(text, "ReservationName")
    )


def config(text: str) -> dict[str, str]:
    """What `scontrol show config` tells."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def associations(text: str, cluster: str) -> tuple[Association, ...]:
    """What sacctmgr tells of a user in ASSOCIATION_FORMAT, for one cluster."""
    found = []
    for line in text.splitlines():
        row = dict(zip(ASSOCIATION_FORMAT.removeprefix("format=").split(","), line.split("|"), strict=False))
        if row.get("cluster") == cluster:
            account = row.get("account", "")
            found.append(
                Association(
                    account=account,
                    partition=row.get("partition") or None,
                    qos=_words(row.get("qos")),
                    default_qos=row.get("defaultqos") or None,
                    is_default=account == row.get("defaultaccount"),
                    limits=_limits(row, jobs="maxjobs", submitted="maxsubmitjobs"),
                )
            )
    return tuple(found)


def qos(text: str) -> tuple[Qos, ...]:
    """What sacctmgr tells in QOS_FORMAT."""
    rows = (
        dict(zip(QOS_FORMAT.removeprefix("format=").split(","), line.split("|"), strict=False))
        for line in text.splitlines()
    )
    return tuple(
        Qos(row["name"], frozenset(_words(row.get("flags"))), _limits(row, jobs="maxjobspu", submitted="maxsubmitpu"))
        for row in rows
    )


def has_default_memory(facts: Mapping[str, str]) -> bool:
    """Whether a partition or the configuration says how much memory a job gets that names no amount."""
    amounts = (facts.get("DefMemPerNode"), facts.get("DefMemPerCPU"), facts.get("DefMemPerGPU"))
    return any(_number(amount) for amount in amounts) or "DefMemPer" in facts.get("JobDefaults", "")


def gres_list(text: str) -> tuple[Gres, ...]:
    """`gpu:a100:4(S:0-1),nvme:1` of a node or a request; a part without a number is one."""
    outside = re.sub(r"\([^)]*\)", "", text)
    found = (GRES.fullmatch(part.strip()) for part in outside.split(",") if part.strip() not in NOTHING)
    return tuple(
        Gres(match["name"].removeprefix("gres/"), match["type"], _size(match["count"] or "1"))
        for match in found
        if match is not None
    )


def tres(text: str | None) -> dict[str, int]:
    """`cpu=8,mem=100G,gres/gpu=4` -> numbers; memory in MiB."""
    pairs = (part.split("=", 1) for part in _words(text) if "=" in part)
    return {
        name: _size(amount if amount[-1:].isalpha() else f"{amount}M") >> 20 if name == "mem" else _size(amount)
        for name, amount in pairs
        if re.fullmatch(r"\d+[KMGTP]?", amount)
    }


def _records(text: str, first: str) -> Iterator[dict[str, str]]:
    """Each line that begins with a record's first key, as its keys and values.

    Of a key that stands there twice the first counts: the later one is part of somebody's free text.
    """
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            _, *parts = FIELD.split(line)
            facts: dict[str, str] = {}
            for name, value in zip(parts[::2], parts[1::2], strict=True):
                facts.setdefault(name, value.strip())
            yield facts


def _partition(facts: Mapping[str, str]) -> Partition:
    return Partition(
        name=facts["PartitionName"],
        state=facts.get("State", "UP"),
        is_default=facts.get("Default") == "YES",
        num_nodes=_number(facts.get("TotalNodes")) or 0,
        min_nodes=_number(facts.get("MinNodes")) or 0,
        max_nodes=_number(facts.get("MaxNodes")),
        max_time_s=maybe_seconds(facts.get("MaxTime", "")),
        max_cpus_per_node=_number(facts.get("MaxCPUsPerNode")),
        max_memory_per_node_mib=_number(facts.get("MaxMemPerNode")),
        has_default_memory=has_default_memory(facts),
        allow_groups=_maybe_listed(facts.get("AllowGroups")),
        allow_accounts=_maybe_listed(facts.get("AllowAccounts")),
        deny_accounts=_words(facts.get("DenyAccounts")),
        allow_qos=_maybe_listed(facts.get("AllowQos")),
        deny_qos=_words(facts.get("DenyQos")),
        qos=next(iter(_words(facts.get("QoS"))), None),
        needs_reservation=facts.get("ReqResv") == "YES",
        is_root_only=facts.get("RootOnly") == "YES",
        refuses_root=facts.get("DisableRootJobs") == "YES",
    )


def _node(facts: Mapping[str, str]) -> Node:
    memory = _number(facts.get("RealMemory")) or 0
    return Node(
        name=facts["NodeName"],
        partitions=_words(facts.get("Partitions")),
        host=facts.get("NodeHostName", ""),
        address=facts.get("NodeAddr", ""),
        cpus=_number(facts.get("CPUEfctv")) or _number(facts.get("CPUTot")) or 0,
        memory_mib=memory - (_number(facts.get("MemSpecLimit")) or 0),
        gres=gres_list(facts.get("Gres", "")),
        features=frozenset(_words(facts.get("AvailableFeatures"))),
        states=frozenset(re.split(r"[+*~#!%$@^-]+", facts.get("State", ""))) - {""},
    )


def _limits(row: Mapping[str, str], *, jobs: str, submitted: str) -> Limits:
    return Limits(
        max_wall_s=maybe_seconds(row.get("maxwall", "")),
        max_tres=tres(row.get("maxtres")),
        max_tres_per_node=tres(row.get("maxtrespernode")),
        grp_tres=tres(row.get("grptres")),
        min_tres=tres(row.get("mintres")),
        max_tres_per_user=tres(row.get("maxtrespu")),
        max_jobs=_number(row.get(jobs)),
        max_submitted=_number(row.get(submitted)),
    )


def _maybe_listed(text: str | None) -> tuple[str, ...] | None:
    """The names that are let in; None for all."""
    return None if text in (None, "ALL", "(null)", "") else _words(text)


def _words(text: str | None) -> tuple[str, ...]:
    return () if text is None or text in NOTHING else tuple(text.split(","))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def _size(text: str) -> int:
    return int(text.rstrip("KMGTP")) * UNITS[text.lstrip("0123456789")]
