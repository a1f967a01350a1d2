"""Open files: enough for a connection to every rank, or an error before anybody waits."""

import resource
import socket
import subprocess
import sys

import pytest

from jobs.descriptors import num_connections
from tests.training import REPOSITORY


@pytest.mark.parametrize(
    ("place", "connections"),
    [
        ((0, 1024, "gloo"), 4098),
        ((1, 1024, "gloo"), 2050),
        ((0, 1024, "nccl"), 3074),
        ((1023, 1024, "nccl"), 1026),
        ((0, 1, "gloo"), 6),
    ],
)
def test_connections_are_those_that_were_counted(place: tuple[int, int, str], connections: int) -> None:
    assert num_connections(*place) == connections


def limit_after(soft: int, hard: int, *place: object) -> str:
    """The soft limit of a process after make_room, or what it complains of."""
    code = f"""
import resource
from jobs.descriptors import DescriptorError, make_room
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    make_room{place}
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except DescriptorError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_limit_is_raised_as_far_as_it_is_needed_and_may_be() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096, "this test needs ulimit -Hn 4096"
    found = [limit_after(*limits, *place) for limits, place in (
        ((1024, 4096), (0, 128, "gloo")),
        ((1024, 4096), (0, 512, "gloo")),
        ((1024, 2100), (0, 512, "gloo")),
        ((1024, 4096), (5, 8, "gloo")),
    )]  # fmt: skip
    assert found == ["1026", "2562", "2100", "1024"]


def test_limit_that_may_not_be_raised_so_far_is_named() -> None:
    assert limit_after(1024, 2049, 0, 512, "gloo") == (
        f"rank 0 on {socket.gethostname()} has 2,050 connections in a run of 512 ranks, and may open 2,049 files: have "
        "the hard limit raised (ulimit -Hn; LimitNOFILE= of slurmd), or use fewer ranks"
    )
