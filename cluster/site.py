"""Site: Slurm's answers -> [site] -> fit.  What the cluster has and allows, as this user sees it.

Everything is asked at once, and nothing is waited for longer than the caller says.  What could not be learned is None
and named in `unanswered`: nothing is concluded from it.  Standard library only.
Sources: scontrol(1), sacctmgr(1), slurm.conf(5); forms of 22.05 and 24.11.
"""

import grp
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cluster import site_answers, slurm
from cluster.site_answers import Association, Node, Partition, Qos, Reservation

ANSWER_S = 5.0  # in all, for all questions

SCONTROL = {
    "partitions": ("scontrol", "--all", "--oneliner", "show", "partition"),
    "nodes": ("scontrol", "--all", "--oneliner", "show", "node"),
    "reservations": ("scontrol", "--all", "--oneliner", "show", "reservation"),
    "config": ("scontrol", "show", "config"),
}
SACCTMGR = {
    "associations": ("sacctmgr", "-nP", "show", "user", "{user}", "withassoc", site_answers.ASSOCIATION_FORMAT),
    "qos": ("sacctmgr", "-nP", "show", "qos", site_answers.QOS_FORMAT),
    "accounts": ("sacctmgr", "-nP", "show", "account", "format=account"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """What was learned of a cluster; None is what was not."""

    user: str
    is_root: bool
    groups: frozenset[str] | None = None  # of the user; learned only where a partition asks for some
    partitions: tuple[Partition, ...] | None = None
    nodes: tuple[Node, ...] | None = None
    reservations: tuple[Reservation, ...] | None = None
    config: Mapping[str, str] | None = None  # slurm.conf as slurmctld has it
    associations: tuple[Association, ...] | None = None  # the user's, on this cluster
    qos: tuple[Qos, ...] | None = None
    accounts: tuple[str, ...] | None = None  # all of them, be they the user's or not
    unanswered: tuple[str, ...] = ()  # the commands that gave no answer
    reasons: tuple[str, ...] = field(default=(), compare=False)  # theirs, in the same order

    def enforces(self, word: str) -> bool:
        """Whether Slurm refuses by accounting.  word: associations, limits or qos."""
        # Slurm shows what each word implies as well.
        return word in (self.config or {}).get("AccountingStorageEnforce", "").split(",")

    def nodes_of(self, partition: Partition) -> tuple[Node, ...] | None:
        """The partition's nodes; None where Slurm's two answers do not agree on their number."""
        if self.nodes is None:
            return None
        found = tuple(node for node in self.nodes if partition.name in node.partitions)
        return found if len(found) == partition.num_nodes else None


def look_up(environ: Mapping[str, str], *, timeout_s: float = ANSWER_S) -> Site:
    """Ask Slurm for partitions, nodes, reservations and configuration; for accounts and QOS where it has accounting.

    timeout_s: for all of it; what has not answered by then is None in the site.
    """
    user, asked = _user_name(), _Questions(environ, time.monotonic() + timeout_s)
    with ThreadPoolExecutor(len(SCONTROL) + len(SACCTMGR)) as pool:
        waiting = {name: pool.submit(asked.put, argv) for name, argv in SCONTROL.items()}
        config = _maybe_config(waiting["config"])
        if config is not None and config.get("AccountingStorageType") == "accounting_storage/slurmdbd":
            for name, argv in SACCTMGR.items():
                waiting[name] = pool.submit(asked.put, [word.format(user=user) for word in argv])
    answers, errors = {}, {}
    for name, future in waiting.items():
        if (error := future.exception()) is None:
            answers[name] = future.result()
        elif isinstance(error, slurm.SlurmError):
            errors[name] = error
        else:
            raise error
    return make_site(answers, errors, user=user, uid=os.geteuid())


def make_site(answers: Mapping[str, str], errors: Mapping[str, slurm.SlurmError], *, user: str, uid: int) -> Site:
    """The site that these answers tell of; their keys are those of SCONTROL and SACCTMGR."""
    config = site_answers.config(answers["config"]) if "config" in answers else None
    partitions = site_answers.partitions(answers["partitions"]) if "partitions" in answers else None
    cluster = (config or {}).get("ClusterName", "")
    return Site(
        user=user,
        is_root=uid == 0 or (config or {}).get("SlurmUser", "").startswith(f"{user}("),
        groups=_group_names() if any(part.allow_groups is not None for part in partitions or ()) else None,
        partitions=partitions,
        nodes=site_answers.nodes(answers["nodes"]) if "nodes" in answers else None,
        reservations=site_answers.reservations(answers["reservations"]) if "reservations" in answers else None,
        config=config,
        associations=(
            site_answers.associations(answers["associations"], cluster) if "associations" in answers else None
        ),
        qos=site_answers.qos(answers["qos"]) if "qos" in answers else None,
        accounts=tuple(answers["accounts"].split()) if "accounts" in answers else None,
        unanswered=tuple(_short((SCONTROL | SACCTMGR)[name]) for name in errors),
        reasons=tuple(str(error) for error in errors.values()),
    )


@dataclass(frozen=True, slots=True)
class _Questions:
    """Runs commands until a moment that all of them share."""

    environ: Mapping[str, str]
    deadline: float  # of time.monotonic()

    def put(self, argv: Sequence[str]) -> str:
        return slurm.run(argv, self.environ, timeout_s=max(self.deadline - time.monotonic(), 0.01))


def _short(argv: Sequence[str]) -> str:
    """A command without its options: scontrol show node."""
    return " ".join([word for word in argv if not word.startswith("-")][:3])


def _maybe_config(asked: "Future[str]") -> dict[str, str] | None:
    return None if asked.exception() else site_answers.config(asked.result())


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _group_names() -> frozenset[str]:
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            names.add(str(number))
    return frozenset(names)
