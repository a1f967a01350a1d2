"""Nodes with networks of their own: what a run does with names, addresses and cables that are really different.

Skipped where there are no network namespaces: they need root, and a kernel with bridges and veth pairs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.sandbox import Sandbox, down, load, up, without_slurm
from cluster.sandbox_hosts import HOSTS
from cluster.sandbox_network import NAMESPACES
from tests import training
from tests.slurm.conftest import leftovers, skip_without_namespaces
from tests.training import REPOSITORY, command, environment

pytestmark = pytest.mark.netns

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
