"""Master address: the nodes of a job -> [address] -> an address of the first node that every node can reach.

Standard library and scontrol.  A distribution may map a host's own name to 127.0.1.1 (Debian's /etc/hosts does), and
then a name that resolves is still useless to the other nodes.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from cluster.runs import UsageError
from cluster.slurm import node_addresses


class AddressError(UsageError):
    """No address of the first node is known that all nodes can reach."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        """may_pass: a name server did not answer, and may do so later."""
        super().__init__(message)
        self.may_pass = may_pass


def master_address(nodes: Sequence[str], environ: Mapping[str, str]) -> str:
    """Address of nodes[0] for all nodes: its name, or the NodeAddr that Slurm uses where the name will not do.

    A loopback address is taken only when every node has one, which means that all are on one machine.

    Raises AddressError: neither name nor NodeAddr of the first node can be reached from the others.
    Raises SlurmError: scontrol did not answer.
    """
    first = nodes[0]
    if reachable(first, nodes):
        return first
    known = node_addresses(nodes, environ)
    if reachable(known[first], list(known.values())):
        return known[first]
    raise AddressError(
        f"node {first}: neither its name (resolves to {maybe_ip(first)}) nor its NodeAddr {known[first]} is an address "
        "that the other nodes can reach; set env: MASTER_ADDR in the spec",
        may_pass=is_unsure(first) or is_unsure(known[first]),
    )


def reachable(host: str, hosts: Sequence[str]) -> bool:
    """Whether `host` resolves to an address that all of `hosts` can use."""
    ip = maybe_ip(host)
    return ip is not None and (not is_loopback(ip) or all(is_loopback(maybe_ip(other)) for other in hosts))


def maybe_ip(host: str) -> str | None:
    """The first address of a host as text, or None when it does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def is_unsure(host: str) -> bool:
    """Whether nobody can say now whether a host has an address: its name server is away or overloaded."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.errno == socket.EAI_AGAIN
    return False


def is_loopback(ip: str | None) -> bool:
    """Whether an address reaches only the machine it is used on."""
    return ip is not None and ipaddress.ip_address(ip.split("%")[0]).is_loopback
