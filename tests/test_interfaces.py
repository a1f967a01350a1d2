"""Network interfaces that the user named are looked for before any rank waits for another."""

import socket
from pathlib import Path

import pytest

from jobs.interfaces import InterfaceError, check_interfaces, nccl_choice
from tests.training import environment, submit, write_spec

NAMES = ["bond0", "bond0.2093", "eth0", "ib0", "lo"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0"]),
        ("bond0", ["bond0", "bond0.2093"]),  # a beginning, not a name
        ("=bond0", ["bond0"]),
        ("=bond0,ib0", ["bond0", "ib0"]),
        ("eth0:3,ib0", ["eth0", "ib0"]),
        ("^lo,bond", ["eth0", "ib0"]),
        ("^=bond0", ["bond0.2093", "eth0", "ib0", "lo"]),
        ("ens", []),
    ],
)
def test_nccl_takes_what_its_manual_says(value: str, names: list[str]) -> None:
    assert nccl_choice(value, NAMES) == names


@pytest.mark.parametrize(
    ("backend", "environ"),
    [
        ("nccl", {}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth0,ib0"}),
        ("gloo", {"NCCL_SOCKET_IFNAME": "ens5"}),  # which gloo does not read
    ],
)
def test_interface_that_is_there_passes(backend: str, environ: dict[str, str]) -> None:
    check_interfaces(backend, environ, NAMES)


@pytest.mark.parametrize(
    ("backend", "environ", "message"),
    [
        (
            "nccl",
            {"NCCL_SOCKET_IFNAME": "ens5"},
            "NCCL_SOCKET_IFNAME=ens5 on HOST: it fits none (=name means exactly this one, ^name all others); "
            "its interfaces are bond0, bond0.2093, eth0, ib0, lo",
        ),
        (
            "gloo",
            {"GLOO_SOCKET_IFNAME": "eth0,eth1"},
            "GLOO_SOCKET_IFNAME=eth0,eth1 on HOST: eth1 is not there; "
            "its interfaces are bond0, bond0.2093, eth0, ib0, lo",
        ),
    ],
)
def test_interface_that_a_node_lacks_is_named(backend: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(InterfaceError) as caught:
        check_interfaces(backend, environ, NAMES)
    assert str(caught.value) == message.replace("HOST", socket.gethostname())


def test_run_with_a_wrong_interface_ends_with_2_and_one_line(tmp_path: Path, staged_data: Path) -> None:
    environ = environment(tmp_path, {"GLOO_SOCKET_IFNAME": "nosuch7"})
    done = submit(write_spec(tmp_path, staged_data), environ=environ)
    assert done.returncode == 1
    assert f"GLOO_SOCKET_IFNAME=nosuch7 on {socket.gethostname()}: nosuch7 is not there" in done.stderr
    assert "correct the spec or the environment" in done.stderr
