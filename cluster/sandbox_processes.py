"""Which processes belong to a sandbox, and their end: sandbox -> [sandbox_processes].  Standard library only, Linux.

No pid is trusted because it was written down once: a number may have been given to another process since.  What belongs
to a sandbox is read from /proc each time, and before each signal the start time must still be the one that was read.
Source: proc(5).
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.sandbox_directory import Sandbox

PROC = Path("/proc")
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    pid: int
    start_ticks: int  # since boot; pid and start_ticks together name a process for ever
    parent: int
    name: str  # as the kernel has it, at most 15 bytes


def read_process(pid: int) -> Process | None:
    """The process with this number; None when there is none, or only its exit status is left, or it is hidden."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    before, _, after = text.rpartition(")")  # the name may hold spaces and parentheses
    state, parent, *fields = after.split()
    if state in "ZX":
        return None
    return Process(pid, int(fields[17]), int(parent), before.partition("(")[2])


def belongs(process: Process, sandbox: Sandbox) -> bool:
    """Whether process is a daemon of the sandbox, or runs inside one of its jobs.

    Slurm's daemons, slurmstepd too, work in the sandbox's log folder; munged is known by its key, the database's server
    by its files; tasks and batch scripts by the two variables that slurmstepd sets.  SLURM_CONF proves nothing: the
    user's shell has it as well.
    """
    folder = PROC / str(process.pid)
    try:
        if process.name.startswith("slurm") and _same(folder / "cwd", sandbox.layout.log):
            return True
        if process.name in ("munged", "mariadbd"):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            own = (f"--key-file={sandbox.layout.munge_key}".encode(), f"--datadir={sandbox.layout.database}".encode())
            # The same path in a chroot is another sandbox's.
            return not set(own).isdisjoint(arguments) and _same(folder / "root", Path("/"))
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False
    in_job = any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
    return in_job and f"SLURM_CLUSTER_NAME={sandbox.cluster_name}".encode() in variables


def find_processes(sandbox: Sandbox) -> frozenset[Process]:
    """All processes of the sandbox: those that belong to it and their descendants, never the caller or its parents."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    table = {process.pid: process for process in map(read_process, pids) if process is not None}
    found = {pid for pid, process in table.items() if belongs(process, sandbox)}
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return frozenset(table[pid] for pid in found - _own_line(table))


def end_processes(sandbox: Sandbox, seen: Iterable[Process] = (), *, timeout_s: float = 10.0) -> tuple[Process, ...]:
    """Kill the sandbox's processes and wait until they are gone; what is left after timeout_s is returned.

    seen: found earlier; a child that cleared its variables is not recognised once its parent has ended.
    """
    known = set(seen)
    deadline = time.monotonic() + timeout_s
    while True:
        known |= find_processes(sandbox)
        alive = [process for process in known if is_alive(process)]
        if not alive or time.monotonic() > deadline:
            return tuple(alive)
        for process in alive:
            kill(process)
        time.sleep(POLL_S)


def is_alive(process: Process) -> bool:
    """Whether this very process runs, not another one with its number."""
    now = read_process(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def kill(process: Process) -> None:
    """Send KILL to this very process, if it still runs and may be signalled."""
    if is_alive(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def _own_line(table: dict[int, Process]) -> set[int]:
    """The caller's pid and those of its parents up to the first."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].parent
    return line


def _same(path: Path, other: Path) -> bool:
    return os.path.samestat(path.stat(), other.stat())
