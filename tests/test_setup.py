"""Lines before the supervisor, run by the bash of this machine: which one is named when the shell ends there."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from cluster.setup import NO_MODULE, SetupError, check_setup, preamble
from tests.training import REPOSITORY

Run = Callable[[Path, "tuple[str, ...]"], "subprocess.CompletedProcess[str]"]
RECORDER = ("printf", "%s|", "recorded")


def run_script(folder: Path, lines: "tuple[str, ...]") -> "subprocess.CompletedProcess[str]":
    """As a batch script."""
    script = folder / "script"
    script.write_text("\n".join(["#!/bin/bash", "#SBATCH --nodes=1", *lines, "echo started", ""]))
    return subprocess.run(["/bin/bash", script], cwd=folder, capture_output=True, text=True, check=False)


def run_words(folder: Path, lines: "tuple[str, ...]") -> "subprocess.CompletedProcess[str]":
    """As the raw route does."""
    words = ["/bin/bash", "-c", "\n".join([*lines, 'exec "$@"']), "bash", "echo", "started"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("run", [run_script, run_words])
@pytest.mark.parametrize(
    ("setup", "number", "text", "code"),
    [
        (["true", "cd /nosuch"], 2, "cd /nosuch", 1),
        (["cd /", "nosuch --flag 'a b'", "true"], 2, "nosuch --flag 'a b'", 127),
        (["if true; then", "  false", "fi"], 2, "  false", 1),
        (["f() {", "  true", "  false", "}", "f"], 5, "f", 1),
        (["true", "( cd / && false )"], 2, "( cd / && false )", 1),
        (["source failing.sh"], 1, "source failing.sh", 3),
        (["for i in 1 2; do", "  test $i = 1", "done"], 2, "  test $i = 1", 1),
        (["test -d /nosuch || exit 5"], 1, "test -d /nosuch || exit 5", 5),
        (["exit 0"], 1, "exit 0", 0),
        (["set -u", "echo $NOSUCH"], 2, "echo $NOSUCH", 1),
        (["set +e", "false", "set -e", "exit 4"], 4, "exit 4", 4),
        (["export PATH=", "nosuch"], 2, "nosuch", 127),
        (["word=$(false)"], 1, "word=$(false)", 1),
    ],
    ids=lambda value: " ; ".join(value) if isinstance(value, list) else None,
)
def test_setup_line_that_ends_the_shell_is_named_and_the_code_is_2(
    tmp_path: Path, run: Run, setup: list[str], number: int, text: str, code: int
) -> None:
    (tmp_path / "failing.sh").write_text("true\n(exit 3)\ntrue\n")
    done = run(tmp_path, preamble({"WORD": "it's"}, setup, RECORDER))
    told = f"setup: line {number} of {len(setup)} ({text}) ended with exit code {code}"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, told)
    assert done.stdout == f"recorded|{number}|{code}|{text}|"


@pytest.mark.parametrize("run", [run_script, run_words])
def test_setup_over_several_lines_that_works_starts_what_comes_next(tmp_path: Path, run: Run) -> None:
    setup = [
        "if [ ! -d made ]; then",
        "  mkdir made",
        "fi",
        "cat > made/text <<EOF",
        "$WORD",
        "EOF",
        "false || true",
        "f() { false; }",
        "if f; then exit 1; fi",
        "set +e",
        "false",
        "set -e",
        "export SECOND=$(cat made/text)",
        'test "$SECOND" = "$WORD"',
    ]
    done = run(tmp_path, preamble({"WORD": "it's $HOME"}, setup, RECORDER))
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    assert (tmp_path / "made" / "text").read_text() == "it's $HOME\n"


def test_module_that_is_not_there_says_what_to_put_before_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, preamble({}, ["module load cuda"], RECORDER))
    told = f"setup: line 1 of 1 (module load cuda) ended with exit code 127{NO_MODULE}"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, told)


def test_module_of_a_script_that_was_read_first_is_found(tmp_path: Path) -> None:
    (tmp_path / "modules.sh").write_text('module() { export LOADED="$2"; }\n')
    setup = ["source modules.sh", "module load cuda", 'echo "$LOADED"']
    done = run_script(tmp_path, preamble({}, setup, RECORDER))
    assert (done.returncode, done.stdout) == (0, "cuda\nstarted\n")


def test_environment_of_the_spec_wins_over_the_submitting_shells(tmp_path: Path) -> None:
    script = "\n".join([*preamble({"WORD": "the spec's"}, [], RECORDER), 'echo "$WORD"'])
    done = subprocess.run(
        ["bash", "-c", script], env={"WORD": "the shell's"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "the spec's\n"


def test_nothing_is_put_before_the_supervisor_without_need() -> None:
    assert preamble({}, [], RECORDER) == ()
    assert preamble({"A": "it's"}, [], RECORDER) == ("set -e", """export A='it'"'"'s'""")


def test_failing_line_becomes_an_event_of_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    recorder = (sys.executable, str(REPOSITORY / "cluster" / "start.py"), "cluster.setup", str(run.path))
    script = "\n".join(["export SLURM_JOB_ID=17", *preamble({}, ["true", "module load 'a b'"], recorder)])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    (event,) = run.read_events()
    told = {"event": "setup_failed", "attempt": 0, "job_id": "17", "line": "module load 'a b'", "number": 2}
    assert (done.returncode, {**event, "time": ""}) == (2, {"time": "", **told, "exit_code": 127})


def test_line_is_named_where_python_is_out_of_reach(tmp_path: Path) -> None:
    done = run_script(tmp_path, preamble({}, ["(exit 9)"], (str(tmp_path / "python"), "start.py")))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "setup: line 1 of 1 ((exit 9)) ended with exit code 9\n"


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (["true", "if then"], "line 2: syntax error near unexpected token `then'"),
        (["if true; then"], "line 2: syntax error: unexpected end of file"),
    ],
)
def test_lines_that_bash_cannot_read_are_refused_before_the_queue(setup: list[str], said: str) -> None:

    with pytest.raises(SetupError) as caught:
        check_setup(setup, os.environ)
    assert str(caught.value) == f"setup: bash cannot read these lines: {said}; nothing was submitted"


def test_lines_are_read_and_not_run(tmp_path: Path) -> None:
    check_setup([f"touch {shlex.quote(str(tmp_path / 'made'))}"], {"PATH": "/usr/bin:/bin"})
    check_setup(["if"], {"PATH": str(tmp_path)})  # no bash there
    assert list(tmp_path.iterdir()) == []
