"""Rendezvous: rank -> [rendezvous] -> train.  All ranks of a run meet at one store, and at no other run's.

Rank 0 binds the first port of the list that is free, keeps the socket and serves the store on it, so a port that is
taken costs nothing.  The others walk the same list until a store shows them the run's token; a stranger behind a port,
silent or not, costs them seconds.  Numbers in comments were measured on torch 2.14.1, Linux.
"""

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv

TOKEN_KEY = "cluster/token"
PATIENCE_S = 2.0  # how long one port is waited for before the next one is tried
ANSWER_S = 20.0  # how long it may go on answering meanwhile: both ends look up names, 6 to 10 s where no DNS answers
RESOLVE_S = 10.0  # how long the master's name may be unknown: DNS hears a little late of a node that has just started
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between rounds
BACKLOG = 4096  # all ranks connect at once; the kernel cuts it to net.core.somaxconn

_SIOCGIFCONF = 0x8912  # netdevice(7): IPv4 addresses of all interfaces
_INTERFACE_REQUEST = struct.Struct("16s4x4s16x")  # struct ifreq, 64-bit Linux: label, family and port, address, padding
_OUTSIDE = "198.51.100.1"  # nobody's address, RFC 5737


class RendezvousError(ConnectionError):
    """The ranks cannot meet: no port could be bound, or no store with the run's token was found."""


class PortError(RendezvousError):
    """Rank 0 can bind none of its ports."""

    failure_kind = "port"


def connect(env: RankEnv, *, timeout_s: float, on_resolved: Callable[[], None] = lambda: None) -> Store:
    """Open the store of this run; on rank 0, serve it.  Ranks may call this in any order.

    on_resolved: called before the first connection, once no name has to be looked up any more.  Never called at the
    store of torchrun's agent, which torch finds by name.
    The caller goes on with init_process_group(store=..., rank=..., world_size=...).  The store's own calls wait up to
    timeout_s, too.

    Raises RendezvousError: rank 0 can bind no port; another rank found no store of this run within timeout_s.
    """
    if env.uses_agent_store:
        return _join_agents_store(env, timeout_s)
    if env.rank == 0:
        return _serve_store(env, timeout_s, on_resolved)
    return _find_store(env, timeout_s, on_resolved)


def gloo_interface(master_addr: str) -> str | None:
    """Name for GLOO_SOCKET_IFNAME: the interface whose address the kernel uses towards the master.

    Without it gloo takes the address that the host's own name has, which Debian's /etc/hosts makes 127.0.1.1.  The
    master's node may know its own name only so; there the interface of the default route is taken.
    None when it cannot be told.
    """
    try:
        source = _source_address(master_addr)
        if source.is_loopback and not _is_typed_loopback(master_addr):
            source = _source_address(_OUTSIDE)
        return dict(_interfaces()).get(source)
    except OSError:  # the name is unknown, or nothing routes there
        return None


