"""Accounting of a sandbox: sandbox_daemons -> [sandbox_accounting] -> sandbox.  slurmdbd on a MariaDB of its own.

Two accounts, `research`, the default one, and `teaching`, both with the user who runs the sandbox; two QOS, `normal`,
the default one, and `high`, whose jobs preempt those of `normal` by requeue, with grace.  Slurm enforces associations,
QOS and limits, so a job of an unknown account is refused.
slurmdbd 24.11.5 and 26.05.5 do not start beside libmariadb3 11.8.9 ("Number of columns in result (=1) set execeeds
maxmimum allowed number of columns (=0)"), but beside 10.11 of Debian 12.
Standard library only.  Sources: slurmdbd.conf(5), sacctmgr(1), Slurm 22.05, 24.11 and 26.05; mariadb-install-db(1).
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping

from cluster.sandbox_config import GRACE_S, slurmdbd_conf
from cluster.sandbox_daemons import START_TIMEOUT_S, complaints, run_daemon, start_error
from cluster.sandbox_directory import LOOPBACK, Sandbox

ACCOUNTING_PROGRAMS = ("mariadbd", "mariadb-install-db", "my_print_defaults", "slurmdbd", "sacctmgr")
ACCOUNTING_PACKAGES = "mariadb-server-core mariadb-client-core slurmdbd"  # the server alone: no service that apt starts
DEFAULT_ACCOUNT, OTHER_ACCOUNT = "research", "teaching"


def start_accounting(sandbox: Sandbox, variables: Mapping[str, str]) -> None:
    """Make the database, start it and slurmdbd, and enter this cluster with its accounts, user and QOS.

    Called when munged runs and before slurmctld does.

    Raises SandboxError, PortTakenError: as the start of the other daemons.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    password = secrets.token_hex(16)
    _start_database(sandbox, variables, user, password)
    layout = sandbox.layout
    layout.slurmdbd_conf.touch(mode=0o600)
    host = socket.gethostname().split(".")[0]
    layout.slurmdbd_conf.write_text(slurmdbd_conf(sandbox, user=user, host=host, password=password))
    run_daemon(sandbox, ["slurmdbd"], variables)
    _wait_for_port(sandbox, "slurmdbd", sandbox.controller_address, sandbox.slurmdbd_port)
    for words in _entries(sandbox.cluster_name, user):
        run_daemon(sandbox, ["sacctmgr", "-i", *words.split()], variables)


def _entries(cluster: str, user: str) -> tuple[str, ...]:
    """What sacctmgr is told."""
    return (
        f"add cluster {cluster}",
        "add qos high Preempt=normal Priority=100",
        f"modify qos normal set PreemptMode=requeue GraceTime={GRACE_S}",
        f"add account {DEFAULT_ACCOUNT},{OTHER_ACCOUNT} Cluster={cluster} QOS=normal,high DefaultQOS=normal",
        f"add user {user} Account={DEFAULT_ACCOUNT},{OTHER_ACCOUNT} DefaultAccount={DEFAULT_ACCOUNT}",
    )


def _start_database(sandbox: Sandbox, variables: Mapping[str, str], user: str, password: str) -> None:
    data = f"--datadir={sandbox.layout.database}"
    install = ["mariadb-install-db", "--no-defaults", data, f"--user={user}", "--skip-test-db"]
    run_daemon(sandbox, [*install, "--auth-root-authentication-method=normal"], variables)
    rights = sandbox.layout.database / "rights.sql"
    rights.touch(mode=0o600)
    if os.geteuid() == 0:
        shutil.chown(rights, user)
    # Whoever else uses this machine reaches the port as well: no user without a password is left.
    rights.write_text(
        "DELETE FROM mysql.global_priv;\nFLUSH PRIVILEGES;\n"
        f"CREATE USER slurm@'{LOOPBACK}' IDENTIFIED BY '{password}';\nGRANT ALL ON slurm.* TO slurm@'{LOOPBACK}';\n"
    )
    server = [
        sandbox.programs["mariadbd"], "--no-defaults", data, f"--user={user}", f"--bind-address={LOOPBACK}",
        f"--port={sandbox.database_port}", f"--socket={sandbox.layout.database}/socket", f"--init-file={rights}",
        f"--log-error={sandbox.layout.log}/mariadbd.log", "--skip-name-resolve", "--innodb-log-file-size=4M",
        "--innodb-lock-wait-timeout=900",  # slurmdbd complains of less
    ]  # fmt: skip
    with (sandbox.layout.log / "start.log").open("ab") as log:
        # mariadbd does not go into the background by itself; the shell leaves it there.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *server],
            env=dict(variables),
            cwd=sandbox.layout.log,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=0o022,
            start_new_session=True,
            check=True,
        )
    _wait_for_port(sandbox, "mariadbd", LOOPBACK, sandbox.database_port)


def _wait_for_port(sandbox: Sandbox, name: str, address: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        if any("fatal:" in line for line in complaints(sandbox)):
            raise start_error(sandbox, f"{name} ended")
        time.sleep(0.02)
    raise start_error(sandbox, f"after {START_TIMEOUT_S:.0f} s {name} does not listen at {address}:{port}")
