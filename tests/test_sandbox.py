import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.sandbox_config import config_files, needs_cgroup_conf, slurmdbd_conf
from cluster.sandbox_daemons import PROGRAMS, choose_port, missing_programs, without_slurm
from cluster.sandbox_directory import MAX_DIRECTORY_BYTES, Sandbox, SandboxError, claim, load, remove_files
from cluster.sandbox_hosts import add_names, host_lines, remove_names
from cluster.sandbox_network import cut, mend
from cluster.sandbox_processes import Process, belongs, find_processes, is_alive, kill, read_process

REPOSITORY = Path(__file__).parents[1]
SANDBOX = Sandbox(
    directory=Path("/tmp/s"),
    nodes=("n1", "n2"),
    version="24.11.5",
    gpus_per_node=2,
    controller_port=12_000,
    cluster_name="sandbox_0123abcd",
    programs={},
    made_directory=True,
)


def test_without_the_packages_up_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    environ = {"PATH": "/nonexistent"}
    command = [sys.executable, "-m", "cluster.sandbox", "up", "--dir", str(tmp_path / "s")]
    done = subprocess.run(command, env=environ, cwd=REPOSITORY, capture_output=True, text=True)
    missing = ", ".join(missing_programs(environ))
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"not installed: {missing}; run: apt-get install slurmctld slurmd slurm-client munge\n",
    )
    assert missing != ""
    assert list(tmp_path.iterdir()) == []


def test_programs_on_the_path_are_found(tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / name).touch(mode=0o755)
    assert missing_programs({"PATH": str(tmp_path)}) == ()


def test_settings_take_the_place_of_lines_of_the_same_key_and_name() -> None:
    plain = config_files(SANDBOX, user="ann", host="laptop")["slurm.conf"].splitlines()
    own = ("killwait=9", "PartitionName=low Hidden=YES", "PartitionName=new Nodes=n1", "PrivateData=jobs")
    lines = config_files(replace(SANDBOX, settings=own), user="ann", host="laptop")["slurm.conf"].splitlines()
    replaced = [line for line in plain if line == "KillWait=5" or line.startswith("PartitionName=low ")]
    assert len(replaced) == 2
    assert lines == [*(line for line in plain if line not in replaced), *own]


def test_only_variables_of_slurm_are_left_out() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "a", "SBATCH_ACCOUNT": "b", "SRUN_X": "c", "SALLOC_Y": "d"}
    kept = {"PATH": "/bin", "MY_SLURM_": "e"}
    assert without_slurm({**environ, **kept}) == kept


def test_a_port_in_use_is_not_chosen() -> None:
    random.seed(0)
    first = choose_port(3)
    with socket.socket() as other:
        other.bind(("", first + 3))  # the last of the block
        other.listen()
        random.seed(0)
        assert choose_port(3) != first


@pytest.mark.parametrize(
    ("version", "needed"), [("22.05.8", False), ("23.11.10", False), ("24.05.0", True), ("24.11.5", True)]
)
def test_cgroups_are_switched_off_only_where_slurm_knows_how(version: str, needed: bool) -> None:
    assert needs_cgroup_conf(version) is needed
    assert ("cgroup.conf" in config_files(replace(SANDBOX, version=version), user="u", host="h")) is needed


