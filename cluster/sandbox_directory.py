"""A sandbox and its directory, who may have it and what lies in it: [sandbox_directory] -> sandbox_daemons -> sandbox.

Standard library only.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

# A Unix socket's path holds 107 bytes; the longest in a sandbox is that of a job step's slurmstepd.
MAX_DIRECTORY_BYTES = 107 - len("/spool/n64/n64_99999999.4294967295.0")

LOOPBACK = "127.0.0.1"


class SandboxError(RuntimeError):
    """A sandbox cannot be started, found or ended; the text is for the user.

    exit_code: 2 when the request cannot be met (packages missing, directory taken or unfit, no sandbox there); else 1.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """Take the text, and what `main` returns."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths inside a sandbox's directory."""

    directory: Path  # absolute

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.directory / "slurm.conf"

    @property
    def state(self) -> Path:
        """What was started, in JSON; its presence makes the directory a sandbox."""
        return self.directory / "sandbox.json"

    @property
    def log(self) -> Path:
        """Logs of the daemons; Slurm's daemons have it as working directory."""
        return self.directory / "log"

    @property
    def munge(self) -> Path:
        """Key, socket and seed of the sandbox's own munged."""
        return self.directory / "munge"

    @property
    def munge_key(self) -> Path:
        """Known to this munged only; its path tells it from others."""
        return self.munge / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where Slurm's daemons and commands find munged."""
        return self.munge / "munge.sock"

    @property
    def slurmdbd_conf(self) -> Path:
        """What slurmdbd reads, with the password of its database; for this user only."""
        return self.directory / "slurmdbd.conf"

    @property
    def database(self) -> Path:
        """Files and socket of the accounting's MariaDB; its path tells this server from others."""
        return self.directory / "db"

    @property
    def gpus(self) -> Path:
        """One device file per fake GPU."""
        return self.directory / "gpus"

    def spool(self, node: str) -> Path:
        """Folder of one slurmd; the sockets of its job steps lie here."""
        return self.directory / "spool" / node

    def folders(self, nodes: tuple[str, ...]) -> tuple[Path, ...]:
        """All folders, parents first."""
        top = (self.log, self.munge, self.gpus, self.directory / "state", self.directory / "run")
        return (*top, self.directory / "spool", *map(self.spool, nodes))

    def entries(self) -> tuple[Path, ...]:
        """Everything a sandbox puts straight into its directory."""
        files = (self.slurm_conf, self.directory / "gres.conf", self.directory / "cgroup.conf", self.state)
        return (*self.folders(()), *files, self.slurmdbd_conf, self.database)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A Slurm that was started on this machine."""

    directory: Path  # absolute, symbolic links resolved
    nodes: tuple[str, ...]  # Slurm's node names: n1, n2, ...; isolated: n7-1, n7-2, ..., with 7 the network number
    version: str  # Slurm's, such as "22.05.8"
    gpus_per_node: int  # fake
    controller_port: int  # TCP port of slurmctld
    cluster_name: str  # Slurm's ClusterName, unlike any other sandbox's
    programs: dict[str, str]  # name and absolute path of each in PROGRAMS
    made_directory: bool  # whether `up` made directory, so that `down` removes it
    network: int | None = None  # isolated: number of its network, in [1, 256); None: nodes share this machine's network
    has_accounting: bool = False  # slurmdbd on a MariaDB of its own
    settings: tuple[str, ...] = ()  # lines of slurm.conf in place of, or beside, the sandbox's own

    @property
    def layout(self) -> Layout:
        """Where its files lie."""
        return Layout(self.directory)

    @property
    def node_ports(self) -> range:
        """TCP port of each node's slurmd, in the order of nodes."""
        return range(self.controller_port + 1, self.controller_port + 1 + len(self.nodes))

    @property
    def slurmdbd_port(self) -> int:
        """TCP port of slurmdbd, where there is accounting."""
        return self.node_ports.stop

    @property
    def database_port(self) -> int:
        """TCP port of the accounting's MariaDB, open to this machine only."""
        return self.node_ports.stop + 1

    @property
    def addresses(self) -> dict[str, str]:
        """Each node's IPv4 address.  198.18.0.0/15 is set aside for tests of networks (RFC 2544): no site uses it."""
        if self.network is None:
            return dict.fromkeys(self.nodes, LOOPBACK)
        return {node: f"198.18.{self.network}.{number}" for number, node in enumerate(self.nodes, start=1)}

    @property
    def host_addresses(self) -> dict[str, str]:
        """What /etc/hosts is to hold: the nodes, and this machine as isolated ones see it.

        slurmd 24.11 looks up who talks to it; without a name server in its network that took longer than a job's
        credential is good for.
        """
        own = {} if self.network is None else {f"sb{self.network}": self.controller_address}
        return self.addresses | own

    @property
    def controller_address(self) -> str:
        """Where the nodes find slurmctld."""
        return LOOPBACK if self.network is None else f"198.18.{self.network}.254"

    def variables(self) -> dict[str, str]:
        """What a shell must export for sbatch, srun and the others to reach this Slurm."""
        return {"SLURM_CONF": str(self.layout.slurm_conf)}


