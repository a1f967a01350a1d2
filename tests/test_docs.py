"""The documentation says what the code does, and its links lead somewhere."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from docs.spec_reference import render, render_schema
from tests.test_finish import CONTRACT
from tests.training import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])


def test_spec_page_is_what_the_docstrings_say() -> None:
    assert (REPOSITORY / "docs/spec.md").read_text() == render(), "run: python -m docs.spec_reference"


def test_schema_is_what_the_models_say() -> None:
    assert (REPOSITORY / "docs/spec.schema.json").read_text() == render_schema(), "run: python -m docs.spec_reference"


def test_run_folder_page_names_every_key_of_the_summary() -> None:
    section = (REPOSITORY / "docs/run-folder.md").read_text().split("## summary.json")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == tuple(CONTRACT.split()[1:])


def searches() -> list[str]:
    """The commands by which not-here.md shows that something is not here."""
    return re.findall(r"`(grep [^`]+)`", (REPOSITORY / "docs/not-here.md").read_text())


@pytest.mark.parametrize("search", searches())
def test_what_is_said_to_be_missing_is_not_found(search: str) -> None:
    done = subprocess.run(shlex.split(search), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_every_line_about_what_is_missing_has_its_search() -> None:
    assert (REPOSITORY / "docs/not-here.md").read_text().count("\n- ") == len(searches()) <= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_file_that_the_readme_names_is_there() -> None:
    named = re.findall(
        r"`((?:cluster|jobs|configs|sbatch|tests|docs)/[\w./]*)`", (REPOSITORY / "README.md").read_text()
    )
    assert named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
