"""Ranks that meet over real sockets and stores, each with something else in their way."""

import itertools
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv, draw_master_ports
from jobs.rendezvous import RendezvousError, connect, gloo_interface, pause_s

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_S = 30.0


def free_ports(count: int = 3) -> tuple[int, ...]:
    """Ports that nobody listens on just now."""
    drawn = draw_master_ports(secrets.token_hex(8), 40)
    return tuple(itertools.islice((port for port in drawn if is_free(port)), count))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def rank_env(rank: int, ports: tuple[int, ...], *, token: str = "run.1", master_addr: str = "127.0.0.1") -> RankEnv:
    return RankEnv(rank, rank, 2, 2, 0, 1, master_addr, ports, token, False, "supervisor")


def meet(ports: tuple[int, ...], master_addr: str = "127.0.0.1") -> tuple[bytes, int]:
    """Let two ranks connect at the same time; what rank 1 reads of a key that rank 0 sets, and the port."""
    envs = [rank_env(rank, ports, master_addr=master_addr) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        server, client = pool.map(lambda env: connect(env, timeout_s=TIMEOUT_S), envs)
    server.set("key", "from rank 0")
    assert isinstance(client, TCPStore)
    return client.get("key"), client.port


@contextmanager
def silent_listeners(*ports: int) -> Iterator[None]:
    """The kernel accepts connections for them; nobody ever answers."""
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("", port)))
        yield


def run_python(*arguments: str, **variables: str) -> list[str]:
    """Run Python to its end; the lines that it wrote, in the order of the alphabet."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sorted(finished.stdout.splitlines())


def test_two_ranks_meet_at_the_first_port() -> None:
    ports = free_ports()
    assert meet(ports) == (b"from rank 0", ports[0])


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_at_an_ipv6_address() -> None:
    ports = free_ports()
    assert meet(ports, "::1") == (b"from rank 0", ports[0])


def test_ports_that_are_taken_by_silent_listeners_are_passed_over() -> None:
    ports = free_ports()
    with silent_listeners(*ports[:2]):
        assert meet(ports) == (b"from rank 0", ports[2])


def test_store_of_another_run_is_passed_over() -> None:
    ports = free_ports()
    strangers = connect(rank_env(0, ports[:1], token="run.0"), timeout_s=TIMEOUT_S)
    assert (meet(ports), strangers.get("cluster/token")) == ((b"from rank 0", ports[1]), b"run.0")


def test_listener_that_talks_nonsense_is_passed_over() -> None:
    ports = free_ports()
    with socket.create_server(("", ports[0])) as listener, ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(answer_once, listener)
        assert meet(ports) == (b"from rank 0", ports[1])
        assert stranger.result() is None


def answer_once(listener: socket.socket) -> None:
    for _ in ("the look whether anybody listens", "the store's client"):
        with listener.accept()[0] as connection, suppress(OSError):
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def test_port_can_be_used_again_at_once() -> None:
    ports = free_ports(1)
    assert [meet(ports), meet(ports)] == [(b"from rank 0", ports[0])] * 2


def test_ranks_that_start_before_rank_0_wait_for_it() -> None:
    ports = free_ports()
    with silent_listeners(ports[0]), ThreadPoolExecutor(2) as pool:
        early = [pool.submit(connect, rank_env(rank, ports), timeout_s=TIMEOUT_S) for rank in (1, 2)]
        time.sleep(3.0)
        server = connect(rank_env(0, ports), timeout_s=TIMEOUT_S)
        server.set("key", "late")
        assert [waiting.result().get("key") for waiting in early] == [b"late", b"late"]


def test_rank_that_waits_looks_again_within_a_tenth_of_its_wait() -> None:
    assert [pause_s(waited_s) for waited_s in (0.0, 0.4, 2.0, 60.0)] == [0.05, 0.05, 0.2, 1.0]


def test_users_port_that_is_taken_is_an_error_on_rank_0() -> None:
    ports = free_ports(1)
    with silent_listeners(*ports), pytest.raises(RendezvousError) as caught:
        connect(rank_env(0, ports), timeout_s=TIMEOUT_S)
    assert str(caught.value) == (
        f"rank 0 can bind no port on {socket.gethostname()}: {ports[0]}: Address already in use; see who holds them "
        "with `ss -ltnp`, and leave MASTER_PORT unset (ports are then drawn for each attempt) or set it to a free one"
    )


def test_rank_that_finds_only_strangers_says_what_it_saw() -> None:
    ports = free_ports()
    strangers = connect(rank_env(0, ports[1:2], token="run.0"), timeout_s=TIMEOUT_S)
    with silent_listeners(ports[0]), pytest.raises(RendezvousError) as caught:
        connect(rank_env(1, ports), timeout_s=3.0)
    assert strangers.get("cluster/token") == b"run.0"
    assert str(caught.value) == (
        f"rank 1 on {socket.gethostname()} found no store of this run (token 'run.1') at 127.0.0.1 within 3 s: "
        f"{ports[0]}: accepts connections, but is silent, {ports[1]}: the store of another run ('run.0'), {ports[2]}: "
        "Connection refused; see in the log whether rank 0 started, check that this node reaches that address, or set "
        "MASTER_ADDR to one that all nodes reach"
    )


def test_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(RendezvousError) as caught:
        connect(rank_env(1, (23111,), master_addr="no-such-node.invalid"), timeout_s=0.2)
    assert str(caught.value) == (
        f"rank 1 on {socket.gethostname()} found no store of this run (token 'run.1') at no-such-node.invalid within "
        f"0.2 s: 23111: {unknown_name()}; see in the log whether rank 0 started, check that this node reaches that "
        "address, or set MASTER_ADDR to one that all nodes reach"
    )


def unknown_name() -> str:
    """The resolver's words, which depend on whether there is a DNS."""
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("no-such-node.invalid", None)
    return str(caught.value.strerror)


