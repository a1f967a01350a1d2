"""Text of a spec that the shell, sbatch or torch would take for more than text.

sbatch's reading of a #SBATCH line is modelled after what Slurm 22.05 does: quotes of both kinds, a backslash that takes
the next character as it is even within quotes, and # outside of quotes ends the line.  tests/slurm/test_directives.py
compares the model with it.
"""

import ast
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster import successor
from cluster.plan import make_plan
from cluster.runs import RunFolder
from cluster.slurm import literal_path
from cluster.spec import JobSpec
from cluster.submit import local_script, script_text
from tests.sbatch_model import directives
from tests.specs import load, problems, spec_with
from tests.training import REPOSITORY

NASTY = [
    "'",
    '"',
    "\\",
    "#",
    "$(id)",
    "`id`",
    "%j",
    ";",
    "&",
    "|",
    " ",
    "--hold",
    "-x",
    "#SBATCH",
    "=",
    "!",
    "*",
    "~",
    "é",
    "\u200b",
]
LINE = st.lists(st.sampled_from(NASTY) | st.sampled_from("ab1"), min_size=1, max_size=8).map("".join)
WORD = LINE.filter(
    lambda text: not text.startswith("-") and "$" not in text and len(text.split()) == 1 and text == text.strip()
)
NAME = LINE.filter(
    lambda text: "\\" not in text and "/" not in text and not text.startswith("-") and text == text.strip()
)
LINE_OF_TEXT = LINE.filter(lambda text: bool(text.strip()))


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Specs whose free texts are all nasty."""
    word = st.none() | WORD
    return JobSpec(
        name=draw(NAME),
        time_limit="60",
        account=draw(word),
        partition=draw(word),
        mail_user=draw(word),
        comment=draw(st.none() | LINE_OF_TEXT),
        constraint=draw(st.none() | LINE_OF_TEXT.filter(lambda text: "$" not in text)),
        env=draw(st.dictionaries(st.sampled_from(["A", "B", "LD_LIBRARY_PATH"]), LINE | st.just(""), max_size=3)),
        sbatch=draw(
            st.dictionaries(st.sampled_from(["wckey", "licenses", "nice"]), LINE_OF_TEXT | st.just(5), max_size=2)
        ),
        run_root=Path("/r") / draw(NAME),
    )


SEEDED = settings(
    derandomize=True, database=None, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck)
)


@SEEDED
@given(specs())
def test_script_asks_slurm_for_the_plans_flags_and_for_nothing_else(spec: JobSpec) -> None:
    run = RunFolder(spec.run_root / spec.name / "a")
    plan = make_plan(spec, run, python="/usr/bin/python3")
    script = script_text(plan, run)
    asked = {name: True if value is True else str(value) for name, value in plan.sbatch.items()}
    assert directives(script) == asked
    assert asked["output"] == f"{literal_path(run.logs)}/batch_%j.log"
    words = successor.sbatch_words(plan, "")
    assert dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word) == {
        name: value for name, value in asked.items() if value is not True
    }


@settings(SEEDED, max_examples=25)
@given(st.lists(specs(), min_size=1, max_size=6))
def test_shell_gets_the_values_of_variables_and_runs_nothing_of_them(several: list[JobSpec]) -> None:
    lines, expected = [], []
    for spec in several:
        run = RunFolder(spec.run_root / spec.name / "a")
        plan = make_plan(spec, run, python="/usr/bin/python3")
        script = "\n".join((script_text(plan, run), local_script(plan), successor.script_text(plan)))
        assert subprocess.run(["/bin/bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
        lines += ["(:", *plan.preamble, *(f'printf "%s\\0" "${name}"' for name in spec.env), ")"]
        expected += list(spec.env.values())
    script = "\n".join(lines)
    done = subprocess.run(["/bin/bash", "-c", script], env={"PATH": "/nowhere"}, capture_output=True, check=True)
    assert (done.stdout.decode().split("\0")[:-1], done.stderr) == (expected, b"")


@pytest.mark.parametrize("line", ["#SBATCH --hold", "#PBS -N x", "  #BSUB -J x", "#SLURM --hold"])
def test_directive_among_the_setup_lines_is_refused(tmp_path: Path, line: str) -> None:
    found = problems(tmp_path, spec_with("setup", f"setup: ['{line}']"))
    assert found == [
        f"spec.yaml:3: setup: {line.split()[0]} begins a directive, which is no line for the shell; "
        "use a key, or the key sbatch"
    ]


def test_other_comment_among_the_setup_lines_is_not(tmp_path: Path) -> None:
    assert (
        load(tmp_path, spec_with("setup", "setup: ['# as the manual says', 'echo #SBATCH']")).setup[1] == "echo #SBATCH"
    )


@pytest.mark.parametrize("name", ["tasks", "tasks-per-node", "cluster", "tres-per-task"])
def test_other_names_of_owned_flags_are_refused(tmp_path: Path, name: str) -> None:
    (found,) = problems(tmp_path, spec_with("sbatch", f"sbatch: {{{name}: 4}}"))
    assert found.startswith(f"spec.yaml:3: sbatch.{name}: sbatch's --{name}")


def test_run_root_in_which_slurm_would_expand_nothing_is_refused(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, spec_with("run_root", "run_root: 'a\\b'"))
    assert found.startswith("spec.yaml:3: run_root: ")
    assert found.endswith("holds a backslash, which Slurm gives a meaning; choose another folder")


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """All calls of a function of torch in the program, wherever they stand."""
    found = []
    for path in sorted((REPOSITORY / "jobs").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                found.append((path.name, node))
    return found


def test_every_file_of_tensors_is_read_with_weights_only() -> None:
    loads = calls("torch.load")
    assert [name for name, _ in loads] == ["checkpoint.py", "data.py"]
    for _, call in loads:
        given_words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given_words["weights_only"] == "True"


def test_nothing_unpickles_or_evaluates_a_file() -> None:
    for path in sorted([*(REPOSITORY / "jobs").glob("*.py"), *(REPOSITORY / "cluster").glob("*.py")]):
        tree = ast.parse(path.read_text())
        names = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not names & {"pickle.load", "pickle.loads", "eval", "yaml.load", "os.system", "yaml.unsafe_load"}
        words = {
            word.arg: ast.unparse(word.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            for word in node.keywords
        }
        assert words.get("shell", "False") == "False"


def test_checkpoint_with_a_pickled_object_is_not_run(tmp_path: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    from cluster.runs import digest_of
    from jobs.checkpoint import CheckpointError, Manifest, load

    path = tmp_path / "step_00000001.pt"
    torch.save({"model": Evil()}, path)
    size, digest = digest_of(path)
    with pytest.raises(CheckpointError):
        load(tmp_path, Manifest(1, 0, 1, digest, size, 1, {}))
    assert not (tmp_path / "pwned").exists()