def test_configuration_names_the_sandbox_own_ports_partitions_and_gpus() -> None:
    files = config_files(SANDBOX, user="ann", host="laptop")
    lines = files["slurm.conf"].splitlines()
    assert [line for line in lines if re.match("Slurm.*(Host|Port|User)=|AuthInfo|NodeName|PartitionName", line)] == [
        "SlurmctldHost=laptop(127.0.0.1)",
        "SlurmctldPort=12000",
        "SlurmUser=ann",
        "SlurmdUser=ann",
        "AuthInfo=socket=/tmp/s/munge/munge.sock,cred_expire=5",
        "NodeName=n[1-2] NodeHostname=laptop NodeAddr=127.0.0.1 Port=[12001-12002] CPUs=16 Sockets=1 CoresPerSocket=16 "
        "ThreadsPerCore=1 RealMemory=512000 Gres=gpu:2 State=UNKNOWN",
        "PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1",
        "PartitionName=low Default=YES GraceTime=10",
        "PartitionName=low-nograce GraceTime=0",
        "PartitionName=low-cancel GraceTime=10 PreemptMode=CANCEL",
        "PartitionName=high PriorityTier=10 GraceTime=0 PreemptMode=OFF",
    ]
    assert files["gres.conf"] == "Name=gpu File=/tmp/s/gpus/gpu[0-1]\n"
    assert files["cgroup.conf"] == "CgroupPlugin=disabled\n"


def test_accounting_adds_slurmdbd_and_preemption_by_qos() -> None:
    plain = config_files(SANDBOX, user="ann", host="laptop")["slurm.conf"].splitlines()
    lines = config_files(replace(SANDBOX, has_accounting=True), user="ann", host="laptop")["slurm.conf"].splitlines()
    assert [line for line in plain if line not in lines] == ["PreemptType=preempt/partition_prio"]
    assert [line for line in lines if line not in plain and not line.startswith("#")] == [
        "PreemptType=preempt/qos",
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        "AccountingStoragePort=12003",
        "AccountingStoragePass=/tmp/s/munge/munge.sock",
        "AccountingStorageEnforce=associations,limits,qos",
    ]
    text = slurmdbd_conf(SANDBOX, user="ann", host="laptop", password="secret")
    assert [line for line in text.splitlines() if re.match("Dbd|Storage(Host|Port|Pass)", line)] == [
        "DbdHost=laptop",
        "DbdAddr=127.0.0.1",
        "DbdPort=12003",
        "StorageHost=127.0.0.1",
        "StoragePort=12004",
        "StoragePass=secret",
    ]


def test_isolated_nodes_have_names_and_addresses_of_their_own() -> None:
    isolated = replace(SANDBOX, nodes=("n7-1", "n7-2"), network=7)
    lines = config_files(isolated, user="ann", host="laptop")["slurm.conf"].splitlines()
    assert [line for line in lines if re.match("SlurmctldHost|NodeName", line)] == [
        "SlurmctldHost=laptop(198.18.7.254)",
        "NodeName=n7-[1-2] NodeAddr=198.18.7.[1-2] Port=[12001-12002] CPUs=16 Sockets=1 CoresPerSocket=16 "
        "ThreadsPerCore=1 RealMemory=512000 Gres=gpu:2 State=UNKNOWN",
    ]
    assert isolated.addresses == {"n7-1": "198.18.7.1", "n7-2": "198.18.7.2"}
    assert isolated.host_addresses == {**isolated.addresses, "sb7": "198.18.7.254"}


def test_a_cable_is_pulled_only_from_a_node_that_has_one() -> None:
    with pytest.raises(SandboxError) as shared_network:
        cut(SANDBOX, "n1")
    with pytest.raises(SandboxError) as unknown:
        mend(replace(SANDBOX, nodes=("n7-1", "n7-2"), network=7), "n1")
    assert (str(shared_network.value), shared_network.value.exit_code) == (
        "/tmp/s: its nodes share this machine's network; cables are for sandboxes of up --isolate",
        2,
    )
    assert (str(unknown.value), unknown.value.exit_code) == ("n1: no node of this sandbox; it has n7-1 n7-2", 2)


def test_nodes_without_gpus_have_no_generic_resource() -> None:
    files = config_files(replace(SANDBOX, gpus_per_node=0), user="u", host="h")
    assert files["gres.conf"] == ""
    assert "Gres=" not in files["slurm.conf"]


def shared(*nodes: str) -> dict[str, str]:
    return dict.fromkeys(nodes, "127.0.0.1")


def in_directory(directory: Path) -> Sandbox:
    return replace(SANDBOX, directory=directory)


