"""Fixtures that real runs share."""

import subprocess
from pathlib import Path

import pytest

from tests.training import REPOSITORY, command, environment, write_spec


@pytest.fixture(scope="session")
def staged_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with the synthetic images that training.SPEC asks for."""
    folder = tmp_path_factory.mktemp("data")
    spec = write_spec(folder, folder)
    subprocess.run(
        command("jobs.stage", spec), env=environment(folder), cwd=REPOSITORY, check=True, capture_output=True
    )
    return folder
