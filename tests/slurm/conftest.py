"""One real Slurm for all tests in this folder: four nodes with two fake GPUs each, started by the first that asks.

Without Slurm's packages the tests are skipped.  REQUIRE_SLURM=1 makes that a failure: then at least as many tests as
required_count.txt says must pass, or be marked netns and find no network namespaces.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.sandbox import Sandbox, SandboxError, down, isolating_programs, missing_programs, up, without_slurm
from cluster.sandbox_accounting import ACCOUNTING_PACKAGES, ACCOUNTING_PROGRAMS
from cluster.sandbox_hosts import HOSTS
from tests.slurm.required import NO_NAMESPACES, RequiredTests

HERE = Path(__file__).parent
PROC = Path("/proc")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("REQUIRE_SLURM") == "1":
        num_required = int((HERE / "required_count.txt").read_text())
        config.pluginmanager.register(RequiredTests(HERE, num_required))


@pytest.hookimpl(tryfirst=True)  # before `-m "not slurm"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """A running sandbox that all tests share: leave no job behind, and no node down."""
    skip_without_slurm()
    parent = Path(tempfile.mkdtemp(prefix="slurm-"))  # tmp_path is too long for Unix sockets
    started = up(parent / "s", environ=os.environ)
    try:
        yield started
    finally:
        down(started.directory)
        shutil.rmtree(parent)
    assert leftovers(started.directory) == []


@pytest.fixture(scope="session")
def slurm_environ(sandbox: Sandbox) -> dict[str, str]:
    """Variables for a process that uses the sandbox.  Copy before you change it."""
    return {**without_slurm(os.environ), **sandbox.variables()}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder that every user may enter, with a path short enough for the Unix sockets of a sandbox."""
    skip_without_slurm()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def skip_without_slurm() -> None:
    if missing := missing_programs(os.environ):
        packages = "slurmctld slurmd slurm-client munge"
        pytest.skip(f"these tests start a real Slurm, which needs {packages}; not found: {', '.join(missing)}")


def skip_without_accounting() -> None:
    skip_without_slurm()
    if missing := missing_programs(os.environ, ACCOUNTING_PROGRAMS):
        pytest.skip(f"accounting needs {ACCOUNTING_PACKAGES}; not found: {', '.join(missing)}")


def skip_without_namespaces() -> None:
    skip_without_slurm()
    try:
        isolating_programs(os.environ)
    except SandboxError as error:
        pytest.skip(f"{NO_NAMESPACES}{error}")


def leftovers(directory: Path, patience_s: float = 5.0) -> list[str]:
    """Processes and lines of /etc/hosts that mention a sandbox still, patience_s after its end for slow clients."""
    deadline = time.monotonic() + patience_s
    while True:
        lines = [line for line in HOSTS.read_text().splitlines() if str(directory) in line]
        left = lines + [entry.name for entry in PROC.iterdir() if entry.name.isdigit() and _mentions(entry, directory)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _mentions(process: Path, directory: Path) -> bool:
    needle = os.fsencode(directory)
    try:
        texts = [(process / name).read_bytes() for name in ("cmdline", "environ")]
        folder = os.fsencode((process / "cwd").readlink())
    except OSError:  # gone, or another user's
        return False
    return any(needle in text for text in (*texts, folder))
