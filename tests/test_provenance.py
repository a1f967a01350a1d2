"""What a run was submitted with, and what a start says of a difference."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cluster import keep, provenance
from cluster.code import CodeError, find_project, packages_folder
from cluster.keep import Kept
from cluster.provenance import Environment, changed_environment, environment_of, own_environment, tell_drift
from cluster.runs import RunFolder, UsageError
from cluster.spec import JobSpec
from tests.executables import put_executable
from tests.specs import load
from tests.test_code import ENVIRON, PROGRAM, git, put

HERE = Environment("/opt/python", "3.11.7", {"torch": "2.14.1", "numpy": "2.4.6"}, "login1")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "demo" / "a")
    run.make()
    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    put(folder, PROGRAM)
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def record(run: RunFolder, project: Path, *, is_snapshot: bool = True) -> dict[str, Any]:
    """Keep the code of a project in a run; returns code.json."""
    provenance.record(run, find_project(project, ENVIRON), HERE, ENVIRON, is_snapshot=is_snapshot)
    return dict(json.loads(run.code_record.read_text()))


def test_record_tells_commit_diff_versions_and_interpreter(run: RunFolder, project: Path) -> None:
    put(project, {"jobs/train.py": "edited\n"})
    told = record(run, project)
    diff = run.code_diff.read_bytes()
    assert b"+edited" in diff
    assert {**told, "time": ""} == {
        "format_version": 1,
        "time": "",
        "mode": "snapshot",
        "folder": str(run.code),
        "source": str(project),
        "commit": git(project, "rev-parse", "HEAD").strip(),
        "dirty": True,
        "diff": {
            "file": "code.diff",
            "bytes": len(diff),
            "kept": len(diff),
            "sha256": hashlib.sha256(diff).hexdigest(),
        },
        "files": 4,
        "bytes": 12,
        "left_out": {},
        "rerun_of": None,
        "python": {"executable": "/opt/python", "version": "3.11.7"},
        "packages": {"torch": "2.14.1", "numpy": "2.4.6"},
        "host": "login1",
    }


def test_clean_code_has_no_diff_and_an_untracked_file_makes_it_dirty(run: RunFolder, project: Path) -> None:
    assert [record(run, project)[key] for key in ("dirty", "diff")] == [False, None]
    put(project, {"new.py": ""})
    assert [record(run, project)[key] for key in ("dirty", "diff")] == [True, None]
    assert not run.code_diff.exists()


def test_live_code_is_told_and_not_copied(run: RunFolder, project: Path) -> None:
    told = record(run, project, is_snapshot=False)
    assert (told["mode"], told["folder"], told["files"], run.code.exists()) == ("live", str(project), 4, False)
    assert provenance.has_snapshot(run) is False


def test_own_environment_is_that_of_the_installed_packages() -> None:
    own = own_environment()
    assert (own.executable, own.version) == (sys.executable, ".".join(map(str, sys.version_info[:3])))
    assert own.packages["torch"] == metadata.version("torch")
    assert {"submitit", "pydantic", "pyyaml"} < own.packages.keys() <= set(provenance.DISTRIBUTIONS)


def said_at_start(run: RunFolder, caplog: pytest.LogCaptureFixture, attempt: int = 1) -> list[str]:
    caplog.clear()
    tell_drift(run, attempt, "17")
    return list(caplog.messages)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, also where a test before made the logger of a supervisor."""
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    monkeypatch.setattr(provenance, "own_environment", lambda: HERE)
    return caplog


@pytest.mark.parametrize("is_snapshot", [True, False], ids=["snapshot", "live"])
def test_changed_code_is_one_event_and_one_warning(
    run: RunFolder, project: Path, log: pytest.LogCaptureFixture, is_snapshot: bool
) -> None:
    record(run, project, is_snapshot=is_snapshot)
    folder = run.code if is_snapshot else project
    assert said_at_start(run, log) == []
    put(folder, {"jobs/train.py": "edited", "jobs/new.py": ""})
    told = [f"the code in {folder} differs from what was submitted: jobs/new.py, jobs/train.py"]
    assert [said_at_start(run, log), said_at_start(run, log, 2)] == [told, []]
    put(folder, {"cluster/start.py": "edited"})
    assert len(said_at_start(run, log, 3)) == 1
    events = [(event["event"], event["attempt"], event["job_id"], event["files"]) for event in run.read_events()]
    first = ["jobs/new.py", "jobs/train.py"]
    assert events == [("code_drift", 1, "17", first), ("code_drift", 3, "17", ["cluster/start.py", *first])]