def test_a_claimed_directory_loads_as_the_same_sandbox_and_goes_away(tmp_path: Path) -> None:
    sandbox = in_directory(tmp_path / "s")
    claim(sandbox)
    loaded = load(sandbox.directory)
    remove_files(loaded)
    assert loaded == sandbox
    assert list(tmp_path.iterdir()) == []


def test_removing_keeps_a_directory_that_was_there_before_and_foreign_files(tmp_path: Path) -> None:
    sandbox = replace(in_directory(tmp_path), made_directory=False)
    claim(sandbox)
    (tmp_path / "results.txt").touch()
    remove_files(sandbox)
    assert list(tmp_path.iterdir()) == [tmp_path / "results.txt"]


def test_unfit_directories_are_refused_in_one_line(tmp_path: Path) -> None:
    claimed, full, file = tmp_path / "claimed", tmp_path / "full", tmp_path / "file"
    claim(in_directory(claimed))
    full.mkdir()
    (full / "x").touch()
    file.touch()
    absent = tmp_path / "absent" / "s"
    long = Path("/") / ("x" * MAX_DIRECTORY_BYTES)
    messages = {
        claimed: f"a sandbox is here already; use it, or end it first: python -m cluster.sandbox down --dir {claimed}",
        full: "not empty, and no sandbox; choose another --dir",
        file: "Not a directory; choose another --dir",
        absent: "No such file or directory; choose another --dir",
        long: f"{MAX_DIRECTORY_BYTES + 1} bytes, expected at most {MAX_DIRECTORY_BYTES}, as Unix sockets inside it "
        "must stay below 108; choose a shorter --dir",
        Path("/tmp/a b#c"): "slurm.conf cannot hold ' #' in a path; choose another --dir",
    }
    for directory, message in messages.items():
        with pytest.raises(SandboxError) as refusal:
            claim(in_directory(directory))
        assert (str(refusal.value), refusal.value.exit_code) == (f"{directory}: {message}", 2)


def test_loading_what_is_no_sandbox_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as absent:
        load(tmp_path)
    (tmp_path / "sandbox.json").write_text(json.dumps({"nodes": []}))
    with pytest.raises(SandboxError) as torn:
        load(tmp_path)
    start = f"python -m cluster.sandbox up --dir {tmp_path}"
    assert str(absent.value) == f"{tmp_path}: no sandbox is here; start one: {start}"
    assert (
        re.sub(r"\(.*\)", "(why)", str(torn.value)) == f"{tmp_path}/sandbox.json: not readable (why); remove {tmp_path}"
    )


