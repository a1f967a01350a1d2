"""Master address: names and addresses that this machine resolves without a network."""

import socket
from pathlib import Path

import pytest

from cluster.address import AddressError, is_loopback, master_address, maybe_ip, reachable
from tests.executables import put_answer

UNKNOWN = "node.invalid"  # RFC 6761: never resolves


def put_nodes(folder: Path, addresses: dict[str, str]) -> dict[str, str]:
    """A scontrol that knows these nodes' NodeAddr, and the environment that finds it."""
    lines = (f"NodeName={name} Arch=x86_64 NodeAddr={address} NodeHostName=vm\n" for name, address in addresses.items())
    put_answer(folder, "scontrol", "".join(lines))
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        (None, False),
    ],
)
def test_loopback_addresses_are_known(ip: str | None, expected: bool) -> None:
    assert is_loopback(ip) is expected


def test_name_that_does_not_resolve_has_no_address() -> None:
    assert (maybe_ip(UNKNOWN), maybe_ip("10.0.0.1")) == (None, "10.0.0.1")


@pytest.mark.parametrize(
    ("host", "hosts", "expected"),
    [
        pytest.param("10.0.0.1", ["10.0.0.1", "10.0.0.2"], True, id="an address of a network"),
        pytest.param("localhost", ["localhost"], True, id="loopback, one machine"),
        pytest.param("127.0.1.1", ["127.0.1.1", "127.0.1.1"], True, id="loopback, all on one machine"),
        pytest.param("127.0.1.1", ["127.0.1.1", "10.0.0.2"], False, id="loopback, another node elsewhere"),
        pytest.param("127.0.1.1", ["127.0.1.1", UNKNOWN], False, id="loopback, another node unknown"),
        pytest.param(UNKNOWN, [UNKNOWN], False, id="no address"),
    ],
)
def test_loopback_reaches_only_nodes_of_one_machine(host: str, hosts: list[str], expected: bool) -> None:
    assert reachable(host, hosts) is expected


def test_name_that_all_nodes_can_use_is_taken_without_asking_slurm(tmp_path: Path) -> None:
    assert master_address(["10.0.0.1", "10.0.0.2"], {"PATH": str(tmp_path)}) == "10.0.0.1"
    assert master_address([socket.gethostname()], {"PATH": str(tmp_path)}) == socket.gethostname()


def test_node_addr_stands_in_for_a_name_that_will_not_do(tmp_path: Path) -> None:
    environ = put_nodes(tmp_path, {"127.0.1.1": "10.0.0.1", UNKNOWN: "10.0.0.2"})
    assert master_address(["127.0.1.1", UNKNOWN], environ) == "10.0.0.1"
    assert master_address([UNKNOWN, "127.0.1.1"], environ) == "10.0.0.2"


def test_first_node_that_nobody_can_reach_is_an_error_with_both_of_its_names(tmp_path: Path) -> None:
    environ = put_nodes(tmp_path, {"127.0.1.1": "127.0.0.1", UNKNOWN: "10.0.0.2"})
    with pytest.raises(AddressError) as caught:
        master_address(["127.0.1.1", UNKNOWN], environ)
    assert str(caught.value) == (
        "node 127.0.1.1: neither its name (resolves to 127.0.1.1) nor its NodeAddr 127.0.0.1 is an address that the "
        "other nodes can reach; set env: MASTER_ADDR in the spec"
    )


@pytest.mark.parametrize(("errno", "may_pass"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_name_server_that_does_not_answer_may_do_so_later_and_one_that_knows_no_such_name_will_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno: int, may_pass: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(errno, "no address")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    with pytest.raises(AddressError) as caught:
        master_address(["n1", "n2"], put_nodes(tmp_path, {"n1": "n1.site", "n2": "n2.site"}))
    assert caught.value.may_pass is may_pass
