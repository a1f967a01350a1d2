"""Folders that only one node sees."""

import socket
from pathlib import Path

import pytest

from cluster.node_local import are_all_here, maybe_reason, mount_of

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
proc /proc proc rw 0 0
tmpfs /mnt/in\\040memory tmpfs rw,size=1g 0 0
server:/home /home nfs4 rw 0 0
tmpfs /scratch tmpfs rw 0 0
/dev/sdb1 /scratch xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/tmp/runs", "each node has its own /tmp"),
        ("/var/tmp/me/runs", "each node has its own /var/tmp"),
        ("/dev/shm/runs", "each node has its own /dev/shm"),
        ("/mnt/in memory/runs", "/mnt/in memory is in this machine's memory (tmpfs)"),
        ("/tmpfiles/runs", None),
        ("/home/me/runs", None),
        ("/scratch/me/runs", None),
        ("/data", None),
    ],
)
def test_folder_that_other_nodes_do_not_see_is_told_with_its_reason(path: str, reason: str | None) -> None:
    assert maybe_reason(Path(path), MOUNTS) == reason


def test_link_into_a_local_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("/dev/shm")
    assert maybe_reason(tmp_path / "runs" / "a", MOUNTS) == "each node has its own /dev/shm"


def test_file_system_that_hides_another_counts() -> None:
    assert mount_of(Path("/scratch/a"), MOUNTS) == ("/scratch", "xfs")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1", "::1"], True),
        (["localhost", "localhost"], True),
        (["127.0.0.1", "192.0.2.1"], False),  # RFC 5737: nobody's
        (["no.such.host.invalid"], False),
        ([], False),
    ],
)
def test_nodes_that_are_this_machine_are_known_by_their_addresses(addresses: list[str], expected: bool) -> None:
    if "::1" in addresses and not socket.has_ipv6:
        addresses.remove("::1")
    assert are_all_here(addresses) is expected
