import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CONFTEST = """
from pathlib import Path
from tests.slurm.required import RequiredTests

def pytest_configure(config):
    config.addinivalue_line("markers", "netns: may be skipped for one reason")
    config.pluginmanager.register(RequiredTests(Path(__file__).parent, 2))
"""
TESTS = {
    "passes": "def test_{}(): pass",
    "skips": "def test_{}(): pytest.skip('no Slurm')",
    "netns_skips": "@pytest.mark.netns\ndef test_{}(): pytest.skip('no network namespaces here: no root')",
    "netns_skips_otherwise": "@pytest.mark.netns\ndef test_{}(): pytest.skip('no Slurm')",
    "claims_netns": "def test_{}(): pytest.skip('no network namespaces here: no root')",
}


@pytest.mark.parametrize(
    ("tests", "options", "exit_code", "line"),
    [
        (["passes", "passes"], [], 0, None),
        (["passes", "passes", "netns_skips"], [], 0, None),
        (["passes", "netns_skips"], [], 0, None),
        (["passes"], [], 1, (1, 0, 0)),
        (["netns_skips"], [], 1, (0, 1, 0)),
        (["passes", "passes", "skips"], [], 1, (2, 0, 1)),
        (["passes", "passes", "netns_skips_otherwise"], [], 1, (2, 0, 1)),
        (["passes", "passes", "claims_netns"], [], 1, (2, 0, 1)),
        (["passes", "skips"], ["--collect-only"], 0, None),
        (["passes", "skips"], ["-k", "nothing"], 5, None),
    ],
)
def test_a_session_fails_when_required_tests_did_not_run(
    tmp_path: Path, tests: list[str], options: list[str], exit_code: int, line: tuple[int, int, int] | None
) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    texts = [TESTS[name].format(number) for number, name in enumerate(tests)]
    (folder / "test_it.py").write_text("\n".join(["import pytest", *texts]))

    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "slurm", *options]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert done.returncode == exit_code, done.stdout
    lines = [text for text in done.stdout.splitlines() if text.startswith("REQUIRE_SLURM")]
    expected = (
        "REQUIRE_SLURM=1: {} tests in slurm passed, {} found no network namespaces and {} were skipped; "
        "expected at least 2 passed, or without namespaces, and none skipped"
    )
    assert lines == ([] if line is None else [expected.format(*line)])
