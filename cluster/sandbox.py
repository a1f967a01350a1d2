"""A real Slurm on this machine, to rehearse preemption on: `python -m cluster.sandbox up|env|status|cut|mend|down`.

Starts the distribution's own daemons (munged, slurmctld, one slurmd per node) in a directory and on ports of its own,
as root or as an ordinary user, without systemd.  Nodes have fake GPUs; partitions `low` (the default; preempted by
requeue, with grace), `low-nograce`, `low-cancel` and `high`, which preempts all of them where it needs their CPUs or
GPUs (so ask for `--exclusive`, or for all GPUs).
`up --accounting` adds slurmdbd on a MariaDB: accounts `research` (the default) and `teaching`, QOS `normal` and `high`,
and it is QOS `high` that preempts `normal`, not a partition.
The nodes are n1, n2, ...; as root these names resolve, else use their NodeAddr, 127.0.0.1.

`up --isolate` (root) gives each node a network and a host name of its own, n7-1, n7-2, ... with addresses 198.18.7.1,
198.18.7.2, ... on eth0; the 7 is a number that no other sandbox has.  `cut NODE` pulls a node's cable, `mend NODE` puts
it back.
"""

import argparse
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cluster.sandbox_accounting import ACCOUNTING_PACKAGES, ACCOUNTING_PROGRAMS, start_accounting
from cluster.sandbox_daemons import (
    PortTakenError,
    ask,
    cancel_jobs,
    choose_port,
    find_programs,
    missing_programs,
    read_version,
    start,
    without_slurm,
)
from cluster.sandbox_directory import Sandbox, SandboxError, claim, load, remove_files
from cluster.sandbox_hosts import HOSTS, add_names, remove_names
from cluster.sandbox_network import (
    NETWORK_PROGRAMS,
    NetworkTakenError,
    add_network,
    choose_network,
    cut,
    cut_off,
    maybe_obstacle,
    mend,
    remove_network,
)
from cluster.sandbox_processes import Process, end_processes, find_processes

__all__ = ["Sandbox", "SandboxError", "down", "is_up", "load", "main", "missing_programs", "up", "without_slurm"]

ATTEMPTS = 5  # to find ports, and a network, that nobody else takes in the same moment
MAX_NODES = 64
MAX_GPUS_PER_NODE = 64


def up(
    directory: Path,
    *,
    num_nodes: int = 4,
    gpus_per_node: int = 2,
    isolate: bool = False,
    accounting: bool = False,
    settings: Sequence[str] = (),
    environ: Mapping[str, str],
) -> Sandbox:
    """Start a Slurm in directory, which must not exist or be empty, and wait until all nodes are idle.

    settings: lines of slurm.conf in place of the sandbox's own of the same key, or beside them.

    Raises SandboxError: packages are missing, directory is unfit, nodes cannot be isolated here, or a daemon did not
    start; then nothing is left.
    """
    programs = find_programs(environ) | (isolating_programs(environ) if isolate else {})
    if accounting:
        programs |= find_programs(environ, ACCOUNTING_PROGRAMS, packages=ACCOUNTING_PACKAGES)
    if not (1 <= num_nodes <= MAX_NODES and 0 <= gpus_per_node <= MAX_GPUS_PER_NODE):
        expected = f"expected 1 to {MAX_NODES} nodes, 0 to {MAX_GPUS_PER_NODE} GPUs"
        raise SandboxError(f"{num_nodes} nodes with {gpus_per_node} GPUs each: {expected}", exit_code=2)
    draft = Sandbox(
        directory=directory.resolve(),
        nodes=(),
        version=read_version(programs["slurmd"]),
        gpus_per_node=gpus_per_node,
        controller_port=0,
        cluster_name=f"sandbox_{secrets.token_hex(4)}",
        programs=programs,
        made_directory=not directory.exists(),
        has_accounting=accounting,
        settings=tuple(settings),
    )
    for _ in range(ATTEMPTS):
        network = choose_network() if isolate else None
        nodes = tuple(f"n{'' if network is None else f'{network}-'}{number}" for number in range(1, num_nodes + 1))
        sandbox = replace(draft, nodes=nodes, network=network, controller_port=choose_port(num_nodes + 2))
        claim(sandbox)
        with suppress(PortTakenError, NetworkTakenError), _removed_on_failure(sandbox):
            if network is not None:
                add_network(sandbox)
            if os.access(HOSTS, os.W_OK):
                add_names(HOSTS, sandbox.directory, sandbox.host_addresses)
            if accounting:
                start(sandbox, environ, start_accounting)
            else:
                start(sandbox, environ)
            return sandbox
    raise SandboxError(f"{directory}: other programs took the ports in {ATTEMPTS} attempts; try again")


def isolating_programs(environ: Mapping[str, str]) -> dict[str, str]:
    """Where the programs are that isolate nodes.

    Raises SandboxError: some are missing, or this user or this machine may not make networks.
    """
    programs = find_programs(environ, NETWORK_PROGRAMS, packages="iproute2 util-linux")
    if (obstacle := maybe_obstacle(programs)) is not None:
        raise SandboxError(f"--isolate cannot give nodes a network of their own here: {obstacle}", exit_code=2)
    return programs


