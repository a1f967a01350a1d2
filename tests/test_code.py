"""What a snapshot of the code holds, in real work trees of git and outside of them."""

import compileall
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster import code, worktree
from cluster.code import CodeError, Project, check_size, copy_project, file_sums, find_project

ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "HOME": "/nonexistent",
}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True).stdout


def put(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


PROGRAM = {
    "cluster/__init__.py": "",
    "cluster/start.py": "start",
    "jobs/__init__.py": "",
    "jobs/train.py": "train",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of git: tracked, untracked, ignored and deleted files, a link, a submodule and another repository."""
    folder = tmp_path / "my project"
    library = tmp_path / "library"
    put(library, {"lib.py": ""})
    git(tmp_path, "init", "-q", str(library))
    git(library, "add", ".")
    git(library, "commit", "-qm", "library")
    put(folder, {**PROGRAM, "deleted.py": "", "tool.sh": "#!/bin/sh", ".gitignore": "ignored/\n", "ä b.yaml": "x: 1"})
    (folder / "tool.sh").chmod(0o755)
    (folder / "link.yaml").symlink_to("ä b.yaml")
    (folder / "folder_link").symlink_to("jobs")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "submodule", "add", "-q", str(library), "library")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "project")
    (folder / "deleted.py").unlink()
    put(
        folder,
        {"jobs/train.py": "edited", "new.py": "new", "ignored/data.bin": "x" * 99, "jobs/__pycache__/a.pyc": "c"},
    )
    git(tmp_path, "init", "-q", str(folder / "other"))
    put(folder, {"other/a.py": ""})
    return folder


IN_PROJECT = (
    ".gitignore", ".gitmodules", "cluster/__init__.py", "cluster/start.py", "folder_link", "jobs/__init__.py",
    "jobs/train.py", "link.yaml", "new.py", "tool.sh", "ä b.yaml",
)  # fmt: skip


def test_snapshot_holds_what_git_tracks_and_would_add(project: Path, tmp_path: Path) -> None:
    found = find_project(project, ENVIRON)
    assert (found.is_work_tree, found.has_untracked, tuple(found.sizes)) == (True, True, IN_PROJECT)
    assert found.left_out == {"library": code.IS_SUBMODULE, "other/": code.IS_REPOSITORY}
    copied = tmp_path / "run" / "code"
    sums = copy_project(found, copied)
    assert sums == file_sums(copied)
    assert (copied / "jobs/train.py").read_text() == "edited"
    assert (copied / "link.yaml").readlink() == Path("ä b.yaml")
    assert (copied / "folder_link").readlink() == Path("jobs")
    assert [os.access(copied / name, os.X_OK) for name in ("tool.sh", "new.py")] == [True, False]


def test_bytecode_comes_along_when_it_is_of_the_file(tmp_path: Path) -> None:
    put(tmp_path / "project", {**PROGRAM, "jobs/train.py": "word = 1\n", "jobs/stale.py": "word = 1\n"})
    compileall.compile_dir(tmp_path / "project" / "jobs", quiet=2)
    put(tmp_path / "project", {"jobs/stale.py": "word = 10\n"})
    copy_project(find_project(tmp_path / "project", ENVIRON), tmp_path / "code")
    names = [path.name.split(".")[0] for path in (tmp_path / "code").rglob("*.pyc")]
    assert sorted(names) == ["__init__", "train"]
    probe = "import jobs.train, jobs.stale; print(jobs.train.word, jobs.train.__file__, jobs.stale.word)"
    words = [sys.executable, "-B", "-v", "-c", probe]
    done = subprocess.run(words, cwd=tmp_path / "code", capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {tmp_path}/code/jobs/train.py 10\n"
    matched = re.findall(r"code object from '?(\S*/jobs/__pycache__/train[^'\s]*)", done.stderr)
    assert [Path(path).parent for path in matched] == [tmp_path / "code/jobs/__pycache__"]


def test_bytecode_of_what_no_job_imports_is_left_behind(tmp_path: Path) -> None:
    put(tmp_path / "project", {**PROGRAM, "tests/test_train.py": "word = 1\n"})
    git(tmp_path, "init", "-q", str(tmp_path / "project"))
    compileall.compile_dir(tmp_path / "project", quiet=2)
    sums = copy_project(find_project(tmp_path / "project", ENVIRON), tmp_path / "code")
    folders = {str(path.parent.relative_to(tmp_path / "code")) for path in (tmp_path / "code").rglob("*.pyc")}
    assert (folders, "tests/test_train.py" in sums) == ({"cluster/__pycache__", "jobs/__pycache__"}, True)


def test_snapshot_does_not_change_when_a_file_is_edited_in_place(project: Path, tmp_path: Path) -> None:
    before = copy_project(find_project(project, ENVIRON), tmp_path / "code")
    with (project / "jobs/train.py").open("r+") as file:
        file.write("EDITED")
    assert (tmp_path / "code/jobs/train.py").read_text() == "edited"
    assert file_sums(tmp_path / "code") == before


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "prod.ENV", "server.pem", "id_rsa", "id_ed25519", ".netrc", "secrets.yaml", "a/.aws/config",
     "credentials.json", "tls.key", "kubeconfig"],
)  # fmt: skip
def test_file_whose_name_says_secret_is_left_out_tracked_or_not(project: Path, name: str) -> None:
    put(project, {name: "hunter2"})
    assert find_project(project, ENVIRON).left_out[name] == code.IS_SECRET
    git(project, "add", "-f", name)
    found = find_project(project, ENVIRON)
    assert (found.left_out[name], tuple(found.sizes)) == (code.IS_SECRET, IN_PROJECT)


@pytest.mark.parametrize(
    "name", [".env.example", "secrets.py", "id_rsa.pub", "token.py", "environment.yaml", "keys.py"]
)
def test_file_that_only_sounds_secret_is_kept(name: str) -> None:
    assert code.reason_against(f"jobs/{name}") == ""


def test_runs_and_data_inside_the_project_are_no_code(project: Path) -> None:
    put(project, {"my runs/1/model.pt": "x", "data[1]/a.bin": "x"})
    not_in = (project / "my runs", project / "data[1]", Path("/elsewhere"))
    found = find_project(project, ENVIRON, not_in=not_in)
    assert tuple(found.sizes) == IN_PROJECT


def test_packages_that_git_does_not_know_are_copied_by_themselves(project: Path, tmp_path: Path) -> None:
    """As of a wheel in a virtual environment that lies in somebody's work tree."""
    site = project / "ignored" / "site-packages"
    put(site, {**PROGRAM, "jobs/__pycache__/train.pyc": "c", "torch/__init__.py": "", "cluster/secrets.py": ""})
    found = find_project(site, ENVIRON)
    assert (found.is_work_tree, found.has_untracked, found.left_out) == (False, False, {})
    assert tuple(found.sizes) == (
        "cluster/__init__.py", "cluster/secrets.py", "cluster/start.py", "jobs/__init__.py", "jobs/train.py"
    )  # fmt: skip
    outside = tmp_path / "plain"
    put(outside, PROGRAM)
    assert tuple(find_project(outside, ENVIRON).sizes) == tuple(PROGRAM)
    assert tuple(find_project(project, {"PATH": "/nonexistent"}).sizes) == tuple(PROGRAM)  # no git


def test_project_in_a_part_of_a_work_tree_is_that_part(tmp_path: Path) -> None:
    put(tmp_path / "mono", {"big.bin": "x", **{f"train/{path}": text for path, text in PROGRAM.items()}})
    git(tmp_path, "init", "-q", str(tmp_path / "mono"))
    git(tmp_path / "mono", "add", ".")
    found = find_project(tmp_path / "mono" / "train", ENVIRON)
    assert (found.is_work_tree, found.has_untracked, tuple(found.sizes)) == (True, False, tuple(PROGRAM))


def test_too_large_a_project_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    sizes = {path: 1 for path in PROGRAM} | {"data/a.bin": 40 << 20, "data/b.bin": 11 << 20, "c.bin": 3 << 19}
    with pytest.raises(CodeError) as caught:
        check_size(Project(tmp_path, True, False, sizes, {}))
    assert str(caught.value) == (
        f"code: a snapshot of {tmp_path} would have 52.5 MiB, and at most 50.0 MiB are kept; the largest files: "
        "data/a.bin 40.0 MiB, data/b.bin 11.0 MiB, c.bin 1.5 MiB; put what is no code into .gitignore, or use "
        "code: live; nothing was submitted"
    )
    check_size(Project(tmp_path, True, False, {path: 1 for path in PROGRAM} | {"a.bin": (50 << 20) - 4}, {}))


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    sizes = {path: 1 for path in PROGRAM} | {f"data/{number}": 1 for number in range(10_000)}
    with pytest.raises(CodeError) as caught:
        check_size(Project(tmp_path, True, False, sizes, {}))
    assert str(caught.value).startswith(f"code: {tmp_path} has 10004 files, and at most 10000 are kept; put what")


def test_folder_without_the_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CodeError) as caught:
        check_size(Project(tmp_path, True, False, {"cluster/start.py": 1}, {}))
    assert str(caught.value) == f"code: {tmp_path} does not hold the packages cluster and jobs; use code: live"


def test_digests_are_those_of_sha256sum_and_tell_what_was_changed(tmp_path: Path) -> None:
    put(tmp_path / "code", {**PROGRAM, "jobs/a  b.py": "two blanks"})
    before = file_sums(tmp_path / "code")
    assert before["jobs/train.py"] == hashlib.sha256(b"train").hexdigest()
    text = code.sums_text(before)
    assert code.read_sums(text) == before
    subprocess.run(["sha256sum", "--check", "--quiet"], input=text, cwd=tmp_path / "code", text=True, check=True)
    put(tmp_path / "code", {"jobs/train.py": "other", "torch.py": "shadows", "jobs/__pycache__/train.pyc": "compiled"})
    (tmp_path / "code/cluster/start.py").unlink()
    now = file_sums(tmp_path / "code")
    assert code.changed_files(before, now) == ("cluster/start.py", "jobs/train.py", "torch.py")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    put(tmp_path / "project", PROGRAM)
    (tmp_path / "code").mkdir()
    project = Project(tmp_path / "project", True, False, {"jobs/gone.py": 3}, {})
    with pytest.raises(CodeError) as caught:
        copy_project(project, tmp_path / "code")
    assert str(caught.value) == (
        f"code: {tmp_path}/project/jobs/gone.py cannot be read: No such file or directory; nothing was submitted"
    )


def test_diff_tells_the_tracked_files_apart_from_secrets(project: Path) -> None:
    put(project, {"server.pem": "public so far"})
    git(project, "add", "-f", "server.pem")
    git(project, "commit", "-qm", "a secret")
    put(project, {"server.pem": "hunter2"})
    diff = worktree.maybe_diff(project, ENVIRON, ["server.pem"])
    assert diff is not None
    text = git(project, "diff", "HEAD", "--", "jobs/train.py", "deleted.py")
    assert sorted(diff.kept.decode().splitlines()) == sorted(text.splitlines())
    assert (diff.num_bytes, diff.sha256) == (len(diff.kept), hashlib.sha256(diff.kept).hexdigest())


def test_long_diff_is_cut_and_its_digest_is_of_all(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree, "MAX_DIFF_BYTES", 10)
    diff = worktree.maybe_diff(project, ENVIRON, [])
    assert diff is not None
    assert (len(diff.kept), diff.num_bytes > 100) == (10, True)
    assert diff.sha256 != hashlib.sha256(diff.kept).hexdigest()


def test_git_leaves_no_trace_and_takes_no_orders_from_an_outer_one(project: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (project / ".git").rglob("*")}
    misled = ENVIRON | {"GIT_DIR": str(tmp_path / "library/.git"), "GIT_WORK_TREE": str(tmp_path / "library")}
    assert worktree.maybe_commit(project, misled) == git(project, "rev-parse", "HEAD").strip()
    assert tuple(find_project(project, misled).sizes) == IN_PROJECT
    worktree.maybe_diff(project, misled, [])
    assert {path: path.stat().st_mtime_ns for path in (project / ".git").rglob("*")} == before


def test_work_tree_without_a_commit_has_none(tmp_path: Path) -> None:
    put(tmp_path / "new", PROGRAM)
    git(tmp_path, "init", "-q", str(tmp_path / "new"))
    assert tuple(find_project(tmp_path / "new", ENVIRON).sizes) == tuple(PROGRAM)
    assert worktree.maybe_commit(tmp_path / "new", ENVIRON) is None
    assert worktree.maybe_diff(tmp_path / "new", ENVIRON, []) is None


def test_packages_come_from_this_repository() -> None:
    assert code.packages_folder() == Path(__file__).parents[1]
