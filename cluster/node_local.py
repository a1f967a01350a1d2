"""Node-local folders: paths that a submission names -> [node local] -> those that other nodes do not see.

A run folder in /tmp of the login node is not there for the job: it fails without even a log.  Standard library only.
Sources: hier(7), file-hierarchy(7), proc(5) on /proc/mounts.
"""

import re
import socket
from collections.abc import Sequence
from pathlib import Path

LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/run")
LOCAL_TYPES = frozenset(("tmpfs", "ramfs"))  # file systems in a node's memory
MOUNTS = Path("/proc/mounts")


def maybe_reason(path: Path, mounts: str) -> str | None:
    """Why other nodes do not see a path; None when nothing speaks against it.

    path: absolute; it need not exist.  mounts: the text of /proc/mounts.
    """
    real = path.resolve()
    folder = next((folder for folder in LOCAL_FOLDERS if real.is_relative_to(folder)), None)
    if folder is not None:
        return f"each node has its own {folder}"
    mount, kind = mount_of(real, mounts)
    return f"{mount} is in this machine's memory ({kind})" if kind in LOCAL_TYPES else None


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Where the file system of a path is mounted, and its type; a later line hides an earlier one."""
    found = ("/", "")
    for line in mounts.splitlines():
        _, mount, kind, *_ = line.split()
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount)  # a space is \040
        if path.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = (mount, kind)
    return found


def are_all_here(addresses: Sequence[str]) -> bool:
    """Whether all nodes are this very machine, so that it has no folders that they do not see.

    addresses: host names or IP addresses of the nodes, as slurm.conf gives them.
    """
    return bool(addresses) and all(map(is_own, addresses))


def is_own(host: str) -> bool:
    """Whether an address belongs to this machine: only such a one can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.bind(address)
    except OSError:
        return False
    return True