def down(directory: Path) -> None:
    """Cancel the jobs, end every process of the sandbox in directory, and remove what `up` made; other files stay.

    Raises SandboxError: no sandbox there, or a process outlived KILL.
    """
    sandbox = load(directory)
    seen = find_processes(sandbox)
    if is_up(sandbox):
        cancel_jobs(sandbox)  # so that an srun or salloc of the user, which is not ours to kill, ends as well
    _remove(sandbox, seen)


def is_up(sandbox: Sandbox) -> bool:
    """Whether its slurmctld runs."""
    return any(process.name == "slurmctld" for process in find_processes(sandbox))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0, 1 when Slurm does not start or is down, 2 when the request cannot be met, 130 on Ctrl-C."""
    default = Path(tempfile.gettempdir()) / f"slurm-sandbox-{os.getuid()}"
    arguments = _parser(default).parse_args(argv)
    option = "" if arguments.dir == default else f" --dir {shlex.quote(str(arguments.dir.resolve()))}"
    try:
        if arguments.verb == "up":
            _print_up(_up(arguments, os.environ), option)
        elif arguments.verb == "env":
            _print_env(load(arguments.dir), os.environ)
        elif arguments.verb == "status":
            return 0 if _print_status(load(arguments.dir)) else 1
        elif arguments.verb == "cut":
            cut(load(arguments.dir), arguments.node)
        elif arguments.verb == "mend":
            mend(load(arguments.dir), arguments.node)
        else:
            down(arguments.dir)
    except SandboxError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{arguments.verb}: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _removed_on_failure(sandbox: Sandbox) -> Iterator[None]:
    try:
        yield
    except BaseException:  # Ctrl-C too
        _remove(sandbox, ())
        raise


def _remove(sandbox: Sandbox, seen: Iterable[Process]) -> None:
    if left := end_processes(sandbox, seen):
        names = ", ".join(f"{process.name} ({process.pid})" for process in left)
        raise SandboxError(f"{sandbox.directory}: still running after KILL: {names}; no file was removed")
    remove_network(sandbox)
    if os.access(HOSTS, os.W_OK):
        remove_names(HOSTS, sandbox.directory)
    remove_files(sandbox)


def _up(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Sandbox:
    shape = {"num_nodes": arguments.nodes, "gpus_per_node": arguments.gpus_per_node}
    return up(arguments.dir, **shape, isolate=arguments.isolate, accounting=arguments.accounting, environ=environ)


def _print_up(sandbox: Sandbox, option: str) -> None:
    print(f"Slurm {sandbox.version} is up: {' '.join(sandbox.nodes)}, {sandbox.gpus_per_node} fake GPUs each")
    print(f'use it:  eval "$(python -m cluster.sandbox env{option})"')
    print(f"end it:  python -m cluster.sandbox down{option}")


def _print_env(sandbox: Sandbox, environ: Mapping[str, str]) -> None:
    """Shell commands: forget an outer job, whose variables would steer sbatch and srun; then name this Slurm."""
    for name in sorted(environ.keys() - without_slurm(environ).keys() - sandbox.variables().keys()):
        print(f"unset {name}")
    for name, value in sandbox.variables().items():
        print(f"export {name}={shlex.quote(value)}")


def _print_status(sandbox: Sandbox) -> bool:
    running = is_up(sandbox)
    states = ask(sandbox, "sinfo", "--noheader", "--partition=low", "--format=%D %T") if running else ""
    ports = sandbox.node_ports
    print(f"{'up' if running else 'down'}: Slurm {sandbox.version} in {sandbox.directory}")
    print(f"nodes: {' '.join(sandbox.nodes)}, {sandbox.gpus_per_node} fake GPUs each")
    print(f"states: {', '.join(states.splitlines()) or 'unknown'}")
    accounting = (
        f", slurmdbd {sandbox.slurmdbd_port}, MariaDB {sandbox.database_port}" if sandbox.has_accounting else ""
    )
    print(f"ports: slurmctld {sandbox.controller_port}, slurmd {ports[0]}-{ports[-1]}{accounting}")
    if sandbox.network is not None:
        span = " to ".join(dict.fromkeys((*sandbox.addresses.values(),)[:: max(len(sandbox.nodes) - 1, 1)]))
        print(f"network: sb{sandbox.network}, nodes {span}; cut off: {' '.join(cut_off(sandbox)) or 'none'}")
    return running


def _parser(default: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.sandbox", description="A real Slurm on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in {
        "up": "start it",
        "env": 'print what a shell needs to use it: eval "$(python -m cluster.sandbox env)"',
        "status": "say whether it runs",
        "cut": "pull the network cable of a node (of a sandbox started by up --isolate)",
        "mend": "put the cable of a node back",
        "down": "end it and remove its directory",
    }.items():
        command = verbs.add_parser(verb, help=text, description=text)
        command.add_argument("--dir", type=Path, default=default, help=f"where it lives (default: {default})")
        if verb == "up":
            command.add_argument("--nodes", type=int, default=4, help="number of nodes (default: 4)")
            command.add_argument("--gpus-per-node", type=int, default=2, help="fake GPUs of a node (default: 2)")
            isolation = "give each node a network and a host name of its own (root)"
            command.add_argument("--isolate", action="store_true", help=isolation)
            command.add_argument("--accounting", action="store_true", help="with slurmdbd, accounts and QOS")
        if verb in ("cut", "mend"):
            command.add_argument("node", help="its name, such as n7-1")
    return parser


if __name__ == "__main__":
    sys.exit(main())