def test_run_that_goes_on_with_other_code_says_so_and_keeps_the_record_of_what_it_was_trained_with(
    run: RunFolder, project: Path
) -> None:
    first = record(run, project, is_snapshot=False)
    put(project, {"jobs/train.py": "edited before the first attempt"})
    record(run, project, is_snapshot=False)
    run.claim_attempt({})
    put(project, {"README.md": "edited"})
    assert record(run, project)["mode"] == "snapshot"
    assert run.read_events() == []  # nothing of the program has changed
    trained_with = run.code_sums.read_bytes()
    put(project, {"jobs/train.py": "edited again", "jobs/new.py": ""})
    record(run, project)
    (event,) = run.read_events()
    assert (event["event"], event["attempt"], event["files"]) == ("code_drift", 2, ["jobs/new.py", "jobs/train.py"])
    assert (run.path / "code.a0001.sha256").read_bytes() == trained_with
    assert json.loads((run.path / "code.a0001.json").read_text())["source"] == first["source"]
    record(run, project)
    assert len(run.read_events()) == 1


def test_edited_source_does_not_concern_a_snapshot(
    run: RunFolder, project: Path, log: pytest.LogCaptureFixture
) -> None:
    record(run, project)
    put(project, {"jobs/train.py": "edited"})
    assert said_at_start(run, log) == []


def test_other_versions_are_one_event_and_one_warning(
    run: RunFolder, project: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(run, project)
    now = replace(HERE, version="3.11.9", packages={"torch": "2.15.0"}, host="n1", executable="/elsewhere")
    monkeypatch.setattr(provenance, "own_environment", lambda: now)
    told = (
        "the environment differs from the submission's: python: 3.11.7 -> 3.11.9; torch: 2.14.1 -> 2.15.0; "
        "numpy: 2.4.6 -> None"
    )
    assert [said_at_start(run, log), said_at_start(run, log, 2)] == [[told], []]
    (event,) = run.read_events()
    changed = {"python": ["3.11.7", "3.11.9"], "torch": ["2.14.1", "2.15.0"], "numpy": ["2.4.6", None]}
    assert (event["event"], event["attempt"], event["changed"]) == ("environment_drift", 1, changed)


def test_interpreter_that_nobody_could_ask_is_compared_with_nothing() -> None:
    assert changed_environment({"python": {"version": None}, "packages": {}}, HERE) == {}


def test_run_without_a_record_starts_in_silence(run: RunFolder, log: pytest.LogCaptureFixture) -> None:
    assert said_at_start(run, log) == []


def test_bytecode_of_a_snapshot_is_made_once_and_is_no_change(run: RunFolder, log: pytest.LogCaptureFixture) -> None:
    project = find_project(packages_folder(), ENVIRON)
    few = {path: size for path, size in project.sizes.items() if path.startswith(("cluster/r", "jobs/d"))}
    provenance.record(run, replace(project, sizes=few), HERE, ENVIRON, is_snapshot=True)
    provenance.prepare_code(run)
    compiled = sorted(path.name for path in run.code.rglob("*.pyc"))
    assert len(compiled) == len(few)
    assert said_at_start(run, log) == []


def test_copy_that_was_cut_short_is_no_snapshot(run: RunFolder, project: Path) -> None:
    (run.path / ".code.tmp").mkdir()
    put(run.path / ".code.tmp", {"jobs/train.py": "half"})
    assert provenance.has_snapshot(run) is False
    record(run, project)
    assert provenance.has_snapshot(run) is True
    assert not (run.path / ".code.tmp").exists()


def make_python(folder: Path, script: str) -> str:
    put_executable(folder, "python", script)
    return str(folder / "python")


def test_other_interpreter_is_asked_for_its_versions(tmp_path: Path) -> None:
    other = make_python(tmp_path, f'exec {sys.executable} "$@"')
    found = environment_of(other, os.environ, needs_torch=True)
    assert (found.executable, found.version, found.packages) == (
        other,
        own_environment().version,
        own_environment().packages,
    )
    assert environment_of("/nosuch/python", os.environ, needs_torch=True).version is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'python: /x is Python 3.6.8, and at least 3.10 is needed' >&2; exit 2",
         "python: /x is Python 3.6.8, and at least 3.10 is needed; nothing was submitted"),
        ("echo 'Fatal Python error' >&2; exit 1",
         "python: PYTHON does not run: Fatal Python error; nothing was submitted"),
    ],
)  # fmt: skip
def test_other_interpreter_that_will_not_do_is_refused(tmp_path: Path, script: str, said: str) -> None:
    other = make_python(tmp_path, script)
    with pytest.raises(UsageError) as caught:
        environment_of(other, {"PATH": os.environ["PATH"]}, needs_torch=True)
    assert str(caught.value) == said.replace("PYTHON", other)


def spec_of(folder: Path, text: str = "") -> JobSpec:
    return load(folder, f"name: demo\ncluster: local\n{text}")


def kept_of(spec: JobSpec, run: RunFolder, **sources: RunFolder) -> Kept:
    return keep.look(spec, run, os.environ, maybe_source=sources.get("source"))