def claim(sandbox: Sandbox) -> None:
    """Make the directory, or take an empty one, and write the state file that makes it this sandbox's.

    Raises SandboxError: the directory is in use or another user's, or cannot be made, or its path is unfit.
    """
    directory, state = sandbox.directory, sandbox.layout.state
    _check_path(directory)
    if state.exists():
        end = f"python -m cluster.sandbox down --dir {directory}"
        raise SandboxError(f"{directory}: a sandbox is here already; use it, or end it first: {end}", exit_code=2)
    content = asdict(sandbox)
    del content["directory"]
    try:
        if not directory.exists():
            make_folder(directory)
        elif directory.stat().st_uid != os.geteuid():
            raise SandboxError(f"{directory}: belongs to another user; choose another --dir", exit_code=2)
        elif any(directory.iterdir()):
            raise SandboxError(f"{directory}: not empty, and no sandbox; choose another --dir", exit_code=2)
        state.touch(mode=0o644, exist_ok=False)  # of two who come at once, one fails here
        state.write_text(json.dumps(content))
    except OSError as error:
        raise SandboxError(f"{directory}: {error.strerror}; choose another --dir", exit_code=2) from None


def load(directory: Path) -> Sandbox:
    """The sandbox in directory, running or not.

    Raises SandboxError: there is none, or it is another user's.
    """
    directory = directory.resolve()
    state = Layout(directory).state
    try:
        if state.stat().st_uid != os.geteuid():
            raise SandboxError(f"{directory}: this sandbox belongs to another user; choose another --dir", exit_code=2)
        content = json.loads(state.read_text())
        return Sandbox(
            **{
                **content,
                "directory": directory,
                "nodes": tuple(content["nodes"]),
                "settings": tuple(content["settings"]),
            }
        )
    except OSError:
        start = f"python -m cluster.sandbox up --dir {directory}"
        raise SandboxError(f"{directory}: no sandbox is here; start one: {start}", exit_code=2) from None
    except (ValueError, TypeError, KeyError) as error:
        raise SandboxError(f"{state}: not readable ({error}); remove {directory}", exit_code=2) from None


def remove_files(sandbox: Sandbox) -> None:
    """Remove what the sandbox put into its directory, and the directory if `up` made it; other files stay."""
    for entry in sandbox.layout.entries():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    if sandbox.made_directory and not any(sandbox.directory.iterdir()):
        sandbox.directory.rmdir()


def make_folder(folder: Path) -> None:
    """Not group-writable and open to all for reading, as munged wants it, whatever the umask is."""
    folder.mkdir()
    folder.chmod(0o755)


def _check_path(directory: Path) -> None:
    size = len(os.fsencode(directory))
    if size > MAX_DIRECTORY_BYTES:
        raise SandboxError(
            f"{directory}: {size} bytes, expected at most {MAX_DIRECTORY_BYTES}, as Unix sockets inside it must stay "
            "below 108; choose a shorter --dir",
            exit_code=2,
        )
    if odd := re.sub(r"[A-Za-z0-9/._+@-]", "", str(directory)):
        raise SandboxError(f"{directory}: slurm.conf cannot hold {odd!r} in a path; choose another --dir", exit_code=2)
