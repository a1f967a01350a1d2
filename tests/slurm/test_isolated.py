"""Nodes with networks of their own: what a run does with names, addresses and cables that are really different.

Skipped where there are no network namespaces: they need root, and a kernel with bridges and veth pairs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from cluster.sandbox import Sandbox, down, load, up, without_slurm
from cluster.sandbox_hosts import HOSTS
from cluster.sandbox_network import NAMESPACES, cut, cut_off, mend
from tests import training
from tests.slurm.conftest import leftovers, skip_without_namespaces
from tests.slurm.test_comeback import wait_until_finished
from tests.slurm.test_jobs import has_rank
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, events_of, submit, summary_of, write_spec

pytestmark = pytest.mark.netns

DEADLINE_S = 10.0  # of a step, where a node is cut off
FOUR_NODES = "nodes: 4\ntime_limit: 10\npartition: low\nsignal_lead_s: 10\n"


@pytest.fixture(scope="module")
def isolated() -> Iterator[Sandbox]:
    """A running sandbox whose four nodes have networks of their own: leave no job behind, and no cable pulled."""
    skip_without_namespaces()
    parent = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = up(parent / "i", isolate=True, environ=os.environ)
    try:
        yield started
    finally:
        down(started.directory)
        shutil.rmtree(parent)
    assert remains(started) == []


@pytest.fixture
def place(short_path: Path) -> Path:
    """Where a test may start an isolated sandbox of its own."""
    skip_without_namespaces()
    return short_path


@pytest.fixture
def environ(isolated: Sandbox, tmp_path: Path) -> dict[str, str]:
    return {**without_slurm(environment(tmp_path)), **isolated.variables()}


def remains(sandbox: Sandbox) -> list[str]:
    """What is left of a sandbox: processes, lines of /etc/hosts, links and namespaces."""
    bridge = f"sb{sandbox.network}"
    links = [name for _, name in socket.if_nameindex() if name == bridge or name.startswith(f"{bridge}-")]
    return leftovers(sandbox.directory) + links + [path.name for path in namespaces(sandbox)]


def namespaces(sandbox: Sandbox) -> list[Path]:
    return sorted(NAMESPACES.glob(f"{sandbox.cluster_name}-*"))


def run(*argv: str | Path, environ: Mapping[str, str]) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def sandbox_command(verb: str, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = command("cluster.sandbox", verb, "--dir", directory, *words)
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_every_node_has_its_own_name_address_and_interface(isolated: Sandbox, environ: dict[str, str]) -> None:
    script = "echo $SLURMD_NODENAME $(hostname) $(ip -4 -o address show dev eth0 | awk '{print $4}')"
    answer = run("srun", "--quiet", "-N4", "sh", "-c", script, environ=environ)
    assert sorted(answer.splitlines()) == [f"{node} {node} {ip}/24" for node, ip in isolated.addresses.items()]


@pytest.mark.skipif(not os.access(HOSTS, os.W_OK), reason="node names resolve only where /etc/hosts can be written")
def test_names_of_nodes_resolve_to_their_own_addresses(isolated: Sandbox, environ: dict[str, str]) -> None:
    first, last = isolated.nodes[0], isolated.nodes[-1]
    answer = run("srun", "--quiet", "-w", first, "getent", "ahostsv4", last, environ=environ)
    assert answer.split()[0] == isolated.addresses[last] == socket.gethostbyname(last)


def test_a_batch_job_reaches_its_other_nodes_from_the_first(
    isolated: Sandbox, environ: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run("sbatch", "--wait", "-N4", f"--output={output}", "--wrap=srun --quiet hostname", environ=environ)
    assert sorted(output.read_text().split()) == list(isolated.nodes)


@pytest.mark.long
def test_two_isolated_sandboxes_run_at_once_and_the_end_of_one_leaves_the_other(
    isolated: Sandbox, environ: dict[str, str], place: Path
) -> None:
    second = up(place / "b", num_nodes=1, gpus_per_node=0, isolate=True, environ=os.environ)
    names = [
        run("srun", "--quiet", "-N1", "hostname", environ={**environ, **one.variables()}) for one in (isolated, second)
    ]
    during = namespaces(second)
    down(second.directory)
    after = run("srun", "--quiet", "-N4", "hostname", environ=environ)

    assert names == [f"{isolated.nodes[0]}\n", f"n{second.network}-1\n"]
    assert [path.name for path in during] == [f"{second.cluster_name}-n{second.network}-1"]
    assert remains(second) == []
    assert sorted(after.split()) == list(isolated.nodes)


def test_a_start_that_was_killed_halfway_is_removed_by_down(place: Path) -> None:
    directory = place / "k"
    words = command("cluster.sandbox", "up", "--isolate", "--nodes=4", "--dir", directory)
    starting = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    training.wait_for("the state file", lambda: (directory / "sandbox.json").exists() and state_is_whole(directory))
    sandbox = load(directory)
    training.wait_for("the second node's namespace", lambda: len(namespaces(sandbox)) >= 2)
    starting.send_signal(signal.SIGKILL)
    starting.wait()
    before = remains(sandbox)

    down(directory)

    assert f"sb{sandbox.network}" in before
    assert remains(sandbox) == []
    assert list(place.iterdir()) == []


def state_is_whole(directory: Path) -> bool:
    try:
        json.loads((directory / "sandbox.json").read_text())
    except ValueError:
        return False
    return True


def test_isolation_is_refused_in_one_line_without_root(place: Path) -> None:
    directory = place / "u"
    words = command("cluster.sandbox", "up", "--isolate", "--dir", directory)
    # Nobody in a user namespace of its own, which may read our files still.
    done = subprocess.run(["unshare", "--user", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    user = "--isolate cannot give nodes a network of their own here: it needs root, and this is user 65534\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", user)
    assert not directory.exists()


def test_a_cut_node_is_heard_again_once_it_is_mended(isolated: Sandbox, environ: dict[str, str]) -> None:
    node = isolated.nodes[1]
    cutting = sandbox_command("cut", isolated.directory, node)
    try:
        during, heard = sandbox_command("status", isolated.directory), answers(isolated, node)
    finally:
        mending = sandbox_command("mend", isolated.directory, node)
    training.wait_for("the node to answer", lambda: answers(isolated, node))
    after = sandbox_command("status", isolated.directory)

    assert [(done.returncode, done.stdout, done.stderr) for done in (cutting, mending)] == [(0, "", "")] * 2
    assert not heard
    addresses = [*isolated.addresses.values()]
    network = f"network: sb{isolated.network}, nodes {addresses[0]} to {addresses[-1]}; cut off: "
    assert during.stdout.splitlines()[-1] == f"{network}{node}"
    assert after.stdout.splitlines()[-1] == f"{network}none"
    assert run("srun", "--quiet", "-w", node, "hostname", environ=environ) == f"{node}\n"


def answers(sandbox: Sandbox, node: str) -> bool:
    """Whether a node's slurmd takes a connection from this machine."""
    port = sandbox.node_ports[sandbox.nodes.index(node)]
    try:
        socket.create_connection((sandbox.addresses[node], port), timeout=1.0).close()
    except OSError:
        return False
    return True


