"""The job that goes on with a run: its script and what sbatch is told, as far as it goes without a controller."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.index import find_run
from cluster.plan import LaunchPlan
from cluster.runs import RunFolder
from cluster.slurm import SlurmError
from cluster.successor import has_nodes_without, sbatch_words, script_text, submit_beforehand, submit_successor
from tests.executables import put_answer, put_executable
from tests.test_launch import make_plan


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo" / "a")
    run.make()
    run.spec.write_text("name: demo\n")
    return run


@pytest.fixture
def plan() -> LaunchPlan:
    flags: dict[str, str | int | bool] = {"job-name": "my demo", "nodes": 2, "no-requeue": True, "exclude": "n7"}
    first: dict[str, str | int | bool] = {"hold": True, "begin": "now+1hour", "dependency": "singleton"}
    preamble = ("set -e", "export WORD='it'\"'\"'s'")
    return replace(make_plan("true"), cluster="slurm", sbatch=flags | first, preamble=preamble)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose sbatch counts from 18 on and notes its words and Slurm's variables."""
    count = f"read -r id < {tmp_path}/next; echo $((id + 1)) > {tmp_path}/next; echo $id"
    note = (
        f'echo "$*" >> {tmp_path}/asked; export -p | while read -r l; do case "$l" in *SLURM*) echo "$l";; esac; done'
    )
    put_executable(tmp_path / "bin", "sbatch", f"{note} >> {tmp_path}/variables; {count}")
    (tmp_path / "next").write_text("18\n")
    return {"PATH": str(tmp_path / "bin"), "XDG_STATE_HOME": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_NTASKS": "9"}


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_script_is_whole_by_itself_and_hands_on_its_arguments(tmp_path: Path, plan: LaunchPlan) -> None:
    starter = tmp_path / "starter"
    starter.write_text('[ "$1" = --check ] || printf "%s|" "$WORD" "$@"')
    supervisor = ("/bin/sh", str(starter), "cluster.supervise", "/runs/my demo/1")
    (tmp_path / "script").write_text(script_text(replace(plan, supervisor=supervisor)))
    done = subprocess.run(
        ["/bin/bash", tmp_path / "script", "--after", "17"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "it's|cluster.supervise|/runs/my demo/1|--after|17|"


def test_words_are_the_plans_but_for_when_the_first_job_was_to_start(plan: LaunchPlan) -> None:
    assert sbatch_words(plan, "") == ["--job-name=my demo", "--nodes=2", "--no-requeue", "--exclude=n7"]
    assert sbatch_words(plan, "n7,n2")[-1] == "--exclude=n7,n2"


def test_successor_waits_behind_its_predecessor_and_is_entered(
    tmp_path: Path, run: RunFolder, plan: LaunchPlan, environ: dict[str, str]
) -> None:
    assert submit_successor(run, plan, "17", "afternotok", environ) == "18"
    words = "--parsable --dependency=afternotok:17 --kill-on-invalid-dep=yes --job-name=my demo --nodes=2 --no-requeue"
    assert asked(tmp_path) == [f"{words} --exclude=n7 {run.path}/successor.sbatch --after 17"]
    assert (tmp_path / "variables").read_text() == ""
    assert run.successor_script.read_text() == script_text(plan)
    (event,) = run.read_events()
    entered = {key: event[key] for key in ("event", "attempt", "job_id", "route", "predecessor")}
    assert entered == {
        "event": "submitted", "attempt": 0, "job_id": "18", "route": "successor", "predecessor": "17"
    }  # fmt: skip
    assert find_run("18", environ) == run


def test_successors_that_are_put_in_beforehand_wait_one_behind_the_other(
    tmp_path: Path, run: RunFolder, plan: LaunchPlan, environ: dict[str, str]
) -> None:
    submit_beforehand(run, replace(plan, num_successors=3), "17", environ)
    waits = [line.split()[1] for line in asked(tmp_path)]
    assert waits == ["--dependency=afterany:17", "--dependency=afterany:18", "--dependency=afterany:19"]
    assert [(event["job_id"], event["predecessor"]) for event in run.read_events()] == [
        ("18", "17"),
        ("19", "18"),
        ("20", "19"),
    ]


def test_refused_successor_is_not_entered(tmp_path: Path, run: RunFolder, plan: LaunchPlan) -> None:
    put_answer(tmp_path / "bin", "sbatch", errors="sbatch: error: Access/permission denied\n", exit_code=1)
    with pytest.raises(SlurmError):
        submit_successor(run, plan, "17", "afternotok", {"PATH": str(tmp_path / "bin")})
    assert run.read_events() == []


def test_slurm_is_asked_whether_the_job_has_nodes_without_the_bad_ones(
    tmp_path: Path, run: RunFolder, plan: LaunchPlan, environ: dict[str, str]
) -> None:
    assert has_nodes_without(run, plan, "n7,n2", environ)
    words = f"--test-only --job-name=my demo --nodes=2 --no-requeue --exclude=n7,n2 {run.path}/successor.sbatch"
    assert asked(tmp_path) == [words]
