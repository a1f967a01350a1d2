"""Text of the files that a sandbox's Slurm reads: sandbox_directory -> [sandbox_config] -> sandbox_daemons.

Standard library only.  Sources: slurm.conf(5), gres.conf(5), cgroup.conf(5), Slurm 22.05 and 24.11.
"""

from collections.abc import Sequence

from cluster.sandbox_directory import LOOPBACK, Sandbox

CPUS_PER_GPU = 8  # promised, not real: SlurmdParameters=config_overrides makes Slurm believe it
MEMORY_PER_NODE_MIB = 512_000  # promised too, so that a spec for a large machine can be rehearsed
GRACE_S = 10  # of the partitions low and low-cancel


def config_files(sandbox: Sandbox, *, user: str, host: str) -> dict[str, str]:
    """Name of each configuration file, and its text.

    user: runs the daemons.  host: this machine's name without its domain; slurmctld starts only under that name.
    """
    last_gpu = sandbox.gpus_per_node - 1
    files = {
        "slurm.conf": with_settings(_slurm_conf(sandbox, user, host), sandbox.settings),
        "gres.conf": f"Name=gpu File={sandbox.layout.gpus}/gpu[0-{last_gpu}]\n" if sandbox.gpus_per_node else "",
    }
    if needs_cgroup_conf(sandbox.version):
        files["cgroup.conf"] = "CgroupPlugin=disabled\n"
    return files


def with_settings(text: str, settings: Sequence[str]) -> str:
    """slurm.conf with further lines, such as `KillWait=9`: each replaces the line of the same key and the same name.

    Nodes and partitions have names, `PartitionName=low ...`, and those that are not there yet are added.
    """
    own = {_key_of(line) for line in settings}
    kept = [line for line in text.splitlines() if not line or _key_of(line) not in own]
    return "\n".join([*kept, *settings, ""])


def _key_of(line: str) -> str:
    first = line.split()[0].lower()
    return first if first.startswith(("nodename=", "partitionname=")) else first.partition("=")[0]


def needs_cgroup_conf(version: str) -> bool:
    """Whether slurmd has to be told to do without cgroups.

    From 24.05 on it knows the word "disabled", and without it refuses to start where no cgroup file system is
    mounted, even with proctrack/linuxproc; older ones refuse the word.
    """
    year, month = version.split(".")[:2]
    return (int(year), int(month)) >= (24, 5)


def _slurm_conf(sandbox: Sandbox, user: str, host: str) -> str:
    directory, layout = sandbox.directory, sandbox.layout
    return f"""\
ClusterName={sandbox.cluster_name}
SlurmctldHost={host}({sandbox.controller_address})
SlurmctldPort={sandbox.controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits cred_expire + 1 seconds before it may start again: 121 by default.
AuthInfo=socket={layout.munge_socket},cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd.%n.pid
SlurmctldLogFile={layout.log}/slurmctld.log
SlurmdLogFile={layout.log}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=2
ReturnToService=2
KillWait=5
SlurmdTimeout=30
{_preemption_and_accounting(sandbox)}
{_nodes_and_partitions(sandbox, host)}"""


def _preemption_and_accounting(sandbox: Sandbox) -> str:
    if not sandbox.has_accounting:
        return "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"
    return f"""\
PreemptType=preempt/qos
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={sandbox.controller_address}
AccountingStoragePort={sandbox.slurmdbd_port}
# Of a munged of one's own this is the socket; without it slurmdbd says "Protocol authentication error".
AccountingStoragePass={sandbox.layout.munge_socket}
AccountingStorageEnforce=associations,limits,qos"""


def slurmdbd_conf(sandbox: Sandbox, *, user: str, host: str, password: str) -> str:
    """Text of slurmdbd.conf; user and host as above.  password: of the database's user of that name."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={sandbox.layout.munge_socket}
DbdHost={host}
DbdAddr={sandbox.controller_address}
DbdPort={sandbox.slurmdbd_port}
SlurmUser={user}
LogFile={sandbox.layout.log}/slurmdbd.log
PidFile={sandbox.directory}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost={LOOPBACK}
StoragePort={sandbox.database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def _nodes_and_partitions(sandbox: Sandbox, host: str) -> str:
    ports, num_nodes = sandbox.node_ports, len(sandbox.nodes)
    names = f"n[1-{num_nodes}] NodeHostname={host} NodeAddr={sandbox.controller_address}"
    if sandbox.network is not None:
        names = f"n{sandbox.network}-[1-{num_nodes}] NodeAddr=198.18.{sandbox.network}.[1-{num_nodes}]"
    cpus = CPUS_PER_GPU * max(sandbox.gpus_per_node, 1)
    gres = f" Gres=gpu:{sandbox.gpus_per_node}" if sandbox.gpus_per_node else ""
    return f"""\
NodeName={names} Port=[{ports[0]}-{ports[-1]}] CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory={MEMORY_PER_NODE_MIB}{gres} State=UNKNOWN
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=low Default=YES GraceTime={GRACE_S}
PartitionName=low-nograce GraceTime=0
PartitionName=low-cancel GraceTime={GRACE_S} PreemptMode=CANCEL
PartitionName=high PriorityTier=10 GraceTime=0 PreemptMode=OFF
"""
