"""Ranks that meet where DNS never answers: it is not asked, and asked again afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.sandbox import SandboxError, isolating_programs
from jobs.lookups import GLIBC_DEFAULT, line_for_hosts
from tests import training
from tests.training import REPOSITORY, command, environment, summary_of, write_spec

ASK = "import socket\ntry:\n    socket.getaddrinfo('node.example.com', 80)\nexcept OSError:\n    pass\n"
SILENCED = "from jobs.lookups import dns_silenced\nwith dns_silenced() as silence:\n    silence()\n"
MEET = """
from cluster.rank import RankEnv, draw_master_ports
from jobs.rendezvous import connect
connect(RankEnv(0, 0, 1, 1, 0, 1, "127.0.0.1", draw_master_ports("test"), "run.1", False, "single"), timeout_s=30)
"""


def num_questions(folder: Path, *words: str, **variables: str) -> int:
    """How often DNS is asked by a command, which must succeed."""
    argv = ["unshare", "--net", *command("tests.silent_dns", *words)]
    environ = {**environment(folder), **variables}
    done = subprocess.run(argv, env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A test's folder, where DNS can be silenced and is asked for names at all."""
    try:
        isolating_programs(os.environ)
    except SandboxError as error:
        pytest.skip(f"no network namespaces here: {error}")
    if num_questions(tmp_path, sys.executable, "-c", ASK, RES_OPTIONS="timeout:1 attempts:1") == 0:
        pytest.skip("this machine does not ask DNS for names of hosts: see /etc/nsswitch.conf")
    return tmp_path


def test_ranks_meet_without_a_question_to_dns(folder: Path, staged_data: Path) -> None:
    spec = write_spec(folder, staged_data, "cluster: local\ntasks_per_node: 2")
    words = command("cluster.submit", spec, "train.epochs=1", "--wait")

    asked = num_questions(folder, *words)
    unsilenced = num_questions(folder, sys.executable, "-c", MEET, RES_OPTIONS="timeout:1 attempts:1")

    assert summary_of(training.newest_run(folder))["world_size"] == 2
    assert asked == 0
    assert unsilenced > 0  # else torch no longer looks names up, and jobs/lookups.py can go


def test_dns_is_asked_again_once_the_ranks_have_met(folder: Path) -> None:
    ask_inside = SILENCED + "".join(f"    {line}\n" for line in ASK.splitlines())
    assert num_questions(folder, sys.executable, "-c", ask_inside) == 0
    assert num_questions(folder, sys.executable, "-c", SILENCED + ASK, RES_OPTIONS="timeout:1 attempts:1") > 0


@pytest.mark.parametrize(
    ("text", "services"),
    [
        (
            "# hosts: db\npasswd: files\nhosts:  files mdns4 [NOTFOUND=return] dns # home\n",
            "files mdns4 [NOTFOUND=return] dns",
        ),
        (" hosts :dns files\nhosts: db\n", "dns files"),
        ("passwd: files\n", GLIBC_DEFAULT),
        (None, GLIBC_DEFAULT),
    ],
)
def test_what_the_machine_says_of_hosts_is_put_back(tmp_path: Path, text: str | None, services: str) -> None:
    path = tmp_path / "nsswitch.conf"
    if text is not None:
        path.write_text(text)
    assert line_for_hosts(path) == services
