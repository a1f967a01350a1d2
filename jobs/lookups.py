"""Name look-ups: [lookups] -> rendezvous, session.  While the ranks meet, DNS is not asked for their names.

Both ends of a connection to torch's store look up the other's name, for a log message (socket.cpp, formatSockAddr).
Where no DNS answers for these addresses that costs 10 s, and the store serves nobody meanwhile; /etc/hosts is no help,
since the client's end asks for ::ffff:10.0.0.1.  With a nameserver that never answers, 4 ranks on 4 addresses had their
group after 10.8 s, with RES_OPTIONS=attempts:1 after 5.9 s, and after 0.12 s with this (torch 2.14.1, glibc 2.36).
RES_OPTIONS would moreover hold for all that the user's code looks up: glibc reads it once in a process.
Standard library only.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NSSWITCH = Path("/etc/nsswitch.conf")
GLIBC_DEFAULT = "dns [!UNAVAIL=return] files"  # nsswitch.conf(5), without a line for hosts


@contextmanager
def dns_silenced(nsswitch: Path = NSSWITCH) -> Iterator[Callable[[], None]]:
    """Yield a function that keeps host names of this process to /etc/hosts from its call until the block ends.

    Call it once all names that the block needs are known.  Other processes, children too, notice nothing.  Before glibc
    2.33 the first look-up of an address's name decides for all later ones in the process, so there they may stay with
    /etc/hosts (seen on 2.31); look-ups of a name's address do not.  Without glibc nothing happens.
    """
    with ExitStack() as afterwards:

        def silence() -> None:
            afterwards.callback(_look_up_hosts_in, line_for_hosts(nsswitch))
            _look_up_hosts_in("files")

        yield silence


def line_for_hosts(nsswitch: Path) -> str:
    """The services that nsswitch.conf names for hosts."""
    lines = nsswitch.read_text(errors="replace").splitlines() if nsswitch.exists() else []
    found = [line.partition("#")[0].partition(":") for line in lines]
    return next((services.strip() for database, _, services in found if database.strip() == "hosts"), GLIBC_DEFAULT)


def _look_up_hosts_in(services: str) -> None:
    """Set what nsswitch.conf says of hosts, for this process; nss.h, glibc 2.2 and later."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", services.encode())