def test_names_of_sandboxes_come_and_go_and_other_lines_stay(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_bytes(b"127.0.0.1 localhost\n# caf\xe9, no UTF-8\n")
    first, second = Path("/tmp/a"), Path("/tmp/a2")  # one path begins like the other
    add_names(hosts, first, shared("n1", "n2"))
    add_names(hosts, second, {"n1": "198.18.7.1", "n2": "198.18.7.2"})
    with hosts.open("ab") as file:
        file.write(b"10.0.0.1 added-meanwhile\n")
    both = hosts.read_bytes()
    remove_names(hosts, first)
    remove_names(hosts, second)

    lines = host_lines(first, shared("n1", "n2")) + host_lines(second, {"n1": "198.18.7.1", "n2": "198.18.7.2"})
    assert lines.splitlines() == [
        "127.0.0.1 n1 n2 # slurm-sandbox /tmp/a",
        "198.18.7.1 n1 # slurm-sandbox /tmp/a2",
        "198.18.7.2 n2 # slurm-sandbox /tmp/a2",
    ]
    original = b"127.0.0.1 localhost\n# caf\xe9, no UTF-8\n"
    assert both == original + lines.encode() + b"10.0.0.1 added-meanwhile\n"
    assert hosts.read_bytes() == original + b"10.0.0.1 added-meanwhile\n"


def test_adding_names_replaces_those_of_a_sandbox_that_died_in_the_same_place(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost")  # no newline at the end
    add_names(hosts, Path("/tmp/a"), shared("n1", "n2"))
    add_names(hosts, Path("/tmp/a"), shared("n1"))
    assert hosts.read_text() == "127.0.0.1 localhost\n127.0.0.1 n1 # slurm-sandbox /tmp/a\n"


def test_many_sandboxes_at_once_lose_no_line(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    original = "".join(f"10.0.0.{number} host{number}\n" for number in range(50))
    hosts.write_text(original)

    def come_and_go(number: int) -> None:
        for _ in range(20):
            add_names(hosts, Path(f"/tmp/{number}"), shared(*(f"n{node}" for node in range(number))))
            remove_names(hosts, Path(f"/tmp/{number}"))

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hosts.read_text() == original


def started(program: str | Path, **variables: str) -> tuple[subprocess.Popen[bytes], Process]:
    """A program that sleeps, once it is what runs in the child."""
    child = subprocess.Popen([program, "300"], env=variables)
    name = Path(program).name[:15]
    while (process := read_process(child.pid)) is None or process.name != name:
        time.sleep(0.01)
    return child, process


def stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


SLEEP = str(shutil.which("sleep"))
IN_JOB = {"SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": SANDBOX.cluster_name}


@pytest.mark.parametrize(
    ("variables", "ours"),
    [
        (IN_JOB, True),
        ({"SLURM_CONF": "/tmp/s/slurm.conf"}, False),  # started from the user's shell
        ({"SLURM_CLUSTER_NAME": SANDBOX.cluster_name}, False),  # the shell of salloc
        ({**IN_JOB, "SLURM_CLUSTER_NAME": "sandbox_0123abcd1"}, False),  # a job of another Slurm
    ],
)
def test_a_process_is_ours_only_inside_our_jobs(variables: dict[str, str], ours: bool) -> None:
    child, process = started(SLEEP, **variables)
    try:
        assert belongs(process, SANDBOX) is ours
        assert (process in find_processes(SANDBOX)) is ours
    finally:
        stop(child)


def test_a_daemon_is_ours_only_in_our_log_folder(tmp_path: Path) -> None:
    program = tmp_path / "slurmd"
    shutil.copy(SLEEP, program)
    child, process = started(program)
    try:
        assert not belongs(process, SANDBOX)
        (tmp_path / "log").symlink_to(Path.cwd())
        assert belongs(process, in_directory(tmp_path))
    finally:
        stop(child)


def test_children_of_our_processes_are_ours_whatever_their_variables_say() -> None:
    script = "env -i sleep 300 & wait"
    child = subprocess.Popen(["/bin/sh", "-c", script], env={**IN_JOB, "PATH": os.environ["PATH"]})
    try:
        while "sleep" not in (found := {process.name: process for process in find_processes(SANDBOX)}):
            time.sleep(0.01)
        assert not belongs(found["sleep"], SANDBOX)
    finally:
        os.kill(found["sleep"].pid, 9)
        stop(child)


def test_a_process_that_has_the_number_of_an_earlier_one_is_not_killed() -> None:
    child, process = started(SLEEP)
    earlier = replace(process, start_ticks=process.start_ticks - 1)
    try:
        kill(earlier)
        assert not is_alive(earlier)
        assert is_alive(process)
        assert child.poll() is None
    finally:
        stop(child)


def test_a_process_that_has_ended_but_was_not_waited_for_is_gone() -> None:
    child, process = started(SLEEP)
    kill(process)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_process(child.pid) is None
    assert not is_alive(process)
    child.wait()


def test_a_name_with_parentheses_and_spaces_is_read_whole(tmp_path: Path) -> None:
    program = tmp_path / "x) Z (y"
    shutil.copy(SLEEP, program)
    child, process = started(program)
    stop(child)
    assert (process.name, process.pid, process.parent) == ("x) Z (y", child.pid, os.getpid())
