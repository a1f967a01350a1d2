"""Fixtures that real runs share."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.owner import is_alive
from cluster.runs import RunFolder
from tests.training import REPOSITORY, SECRETS, command, environment, newest_run, submit, write_spec

StartSupervisor = Callable[[Path], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="session")
def staged_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with the synthetic images that training.SPEC asks for."""
    folder = tmp_path_factory.mktemp("data")
    spec = write_spec(folder, folder)
    subprocess.run(
        command("jobs.stage", spec), env=environment(folder), cwd=REPOSITORY, check=True, capture_output=True
    )
    return folder


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """What a test's run folder makes of it ends with the test."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, staged_data: Path) -> RunFolder:
    """training.SPEC at 4 ranks on this machine, with nothing happening to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = submit(write_spec(folder, staged_data), environ=environment(folder, SECRETS))
    assert done.returncode == 0, done.stderr
    return newest_run(folder)


@pytest.fixture
def start_supervisor() -> Iterator[StartSupervisor]:
    """Starts processes whose command line is a supervisor's; they end at SIGTERM."""
    started: list[subprocess.Popen[bytes]] = []

    def start(argument: Path) -> "subprocess.Popen[bytes]":
        words = ["-c", "import time; time.sleep(600)", "-m", "cluster.supervise", str(argument)]
        started.append(subprocess.Popen([sys.executable, *words]))
        while not is_alive(started[-1].pid, socket.gethostname()):  # between fork and exec it has our command line
            pass
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