def test_new_run_gets_a_snapshot_and_runs_it(
    tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = kept_of(spec_of(tmp_path), run)
    assert kept.code_root(run) == run.code
    keep.keep(kept, run, os.environ)
    keep.tell_left_out(kept)
    assert (run.code / "cluster/keep.py").read_bytes() == (packages_folder() / "cluster/keep.py").read_bytes()
    assert provenance.has_snapshot(run)
    assert capsys.readouterr() == ("", "")


def test_live_run_runs_what_lies_there(tmp_path: Path, run: RunFolder) -> None:
    kept = kept_of(spec_of(tmp_path, "code: live"), run)
    keep.keep(kept, run, os.environ)
    assert (kept.code_root(run), run.code.exists()) == (packages_folder(), False)


def test_run_that_goes_on_keeps_its_snapshot_and_notes_its_environment(
    tmp_path: Path, run: RunFolder, project: Path
) -> None:
    record(run, project)
    kept = kept_of(spec_of(tmp_path), run)
    keep.keep(kept, run, os.environ)
    assert (kept.maybe_project, kept.code_root(run)) == (None, run.code)
    assert (run.code / "jobs/train.py").read_text() == "train"
    assert json.loads(run.code_record.read_text())["python"]["executable"] == sys.executable


def test_rerun_has_the_snapshot_of_the_other_run_and_says_so(tmp_path: Path, run: RunFolder, project: Path) -> None:
    put(project, {"jobs/train.py": "edited"})
    before = record(run, project)
    again = RunFolder(tmp_path / "runs" / "demo" / "b")
    again.make()
    kept = kept_of(spec_of(tmp_path), again, source=run)
    keep.keep(kept, again, os.environ)
    assert kept.code_root(again) == again.code
    assert (again.code / "jobs/train.py").read_text() == "edited"
    assert (again.code_sums.read_text(), again.code_diff.read_text()) == (
        run.code_sums.read_text(),
        run.code_diff.read_text(),
    )
    told = json.loads(again.code_record.read_text())
    assert (told["rerun_of"], told["folder"], told["commit"]) == (str(run.path), str(again.code), before["commit"])


def test_rerun_of_live_code_is_refused(tmp_path: Path, run: RunFolder, project: Path) -> None:
    record(run, project, is_snapshot=False)
    with pytest.raises(CodeError) as caught:
        kept_of(spec_of(tmp_path), RunFolder(tmp_path / "b"), source=run)
    assert str(caught.value) == (
        f"{run.path} has no snapshot of its code (code: live, not by cluster.submit, or pruned): what ran is not "
        f"kept; to run its spec with today's code: python -m cluster.submit {run.spec}"
    )


def test_rerun_of_a_snapshot_that_was_changed_is_refused(tmp_path: Path, run: RunFolder, project: Path) -> None:
    record(run, project)
    put(run.code, {"jobs/train.py": "edited"})
    with pytest.raises(CodeError) as caught:
        keep.become_submit_of(run, ["--rerun", "a"], {})
    assert str(caught.value) == f"{run.code} is not what was submitted any more: jobs/train.py"


def test_rerun_with_live_code_contradicts_itself(tmp_path: Path, run: RunFolder, project: Path) -> None:
    record(run, project)
    with pytest.raises(CodeError) as caught:
        kept_of(spec_of(tmp_path, "code: live"), RunFolder(tmp_path / "b"), source=run)
    assert str(caught.value) == f"code: a rerun runs the snapshot of {run.path}; leave code: live out"


def test_interpreter_that_is_not_here_is_refused_for_a_local_run_only(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(UsageError) as caught:
        kept_of(spec_of(tmp_path, "python: /nosuch/python"), run)
    assert str(caught.value) == "python: /nosuch/python is not on this machine"
    on_slurm = load(tmp_path, "name: demo\ntime_limit: 60\npython: /nosuch/python\n")
    assert kept_of(on_slurm, run).environment.version is None


def test_what_a_snapshot_leaves_out_is_told_in_one_line(
    run: RunFolder, capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    put(project, {f"key{number}.pem": "" for number in range(6)})
    keep.tell_left_out(Kept(True, HERE, find_project(project, ENVIRON), None))
    said = ", ".join(f"key{number}.pem (its name says that it is secret)" for number in range(5))
    assert capsys.readouterr().err == f"code: left out of the snapshot: {said} and 1 more\n"


def test_live_code_of_the_other_routes_is_noted(tmp_path: Path, run: RunFolder) -> None:
    keep.record_live(spec_of(tmp_path), run, os.environ)
    told: Mapping[str, Any] = json.loads(run.code_record.read_text())
    assert (told["mode"], told["folder"], told["python"]["executable"]) == (
        "live",
        str(packages_folder()),
        sys.executable,
    )
