"""The daemons of a sandbox, started and asked: sandbox_directory, sandbox_network -> [sandbox_daemons] -> sandbox.

Standard library only.  Sources: munged(8), slurmctld(8), slurmd(8), sinfo(1), Slurm 22.05 and 24.11.
"""

import os
import pwd
import random
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from cluster.sandbox_config import config_files
from cluster.sandbox_directory import Sandbox, SandboxError, make_folder
from cluster.sandbox_network import enter_node

PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "squeue", "scancel", "srun")
SLURM_PACKAGES = "slurmctld slurmd slurm-client munge"  # Debian's and Ubuntu's names
PORTS = range(10_000, 20_000)  # TCP; below those that a rendezvous of ranks draws, and the kernel's ephemeral ones
START_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 10.0  # KillWait is 5
CALL_TIMEOUT_S = 2.0  # one call of sinfo, squeue or scancel
PORT_TAKEN = "ddress already in use"


class PortTakenError(Exception):
    """Another program took a port between its choice and its use."""


def missing_programs(environ: Mapping[str, str], names: Sequence[str] = PROGRAMS) -> tuple[str, ...]:
    """Which programs are neither on PATH nor where distributions put daemons."""
    return tuple(name for name in names if _find_program(name, environ) is None)


def find_programs(
    environ: Mapping[str, str], names: Sequence[str] = PROGRAMS, *, packages: str = SLURM_PACKAGES
) -> dict[str, str]:
    """Absolute path of each program.  Raises SandboxError: some are missing; it says to install the packages."""
    if missing := missing_programs(environ, names):
        raise SandboxError(f"not installed: {', '.join(missing)}; run: apt-get install {packages}", exit_code=2)
    return {name: str(_find_program(name, environ)) for name in names}


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of environ without the variables that Slurm sets and reads: those of an outer job mean another Slurm."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def read_version(slurmd: str) -> str:
    """Version of the Slurm that this slurmd is from, such as "22.05.8"."""
    words = subprocess.run([slurmd, "-V"], capture_output=True, text=True, check=False).stdout.split()
    if not words or re.fullmatch(r"\d+\.\d+\..+", words[-1]) is None:
        raise SandboxError(f"{slurmd} -V says {' '.join(words)!r}: expected a name and a version such as 22.05.8")
    return words[-1]


def choose_port(num_others: int) -> int:
    """A TCP port for slurmctld that is free at this moment, as are the num_others ports above it."""
    for _ in range(100):
        first = random.randrange(PORTS.start, PORTS.stop - num_others)
        if all(map(_is_free, range(first, first + 1 + num_others))):
            return first
    raise SandboxError(f"no {num_others + 1} neighbouring TCP ports are free in {PORTS.start}-{PORTS.stop - 1}")


def start(
    sandbox: Sandbox,
    environ: Mapping[str, str],
    before_controller: Callable[[Sandbox, Mapping[str, str]], None] = lambda sandbox, variables: None,
) -> None:
    """Write the files of a claimed directory, start the daemons and wait until all nodes are idle.

    before_controller: called when munged runs, with the daemons' variables.

    Raises SandboxError: a daemon did not start; the text ends with its log's lines that say why.
    Raises PortTakenError: it did not start because of its port.
    """
    _write_files(sandbox)
    layout = sandbox.layout
    slurm_conf = str(layout.slurm_conf)
    variables = {**without_slurm(environ), **sandbox.variables()}
    files = [f"--{name}-file={layout.munge}/munged.{name}" for name in ("pid", "log", "seed")]
    key, address = f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}"
    # --force: folders above ours may be group-writable (umask 002) or closed to others; munged would refuse both.
    run_daemon(sandbox, ["munged", "--force", key, address, *files], variables)
    before_controller(sandbox, variables)
    run_daemon(sandbox, ["slurmctld", "-c", "-f", slurm_conf], variables)
    for node in sandbox.nodes:
        run_daemon(sandbox, ["slurmd", "-N", node, "-f", slurm_conf], variables, node)
    _wait_until_idle(sandbox)


