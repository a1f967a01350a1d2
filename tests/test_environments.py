"""Whole runs on this machine with another interpreter, in an image, and again from another run's snapshot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.code import copy_project, find_project
from cluster.plan import read_plan
from cluster.runs import RunFolder
from tests import training
from tests.executables import put_executable
from tests.training import REPOSITORY, environment, events_of, submit, summary_of, write_spec

SHORT = ("train.max_steps=2", "tasks_per_node=2")

# What apptainer does as far as a rank can tell: it changes to --pwd and sets NAME for each APPTAINERENV_NAME.
APPTAINER = """\
echo "$*" >> NOTES/words
for word in "$@"; do case $word in exec|--bind=*) shift;; --pwd=*) cd "${word#--pwd=}"; shift;; esac; done
test "$1" = /images/torch.sif || exit 9
shift
unset WORD PYTHONPATH
for name in $(env | sed -n 's/^APPTAINERENV_\\([A-Z_]*\\)=.*/\\1/p'); do
  eval "export $name=\\"\\$APPTAINERENV_$name\\""
done
echo "$WORD" >> NOTES/word
pwd >> NOTES/pwd
exec "$@"
"""


@pytest.mark.long
def test_ranks_run_in_the_image_and_the_supervisor_outside(tmp_path: Path, staged_data: Path) -> None:
    put_executable(tmp_path / "bin", "apptainer", APPTAINER.replace("NOTES", str(tmp_path)))
    where = (
        f'{training.LOCAL}\nenv: {{WORD: "it\'s $HOME, b"}}\n'
        f"container: {{image: /images/torch.sif, runtime: apptainer, python: {sys.executable}}}"
    )
    environ = environment(tmp_path)
    environ["PATH"] = f"{tmp_path}/bin:{environ['PATH']}"
    done = submit(write_spec(tmp_path, staged_data, where), *SHORT, environ=environ | {"WORD": "the shell's"})
    assert done.returncode == 0, done.stderr
    run = training.newest_run(tmp_path)
    assert summary_of(run)["world_size"] == 2
    assert (tmp_path / "word").read_text() == "it's $HOME, b\n" * 2
    assert (tmp_path / "pwd").read_text() == f"{run.path}\n" * 2
    assert len((tmp_path / "words").read_text().splitlines()) == 2
    assert read_plan(run).supervisor[0] == sys.executable


@pytest.mark.long
def test_image_without_its_runtime_ends_the_run_with_words(tmp_path: Path, staged_data: Path) -> None:
    where = f"{training.LOCAL}\ncontainer: {{image: /images/torch.sif, runtime: singularity}}"
    done = submit(write_spec(tmp_path, staged_data, where), *SHORT, environ=environment(tmp_path))
    verdict = json.loads(training.newest_run(tmp_path).verdict(1).read_text())
    assert (done.returncode, verdict["cause"], verdict["exit_code"]) == (1, "usage", 2)
    assert "could not be started (exit code 127): its interpreter, or what enters its container" in verdict["reason"]


@pytest.mark.long
def test_interpreter_of_the_spec_runs_supervisor_and_ranks(tmp_path: Path, staged_data: Path) -> None:
    other = tmp_path / "bin" / "python"
    put_executable(other.parent, "python", f'echo "$2" >> {tmp_path}/started; exec {sys.executable} "$@"')
    spec = write_spec(tmp_path, staged_data, f"{training.LOCAL}\npython: {other}")
    done = submit(spec, *SHORT, environ=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    run = training.newest_run(tmp_path)
    assert summary_of(run)["world_size"] == 2
    started = (tmp_path / "started").read_text().split()
    assert started == ["--check", "cluster.provenance", "--check", "cluster.supervise", "jobs.train", "jobs.train"]
    assert json.loads(run.code_record.read_text())["python"]["executable"] == str(other)
    assert events_of(run, "environment_drift") == []


@pytest.mark.long
def test_run_whose_source_was_edited_runs_again_as_it_was(tmp_path: Path, staged_data: Path) -> None:
    project = tmp_path / "project"
    copy_project(find_project(REPOSITORY, {"PATH": "/nonexistent"}), project)
    environ = environment(tmp_path) | {"PYTHONPATH": str(project)}
    (tmp_path / "elsewhere").mkdir()

    def submit_with_project(*words: object) -> RunFolder:
        done = subprocess.run(
            [sys.executable, "-m", "cluster.submit", *map(str, words)],
            cwd=tmp_path / "elsewhere",
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return training.newest_run(tmp_path)

    first = submit_with_project(write_spec(tmp_path, staged_data), *SHORT)
    (project / "jobs" / "step.py").write_text("raise SystemExit('edited')\n")
    again = submit_with_project("--rerun", first.run_id)
    assert again.path != first.path
    assert summary_of(again)["weights_sha256"] == summary_of(first)["weights_sha256"]
    assert json.loads(again.code_record.read_text())["rerun_of"] == str(first.path)