REDUCE = """
import os, sys, torch, torch.distributed as dist
from cluster.rank import read_rank
from jobs.rendezvous import connect

env = read_rank(os.environ)
dist.init_process_group("gloo", store=connect(env, timeout_s=30), rank=env.rank, world_size=env.world_size)
total = torch.tensor([env.rank + 1.0])
dist.all_reduce(total)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    os._exit(3)  # the second attempt finds the keys of the first in the agent's store
sys.stdout.write(f"rank {env.rank} of {env.world_size}: {total.item()} by {env.launcher}\\n")
sys.stdout.flush()
os._exit(0)  # gloo's threads may still drop a tensor, and abort the process when the interpreter is on its way out
"""


@pytest.fixture
def reduce_script(tmp_path: Path) -> str:
    path = tmp_path / "reduce.py"
    path.write_text(REDUCE)
    return str(path)


def test_two_processes_reduce_over_the_store(reduce_script: str) -> None:
    ports = free_ports()

    def run(rank: int) -> list[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        meeting_point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[1])}
        supervisor = {
            "CLUSTER_MASTER_ADDR": "127.0.0.1",
            "CLUSTER_MASTER_PORTS": ",".join(map(str, ports)),
            "CLUSTER_TOKEN": "run.1",
        }
        return run_python(reduce_script, **place, **meeting_point, **supervisor)

    with silent_listeners(ports[0]), ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(run, (0, 1)))
    assert lines == [["rank 0 of 2: 3.0 by supervisor"], ["rank 1 of 2: 3.0 by supervisor"]]


def test_workers_of_torchrun_meet_at_its_agents_store_again_after_a_restart(reduce_script: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1")
    lines = run_python(*launcher, reduce_script)
    assert lines == ["rank 0 of 2: 3.0 by torchrun", "rank 1 of 2: 3.0 by torchrun"]


def test_workers_of_two_agents_that_count_restarts_differently_meet_and_read_no_old_key() -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(*restart_counts: int) -> list[Store]:
        tokens = [f"none.{count}" for count in restart_counts]
        envs = [
            RankEnv(rank, 0, 3, 1, rank, 3, "127.0.0.1", (agents.port,), token, True, "torchrun")
            for rank, token in enumerate(tokens)
        ]
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda env: connect(env, timeout_s=TIMEOUT_S), envs))

    start(0, 0, 0)[0].set("key", "old")
    stores = start(0, 1, 0)
    seen = [store.check(["key"]) for store in stores]
    stores[1].set("key", "new")
    assert (seen, [store.get("key") for store in stores]) == ([False] * 3, [b"new"] * 3)


def test_agents_store_where_a_rank_is_missing_is_an_error() -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = RankEnv(0, 0, 2, 2, 0, 1, "127.0.0.1", (agents.port,), "none.0", True, "torchrun")
    with pytest.raises(RendezvousError) as caught:
        connect(env, timeout_s=0.2)
    assert str(caught.value) == (
        "rank 0 did not meet 1 others at the store of torchrun's agent, MASTER_ADDR=127.0.0.1, "
        f"MASTER_PORT={agents.port} (only 0 came within 0.2 s): see in the log which rank did not start"
    )


def test_process_without_a_launcher_serves_itself(reduce_script: str) -> None:
    assert run_python(reduce_script) == ["rank 0 of 1: 1.0 by single"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_gloo_takes_loopback_where_loopback_was_asked_for(address: str) -> None:
    assert gloo_interface(address) == "lo"


def test_gloo_interface_of_an_unknown_host_is_not_guessed() -> None:
    assert gloo_interface("no-such-node.invalid") is None


def test_host_name_that_maps_to_loopback_does_not_put_gloo_on_loopback() -> None:
    """Only rank 0's own node sees its name as 127.0.1.1; the other nodes come from outside."""
    names = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert gloo_interface(socket.gethostname()) in {None, *names}
