"""The starter: which code runs wherever one stands, and what an interpreter that will not do is told."""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch import RanksEnd
from cluster.runs import RunFolder, write_json
from cluster.start import FOLDER, maybe_problem
from cluster.submit import ignored
from cluster.verdict import Evidence, judge
from tests.executables import put_executable

REPOSITORY = Path(__file__).parents[1]
STARTER = REPOSITORY / "cluster" / "start.py"
OWN = ".".join(map(str, sys.version_info[:3]))
ADVICE = "install the same one on all nodes, or name another with the key python"


def start(starter: Path, *words: object, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(starter), *map(str, words)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def make_code(folder: Path, said: str) -> Path:
    """A folder with a package cluster of two modules; returns its starter."""
    (folder / "cluster").mkdir(parents=True)
    shutil.copy(STARTER, folder / "cluster" / "start.py")
    (folder / "cluster" / "__init__.py").touch()
    (folder / "cluster" / "code.py").write_text("raise SystemExit('the standard library was hidden')\n")
    program = (
        f"import code, os, sys; import cluster.other; print({said!r}, sys.argv[1:], os.getcwd(), cluster.__path__)\n"
    )
    (folder / "cluster" / "program.py").write_text(program)
    (folder / "cluster" / "other.py").touch()
    return folder / "cluster" / "start.py"


@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "live"}], ids=str)
def test_code_beside_the_starter_runs_though_the_current_folder_holds_another(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """A job stands where it was submitted, which is mostly the folder of the code that may have been edited since."""
    starter = make_code(tmp_path / "run" / "code", "as submitted")
    make_code(tmp_path / "live", "edited")
    paths = {name: value.replace("live", str(tmp_path / "live")) for name, value in variables.items()}
    done = start(starter, "cluster.program", "a", "b c", cwd=tmp_path / "live", **paths)
    package = tmp_path / "run" / "code" / "cluster"
    assert (done.stdout, done.stderr) == (f"as submitted ['a', 'b c'] {tmp_path}/live ['{package}']\n", "")


def test_starter_names_the_folder_that_holds_the_packages() -> None:
    assert FOLDER == REPOSITORY


def test_interpreter_like_the_submissions_has_no_problem() -> None:
    major, minor, _ = OWN.split(".")
    assert [maybe_problem(version, ("json",)) for version in ("", OWN, f"{major}.{minor}.99")] == ["", "", ""]


def test_another_python_on_the_node_is_told_in_words_with_code_2(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_json(run.code_record, {"python": {"version": "3.99.1"}})
    done = start(STARTER, "--check", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"python: {sys.executable} on {socket.gethostname()} is Python {OWN}, and the run was submitted with Python "
        f"3.99.1; {ADVICE}\n",
    )


def test_missing_package_is_named_with_code_2(tmp_path: Path) -> None:
    done = start(STARTER, "--check", tmp_path, "json", "nosuch_torch", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"python: {sys.executable} on {socket.gethostname()} is Python {OWN} and has no nosuch_torch; install it "
        "there, or name another with the key python\n",
    )


def test_rank_with_another_python_leaves_the_record_that_explains_its_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    place = {"CLUSTER_PYTHON": "3.99.1", "CLUSTER_ATTEMPT": "2", "SLURM_PROCID": "3"}
    done = start(STARTER, "jobs.train", run.spec, "--run-dir", run.path, cwd=tmp_path, **place)
    assert (done.returncode, done.stdout) == (2, "")
    found = json.loads((run.failures / "a0002_r00003.json").read_text())
    verdict = judge(Evidence(False, None, [found], RanksEnd({})))
    reason = f"rank 3 on {socket.gethostname()}: {done.stderr.rstrip()}"
    assert (verdict.cause, verdict.reason, verdict.exit_code, verdict.rank) == ("usage", reason, 2, 3)


def test_old_interpreter_can_read_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(STARTER.read_text(), feature_version=(3, 6))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"os", "signal", "socket", "sys", "time", "runpy", "json"}
    text = re.sub(r"'[^']*'", "", "".join(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.arg)))
    assert not re.search(r"[|\[]", text)  # annotations that 3.6 would stumble over
    monkeypatch.setattr(sys, "version_info", (3, 6, 8, "final", 0))
    assert maybe_problem("", ()) == (
        f"python: {sys.executable} on {socket.gethostname()} is Python 3.6.8, and at least 3.10 is needed; {ADVICE}"
    )


def test_starter_stays_in_the_words_of_the_other_modules(tmp_path: Path) -> None:
    """It may not import them: they would not load in an old interpreter."""
    from cluster import rank, runs, start

    assert (start.VERSION_VARIABLE, start.EXIT_USAGE) == (rank.PYTHON_VARIABLE, runs.EXIT_USAGE)
    assert {rank.ATTEMPT_VARIABLE} <= set(re.findall(r'"(CLUSTER_[A-Z]+)"', STARTER.read_text()))


def test_signals_wait_until_the_module_has_its_handlers(tmp_path: Path) -> None:
    starter = make_code(tmp_path / "code", "")
    module = (
        "import signal as s; found = sorted(s.Signals(n) for n in s.pthread_sigmask(s.SIG_BLOCK, ()))\n"
        "print(*(f'{number.name} {s.getsignal(number).name}' for number in found))"
    )
    (tmp_path / "code" / "cluster" / "program.py").write_text(module)
    with ignored(signal.SIGUSR2):  # as a shell does whose `env` cannot block it
        done = start(starter, "cluster.program", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("SIGUSR2 SIG_DFL SIGTERM SIG_DFL\n", "")


def test_interpreter_that_is_not_on_the_node_ends_the_job_with_2_and_one_line(tmp_path: Path) -> None:
    from cluster.plan import refusal

    line = refusal("-x", f"{tmp_path}/it's $HOME/python", "python", "name one that is on all nodes with the key python")
    done = subprocess.run(["bash", "-c", line], env={"HOSTNAME": "n3"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"python: {tmp_path}/it's $HOME/python is not on n3; name one that is on all nodes with the key python\n",
    )
    put_executable(tmp_path, "python", "")
    assert (
        subprocess.run(["bash", "-c", refusal("-x", f"{tmp_path}/python", "python", "")], check=False).returncode == 0
    )
