"""Node names of sandboxes in /etc/hosts: sandbox -> [sandbox_hosts].  Standard library only.

Marked lines, one for each address of a sandbox, so several sandboxes may share their names.  The file is locked and
changed in place: a rename would fail where /etc/hosts is a mount (containers) and would throw away the lock.  Source:
hosts(5).
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOSTS = Path("/etc/hosts")


def host_lines(directory: Path, addresses: Mapping[str, str]) -> str:
    """The lines that make the nodes of the sandbox in directory resolve; addresses: of each node."""
    names: dict[str, list[str]] = {}
    for node, address in addresses.items():
        names.setdefault(address, []).append(node)
    return "".join(f"{address} {' '.join(nodes)} {_mark(directory)}\n" for address, nodes in names.items())


def add_names(hosts: Path, directory: Path, addresses: Mapping[str, str]) -> None:
    """Append the sandbox's lines, after removing those that a sandbox in the same directory left behind.

    A last line without a newline gets one, which stays.  Raises OSError: hosts cannot be read or written.
    """
    remove_names(hosts, directory)
    with _locked(hosts) as file:
        size = os.fstat(file).st_size
        unfinished = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        # One write at the end: there is no moment at which another line is missing.
        os.pwrite(file, (b"\n" if unfinished else b"") + host_lines(directory, addresses).encode(), size)


def remove_names(hosts: Path, directory: Path) -> None:
    """Remove the sandbox's lines; all other bytes stay.  Raises OSError: hosts cannot be read or written."""
    mark = _mark(directory).encode()
    with _locked(hosts) as file:
        lines = os.pread(file, os.fstat(file).st_size, 0).splitlines(keepends=True)
        ours = [number for number, line in enumerate(lines) if line.rstrip(b"\n").endswith(mark)]
        if ours:
            kept = b"".join(lines[: ours[0]])
            rest = b"".join(line for number, line in enumerate(lines) if number > ours[0] and number not in ours)
            # The rest moves up in one write before the file is cut: a reader may see a line twice, but misses none.
            os.pwrite(file, rest, len(kept))
            os.ftruncate(file, len(kept) + len(rest))


def _mark(directory: Path) -> str:
    return f"# slurm-sandbox {directory}"


@contextmanager
def _locked(hosts: Path) -> Iterator[int]:
    """The file opened for changes, held alone among sandboxes."""
    while True:
        file = os.open(hosts, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # An editor that saves by renaming has put another file there while we waited.
            if os.path.samestat(os.fstat(file), hosts.stat()):
                yield file
                return
        finally:
            os.close(file)