def ask(sandbox: Sandbox, program: str, *arguments: str) -> str:
    """Output of a Slurm command; empty when it fails or Slurm does not answer in CALL_TIMEOUT_S."""
    argv = [sandbox.programs[program], *arguments]
    variables = {"PATH": os.defpath, **sandbox.variables()}
    try:
        answer = subprocess.run(
            argv, env=variables, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def cancel_jobs(sandbox: Sandbox) -> None:
    """Cancel all jobs and wait until they have left the queue, at most CANCEL_TIMEOUT_S."""
    deadline = time.monotonic() + CANCEL_TIMEOUT_S
    while (jobs := ask(sandbox, "squeue", "--noheader", "--format=%A")) and time.monotonic() < deadline:
        ask(sandbox, "scancel", *jobs.split())
        time.sleep(0.1)


def _find_program(name: str, environ: Mapping[str, str]) -> str | None:
    # An ordinary user's PATH often lacks the folders of daemons.
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    return shutil.which(name, path=os.pathsep.join([*folders, "/usr/sbin", "/sbin"]))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Slurm does
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _write_files(sandbox: Sandbox) -> None:
    layout = sandbox.layout
    for folder in layout.folders(sandbox.nodes):
        make_folder(folder)
    layout.munge_key.touch(mode=0o600)
    layout.munge_key.write_bytes(secrets.token_bytes(128))
    for number in range(sandbox.gpus_per_node):
        # slurmd takes character devices only; a link has a name of its own, so any number can share one device.
        (layout.gpus / f"gpu{number}").symlink_to("/dev/null")
    files = config_files(sandbox, user=pwd.getpwuid(os.geteuid()).pw_name, host=socket.gethostname().split(".")[0])
    for name, text in files.items():
        path = sandbox.directory / name
        path.write_text(text)
        path.chmod(0o644)


def run_daemon(sandbox: Sandbox, argv: list[str], variables: Mapping[str, str], maybe_node: str | None = None) -> None:
    """Run a program that ends, or goes into the background by itself, cut off from the caller's terminal and streams.

    maybe_node: where it runs, if that node has a network of its own.
    """
    place = [] if maybe_node is None else enter_node(sandbox, maybe_node)
    with (sandbox.layout.log / "start.log").open("ab") as log:
        # sandbox_processes tells daemons by their working directory; given here, it is right from the first moment.
        returncode = subprocess.run(
            [*place, sandbox.programs[argv[0]], *argv[1:]],
            env=variables,
            cwd=sandbox.layout.log,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=0o022,
            start_new_session=True,
            check=False,
        ).returncode
    if returncode != 0:
        raise start_error(sandbox, f"{argv[0]} ended with exit code {returncode}")


def _wait_until_idle(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    states = ""
    while time.monotonic() < deadline:
        if any("fatal:" in line or PORT_TAKEN in line for line in complaints(sandbox)):
            raise start_error(sandbox, "a daemon ended")
        states = ask(sandbox, "sinfo", "--noheader", "--partition=low", "--format=%D %T")
        if states.split() == [str(len(sandbox.nodes)), "idle"]:
            return
        time.sleep(0.05)
    raise start_error(sandbox, f"after {START_TIMEOUT_S:.0f} s sinfo says {states!r}, expected all nodes idle")


def start_error(sandbox: Sandbox, what: str) -> Exception:
    """SandboxError with what the logs say, or PortTakenError."""
    lines = complaints(sandbox)
    if any(PORT_TAKEN in line for line in lines):
        return PortTakenError()
    reasons = [line for line in lines if "fatal:" in line] or lines
    return SandboxError("\n".join([f"{sandbox.directory}: Slurm did not start: {what}", *reasons[-8:]]))


def complaints(sandbox: Sandbox) -> list[str]:
    """Lines of the daemons' logs that tell of an error, each with the log's name."""
    layout = sandbox.layout
    logs = [log for log in (*sorted(layout.log.glob("*.log")), layout.munge / "munged.log") if log.exists()]
    lines = [f"  {log.name}: {line}" for log in logs for line in log.read_text(errors="replace").splitlines()]
    # Every slurmd complains that there is no PMIx; it starts all the same.
    return [line for line in lines if re.search(r"[Ee]rror:|fatal:", line) and "pmi" not in line.lower()]