def test_ranks_train_over_the_nodes_own_networks(
    isolated: Sandbox, environ: dict[str, str], tmp_path: Path, staged_data: Path
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ)
    pids = ranks_of(run)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    masters = [variables_of(pid)["CLUSTER_MASTER_ADDR"] for pid in pids]
    peers = [peers_of(pid, isolated) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_until_finished(run, job_id, environ)

    nodes = isolated.nodes
    assert (summary_of(run)["world_size"], summary_of(run)["steps"]) == (4, TOTAL_STEPS)
    assert events_of(run, "attempt_started")[0]["nodes"] == list(nodes)
    assert json.loads((run.attempts / "0001").read_text())["host"] == nodes[0]
    assert masters == [nodes[0]] * 4 or not os.access(HOSTS, os.W_OK)
    # Gloo connects each rank with every other one; srun on the first node talks with itself as well.
    assert [found - {node} for found, node in zip(peers, nodes, strict=True)] == [set(nodes) - {node} for node in nodes]


def start_run(folder: Path, data: Path, environ: Mapping[str, str], *words: str) -> tuple[RunFolder, str]:
    """Submit a run of one rank on each node, and wait until it trains; returns it and the job id."""
    # The folders of this test are in /tmp, which nodes with addresses of their own would not share.
    done = submit(write_spec(folder, data, FOUR_NODES), *words, "--json", "--force", environ=environ)
    assert done.returncode == 0, done.stderr
    return training.wait_for_step(folder, 10), json.loads(done.stdout)["job_id"]


def ranks_of(run: RunFolder) -> list[int]:
    """The processes of ranks 0 to 3."""
    pids = training.processes_of(run)
    return [pid for rank in range(4) for pid in pids if has_rank(pid, rank)]


def variables_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    texts = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(text.split("=", 1) for text in texts if "=" in text)


def peers_of(pid: int, sandbox: Sandbox) -> set[str]:
    """Nodes with which the network of a process has connections; /proc/net/tcp: proc(5)."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    established = [words[2].split(":")[0] for words in lines if words[3] == "01"]
    # The last four bytes are the IPv4 address, in this machine's order of bytes.
    remotes = {socket.inet_ntoa(int(remote[-8:], 16).to_bytes(4, sys.byteorder)) for remote in established}
    return {node for node, address in sandbox.addresses.items() if address in remotes}


@pytest.mark.long
@pytest.mark.skipif(find_spec("jobs.watchdog") is None, reason="needs the watchdog: jobs/watchdog.py")
def test_run_whose_node_was_cut_off_trains_again_once_slurm_has_noticed(
    isolated: Sandbox, environ: dict[str, str], tmp_path: Path, staged_data: Path
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, f"train.step_timeout_s={DEADLINE_S}")
    lost = isolated.nodes[2]
    cut(isolated, lost)
    try:
        training.wait_for("the stacks of the ranks that are left", run.path.joinpath("stacks/a0001.txt").exists)
        training.wait_for("the end of the attempt", run.verdict(1).exists)  # Slurm notices after SlurmdTimeout, 30 s
    finally:
        mend(isolated, lost)
    mended_s = time.time()
    wait_until_finished(run, job_id, environ)

    verdict, stacks = json.loads(run.verdict(1).read_text()), run.path.joinpath("stacks/a0001.txt").read_text()
    record = json.loads((run.failures / "a0001_r00000.json").read_text())
    assert verdict["cause"] in ("hang", "node failure")
    assert (record["kind"], record["exit_code"], record["rank"], record["host"]) == ("hang", 76, 2, lost)
    assert [line.partition(":")[0] for line in stacks.splitlines() if "no answer" in line] == ["rank 2"]
    assert (summary_of(run)["attempts"], summary_of(run)["steps"]) == (2, TOTAL_STEPS)
    trains_again_s = datetime.fromisoformat(events_of(run, "first_step")[1]["time"].replace("Z", "+00:00")).timestamp()
    assert trains_again_s - mended_s < DEADLINE_S + 30.0  # what is promised


@pytest.mark.long
@pytest.mark.skipif(find_spec("jobs.watchdog") is None, reason="needs the watchdog: jobs/watchdog.py")
def test_ranks_start_again_on_a_node_that_came_back_before_slurm_noticed(
    isolated: Sandbox, environ: dict[str, str], tmp_path: Path, staged_data: Path
) -> None:
    run, job_id = start_run(tmp_path, staged_data, environ, f"train.step_timeout_s={DEADLINE_S}")
    lost = isolated.nodes[2]
    cut(isolated, lost)
    try:
        training.wait_for("the stacks of the ranks that are left", run.path.joinpath("stacks/a0001.txt").exists)
    finally:
        mend(isolated, lost)
    mended_s = time.time()
    wait_until_finished(run, job_id, environ)

    assert cut_off(isolated) == ()
    assert json.loads(run.verdict(1).read_text())["cause"] in ("hang", "node failure")
    assert (summary_of(run)["attempts"], summary_of(run)["steps"]) == (2, TOTAL_STEPS)
    trains_again_s = datetime.fromisoformat(events_of(run, "first_step")[1]["time"].replace("Z", "+00:00")).timestamp()
    assert trains_again_s - mended_s < DEADLINE_S + 30.0