def _join_agents_store(env: RankEnv, timeout_s: float) -> Store:
    """torchrun's agent serves the store, for rank 0 as well, and keeps it when it restarts its workers."""
    addr, port = env.master_addr, env.master_ports[0]
    try:
        store = TCPStore(addr, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        prefix = _name_this_start(env, store, timeout_s) if env.rank == 0 else _ask_for_name(env, store)
    except (RuntimeError, TimeoutError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousError(
            f"rank {env.rank} did not meet {env.world_size - 1} others at the store of torchrun's agent, "
            f"MASTER_ADDR={addr}, MASTER_PORT={port} ({_first_line(error)}): see in the log which rank did not start"
        ) from error
    return PrefixStore(prefix, store)


def _name_this_start(env: RankEnv, store: Store, timeout_s: float) -> str:
    """Rank 0's part of agreeing on a prefix, so that nobody reads a key that the workers before the restart left.

    TORCHELASTIC_RESTART_COUNT alone will not do: after a failure on one of two nodes the agent there counts 1 and the
    other one stays at 0.  A rank's question may be left over, too, so all are answered until each has thanked.
    """
    prefix = f"{env.token}.{secrets.token_hex(8)}"
    started_s = time.monotonic()
    while (num_joined := store.add(f"cluster/joined/{prefix}", 0)) < env.world_size - 1:
        if time.monotonic() > started_s + timeout_s:
            raise TimeoutError(f"only {num_joined} came within {timeout_s:g} s")
        for question in (f"cluster/question/{rank}" for rank in range(1, env.world_size)):
            if store.check([question]):
                store.set(f"cluster/answer/{store.get(question).decode()}", prefix)
        time.sleep(pause_s(time.monotonic() - started_s))
    return prefix


def _ask_for_name(env: RankEnv, store: Store) -> str:
    """The other ranks' part: a question that only a living rank 0 can answer."""
    question = secrets.token_hex(8)
    store.set(f"cluster/question/{env.rank}", question)
    prefix = store.get(f"cluster/answer/{question}").decode()
    store.add(f"cluster/joined/{prefix}", 1)
    return prefix


def _serve_store(env: RankEnv, timeout_s: float, on_resolved: Callable[[], None]) -> Store:
    """Rank 0's side: bind, serve, show the token."""
    listener = _bind_first_free(env)
    on_resolved()
    port: int = listener.getsockname()[1]
    # The store owns the descriptor from here on and closes it when it goes.  Its own client end takes the loopback
    # address, since a node need not know itself by the name that the other nodes use.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store.set(TOKEN_KEY, env.token)
    return store


def _bind_first_free(env: RankEnv) -> socket.socket:
    """A listening socket on all of this node's addresses."""
    family = _family_to_serve(env.master_addr)
    outcomes: dict[int, str] = {}
    for port in env.master_ports:
        try:
            # Sets SO_REUSEADDR: without it a port counts as taken for 60 s after its last run.  Two listeners still
            # exclude each other.
            return socket.create_server(
                ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            outcomes[port] = _reason(error)
    raise PortError(
        f"rank 0 can bind no port on {socket.gethostname()}: {_list(outcomes)}; see who holds them with `ss -ltnp`, "
        "and leave MASTER_PORT unset (ports are then drawn for each attempt) or set it to a free one"
    )


def _family_to_serve(master_addr: str) -> socket.AddressFamily:
    """IPv4 unless the master has IPv6 addresses only; that socket serves IPv4 as well.

    The store looks up the name of each client.  On an IPv4 socket /etc/hosts answers; on an IPv6 one the client is
    ::ffff:10.0.0.1, which is never in there, and a DNS without an answer costs 6 to 10 s.
    """
    try:
        families = {family for family, *_ in socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)}
    except OSError:  # the other nodes know the name, this one need not
        return socket.AF_INET
    return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET


class _Visit(threading.Thread):
    """One look at the store behind a port, for its token.

    A thread that may be left behind, because TCPStore honours its timeout only for connecting: it then waits for an
    answer to its ping, and a listener that accepts and says nothing held it for more than 120 s at timeout=2 s.
    """

    def __init__(self, addr: str, port: int, token: str) -> None:
        super().__init__(name=f"rendezvous-{port}", daemon=True)
        self.store: Store | None = None
        self.outcome = "accepts connections, but is silent"
        self._addr, self._port, self._token = addr, port, token
        self.start()

    def run(self) -> None:
        """Fill in store, or else outcome."""
        try:
            store = TCPStore(
                self._addr, self._port, is_master=False, timeout=timedelta(seconds=ANSWER_S), wait_for_workers=False
            )
            token = store.get(TOKEN_KEY).decode(errors="replace")
        except RuntimeError as error:  # torch's DistError: refused, reset, no store's answer, no such key
            self.outcome = _first_line(error)
            return
        if token == self._token:
            self.store = store
        else:
            self.outcome = f"the store of another run ({token!r})"


def _find_store(env: RankEnv, timeout_s: float, on_resolved: Callable[[], None]) -> Store:
    """The other ranks' side: around the list, and around again, until the token is seen."""
    search = _Search(env, on_resolved)
    started_s = time.monotonic()
    while True:
        store = search.walk(started_s + timeout_s)
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        limit_s = min(RESOLVE_S, timeout_s) if search.is_unknown_name else timeout_s
        remaining_s = started_s + limit_s - time.monotonic()
        if remaining_s <= 0:
            raise RendezvousError(
                f"rank {env.rank} on {socket.gethostname()} found no store of this run (token {env.token!r}) at "
                f"{env.master_addr} within {limit_s:g} s: {_list(search.outcomes)}; see in the log whether rank 0 "
                "started, check that this node reaches that address, or set MASTER_ADDR to one that all nodes reach"
            )
        time.sleep(min(pause_s(time.monotonic() - started_s), remaining_s))


def pause_s(waited_s: float) -> float:
    """Seconds until the next round: a tenth of the wait so far, which is then the most that a rank adds to it."""
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 10))


