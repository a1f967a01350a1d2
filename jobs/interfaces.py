"""Network interfaces that a user named: [interfaces] checks them on every node, before ranks meet.

A name that one node lacks ends in an error about address families, or in a wait; here it is told by the node that lacks
it.  Sources: NCCL's "Environment Variables", NCCL_SOCKET_IFNAME; torch.distributed, "Common environment variables".
"""

import socket
from collections.abc import Collection, Mapping

from cluster.runs import UsageError

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


class InterfaceError(UsageError):
    """A network interface that this node does not have."""


def check_interfaces(backend: str, environ: Mapping[str, str], names: Collection[str] | None = None) -> None:
    """Compare the interfaces that a backend's variable names with those of this node.

    backend: nccl or gloo.  With nccl both variables count: ranks agree to stop over gloo.
    names: the node's interfaces; by default they are asked for.

    Raises InterfaceError: none of this node's serves.
    """
    there = sorted(name for _, name in socket.if_nameindex()) if names is None else sorted(names)
    if GLOO_VARIABLE in environ:
        missing = [name for name in environ[GLOO_VARIABLE].split(",") if name not in there]
        if missing:
            raise refusal(GLOO_VARIABLE, environ, f"{', '.join(missing)} is not there", there)
    if backend == "nccl" and NCCL_VARIABLE in environ and not nccl_choice(environ[NCCL_VARIABLE], there):
        raise refusal(NCCL_VARIABLE, environ, "it fits none (=name means exactly this one, ^name all others)", there)


def nccl_choice(value: str, names: Collection[str]) -> list[str]:
    """The interfaces that NCCL would take: names that begin so, or with `=` are so; with `^` all others."""
    is_excluding, is_exact = value.startswith("^"), value.removeprefix("^").startswith("=")
    wanted = value.lstrip("^=").split(",")
    # NCCL allows a port behind a name, eth0:3, which is no part of it.
    beginnings = tuple(name.partition(":")[0] for name in wanted)
    fitting = [name for name in names if (name in beginnings if is_exact else name.startswith(beginnings))]
    return [name for name in names if name not in fitting] if is_excluding else fitting


def refusal(variable: str, environ: Mapping[str, str], why: str, there: Collection[str]) -> InterfaceError:
    """The one line for the user."""
    return InterfaceError(
        f"{variable}={environ[variable]} on {socket.gethostname()}: {why}; its interfaces are {', '.join(there)}"
    )
