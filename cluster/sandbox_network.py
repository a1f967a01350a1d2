"""Networks of isolated nodes: sandbox_directory -> [sandbox_network] -> sandbox_daemons, sandbox.

Standard library only.  Each node has a network and a host name of its own: a bridge on this machine, and from it a
cable (veth pair) into each node's network namespace, where its end is eth0.  The bridge's name, made exclusively,
claims the network number.  All links carry the sandbox's own group number, so what was made is found and removed even
after a killed start, and never another's.
Sources: ip-link(8), ip-netns(8), nsenter(1), unshare(1), iproute2 6.1, Linux 6.18.
"""

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.sandbox_directory import Sandbox, SandboxError

NETWORK_PROGRAMS = ("ip", "nsenter", "unshare")
NAMESPACES = Path("/var/run/netns")  # ip-netns(8)
NETWORKS = range(1, 256)
# In a namespace that goes away with this command.
PROBE = "ip link add name sb type bridge && ip link add name sb-1 master sb type veth peer name eth0"


class NetworkTakenError(Exception):
    """Another sandbox took the network number between its choice and its use."""


def maybe_obstacle(programs: Mapping[str, str]) -> str | None:
    """Why nodes cannot have networks of their own here, or None; programs: where NETWORK_PROGRAMS are."""
    if os.geteuid() != 0:
        return f"it needs root, and this is user {os.geteuid()}"
    probe = [programs["unshare"], "--net", "--uts", "sh", "-c", PROBE]
    environ = {"PATH": f"{Path(programs['ip']).parent}:{os.defpath}"}
    done = subprocess.run(probe, env=environ, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else " ".join(done.stderr.split())


def choose_network() -> int:
    """The first network number that no sandbox on this machine has now.  Raises SandboxError: all are taken."""
    taken = {name for _, name in socket.if_nameindex()}
    for number in NETWORKS:
        if f"sb{number}" not in taken:
            return number
    raise SandboxError(f"all {len(NETWORKS)} networks of isolated sandboxes are taken: see `ip link`; end some")


def add_network(sandbox: Sandbox) -> None:
    """Make the bridge and each node's namespace, cable and address.

    Raises NetworkTakenError: another sandbox has this number.  Raises SandboxError: ip failed; its words are shown.
    """
    bridge, group = f"sb{sandbox.network}", _group(sandbox)
    try:
        _ip(sandbox, f"link add name {bridge} group {group} type bridge")
    except SandboxError as error:
        if "File exists" in str(error):
            raise NetworkTakenError from None
        raise
    _ip(sandbox, f"address add {sandbox.controller_address}/24 dev {bridge}", f"link set {bridge} up")
    for node, address in sandbox.addresses.items():
        namespace, cable = _namespace(sandbox, node), _cable(sandbox, node)
        _ip(
            sandbox,
            f"netns add {namespace}",
            f"link add name {cable} group {group} master {bridge} type veth peer name eth0 netns {namespace}",
            f"link set {cable} up",
        )
        _ip(
            sandbox,
            "link set lo up",
            f"address add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {sandbox.controller_address}",
            namespace=namespace,
        )


def remove_network(sandbox: Sandbox) -> None:
    """Remove all that add_network made, as far as it came; nothing for nodes that share this machine's network.

    Raises SandboxError: ip failed; its words are shown.
    """
    if sandbox.network is None:
        return
    if _call(sandbox, "link", "show", "group", str(_group(sandbox))).stdout:
        _ip(sandbox, f"link delete group {_group(sandbox)}")
    for namespace in NAMESPACES.glob(f"{sandbox.cluster_name}-*"):
        _ip(sandbox, f"netns delete {namespace.name}")


def enter_node(sandbox: Sandbox, node: str) -> list[str]:
    """What to put before a command, to run it with a node's network and host name; nothing where nodes have none.

    Not `ip netns exec`: it mounts another /sys, and slurmd then finds no cgroups.
    """
    if sandbox.network is None:
        return []
    into = [sandbox.programs["nsenter"], f"--net={NAMESPACES / _namespace(sandbox, node)}"]
    named = [sandbox.programs["unshare"], "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node]
    return into + named


def cut(sandbox: Sandbox, node: str) -> None:
    """Pull a node's network cable: packets to and from it vanish, as when a switch port dies.

    Raises SandboxError: the sandbox is not isolated, has no such node, or ip failed.
    """
    _ip(sandbox, f"link set {_cable(sandbox, node)} down")


def mend(sandbox: Sandbox, node: str) -> None:
    """Put a node's cable back.  Raises SandboxError: as cut does."""
    _ip(sandbox, f"link set {_cable(sandbox, node)} up")


def cut_off(sandbox: Sandbox) -> tuple[str, ...]:
    """The nodes whose cables are pulled; none where nodes have no cables."""
    if sandbox.network is None:
        return ()
    up = _call(sandbox, "-oneline", "link", "show", "up", "group", str(_group(sandbox))).stdout
    return tuple(node for node in sandbox.nodes if f" {_cable(sandbox, node)}@" not in up)


def _group(sandbox: Sandbox) -> int:
    """Number on all links of this sandbox: its random part in 31 bits, and never 0, which all other links have."""
    return int(sandbox.cluster_name.rpartition("_")[2], 16) & 0x7FFFFFFF | 0x40000000


def _namespace(sandbox: Sandbox, node: str) -> str:
    return f"{sandbox.cluster_name}-{node}"


def _cable(sandbox: Sandbox, node: str) -> str:
    """This machine's end of a node's cable."""
    if sandbox.network is None:
        text = f"{sandbox.directory}: its nodes share this machine's network; cables are for sandboxes of up --isolate"
        raise SandboxError(text, exit_code=2)
    if node not in sandbox.nodes:
        raise SandboxError(f"{node}: no node of this sandbox; it has {' '.join(sandbox.nodes)}", exit_code=2)
    return f"sb{sandbox.network}-{sandbox.nodes.index(node) + 1}"


def _ip(sandbox: Sandbox, *lines: str, namespace: str | None = None) -> None:
    """Run lines of ip, each only if those before it succeeded."""
    place = [] if namespace is None else ["-netns", namespace]
    done = _call(sandbox, *place, "-batch", "-", text="\n".join(lines))
    if done.returncode != 0:
        raise SandboxError(f"ip failed: {' '.join(done.stderr.split())}; it was given: {'; '.join(lines)}")


def _call(sandbox: Sandbox, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sandbox.programs["ip"], *arguments]
    return subprocess.run(argv, input=text, env={"PATH": os.defpath}, capture_output=True, text=True, check=False)
