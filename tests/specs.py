"""Specs in a temporary folder, for the tests of every module of the spec."""

from pathlib import Path

import pytest

from cluster.spec import JobSpec, SpecError, load_spec


def spec_with(key: str, *lines: str) -> str:
    """A right spec but for a key, whose lines come last: from line 3 on; in a section, from line 4 on."""
    base = [line for line in ("name: demo", "time_limit: 1:00:00") if line.split(":")[0] != key]
    base += ["# a comment"] * (2 - len(base))
    if "." in key:
        section = key.split(".")[0]
        return "\n".join([*base, f"{section}:", *(f"  {line}" for line in lines)]) + "\n"
    return "\n".join([*base, *lines]) + "\n"


def load(tmp_path: Path, text: str, *overrides: str) -> JobSpec:
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    return load_spec(Path("spec.yaml"), overrides, cwd=tmp_path, allow_faults=True)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text, *overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def value_problem(tmp_path: Path, line: str) -> str:
    """The one problem of a spec whose third line is the one given, without its place."""
    found = problems(tmp_path, spec_with(line.split(":")[0], line))
    assert len(found) == 1
    assert found[0].startswith("spec.yaml:3: ")
    return found[0].removeprefix("spec.yaml:3: ")