class _Search:
    """What is known of the ports of the list; `outcomes` says for each why it was not the run's store."""

    def __init__(self, env: RankEnv, on_resolved: Callable[[], None]) -> None:
        self.outcomes: dict[int, str] = {}
        self.is_unknown_name = False
        self._env = env
        self._on_resolved = on_resolved
        self._addrs: list[str] = []  # the master's, the family that rank 0 prefers to serve first
        self._visits: dict[int, _Visit] = {}

    def walk(self, deadline_s: float) -> Store | None:
        """Visit every port once; deadline_s: time.monotonic() to be back by."""
        if not self._addrs:
            self._resolve()
        for port in self._env.master_ports if self._addrs else ():
            store = self._look(port, deadline_s)
            if store is not None:
                return store
        return None

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self._env.master_addr, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            self.is_unknown_name = error.errno == socket.EAI_NONAME
            self.outcomes = dict.fromkeys(self._env.master_ports, str(error.strerror))
            return
        self.is_unknown_name = False
        self._addrs = [str(address[0]) for *_, address in sorted(found, key=_family)]
        self._on_resolved()

    def _look(self, port: int, deadline_s: float) -> Store | None:
        """Go on with the visit to a port, or start one; a silent port is waited for only the first time."""
        visit = self._visits.get(port)
        if visit is None:
            visit = self._maybe_visit(port, deadline_s)
            if visit is None:
                return None
            self._visits[port] = visit
            visit.join(_patience_s(deadline_s))
        self.outcomes[port] = visit.outcome
        if not visit.is_alive():
            del self._visits[port]
        return visit.store

    def _maybe_visit(self, port: int, deadline_s: float) -> _Visit | None:
        """Start a visit where anybody listens: TCPStore itself would try again until its timeout, and log each try."""
        for addr in self._addrs:
            try:
                socket.create_connection((addr, port), timeout=_patience_s(deadline_s)).close()
            except OSError as error:
                self.outcomes[port] = _reason(error)
            else:
                return _Visit(addr, port, self._env.token)
        return None


def _patience_s(deadline_s: float) -> float:
    return min(PATIENCE_S, max(0.01, deadline_s - time.monotonic()))


def _reason(error: OSError) -> str:
    """Without the addresses that the socket module adds."""
    return os.strerror(error.errno) if error.errno else str(error)


def _list(outcomes: dict[int, str]) -> str:
    return ", ".join(f"{port}: {outcome}" for port, outcome in outcomes.items())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _family(found: tuple[int, int, int, str, object]) -> int:
    """Sorts what getaddrinfo found: IPv4 (2) before IPv6 (10)."""
    return found[0]


def _source_address(host: str) -> _Address:
    """This node's own address on the way to a host; connecting a UDP socket sends nothing."""
    family, _, _, _, address = min(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM), key=_family)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return ipaddress.ip_address(probe.getsockname()[0].split("%")[0])


def _is_typed_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _interfaces() -> Iterator[tuple[_Address, str]]:
    """Every address of this node and the interface it belongs to."""
    buffer = array("B", bytes(256 * _INTERFACE_REQUEST.size))
    address, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(buffer), address))
    num_bytes, _ = struct.unpack("iP", filled)
    for label, ipv4 in _INTERFACE_REQUEST.iter_unpack(buffer[:num_bytes]):
        yield ipaddress.IPv4Address(ipv4), label.rstrip(b"\0").decode().split(":")[0]  # eth0:1 is a label of eth0
    known_ipv6 = Path("/proc/net/if_inet6")
    for line in known_ipv6.read_text().splitlines() if known_ipv6.exists() else ():
        yield ipaddress.IPv6Address(bytes.fromhex(line.split()[0])), line.split()[-1]
