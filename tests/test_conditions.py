"""Conditions: when a run has trained with the same keys, setup and interpreter before."""

import subprocess
from dataclasses import replace
from pathlib import Path

from cluster.conditions import conditions_of, has_trained
from cluster.runs import RunFolder
from tests.test_launch import make_plan


def make_run(folder: Path) -> RunFolder:
    run = RunFolder(folder / "demo" / "a")
    run.make()
    run.spec.write_text("name: demo\nsetup: [module load cuda]\n")
    return run


def test_digest_is_the_one_that_a_shell_makes_and_changes_with_spec_and_interpreter(tmp_path: Path) -> None:
    run, plan = make_run(tmp_path), replace(make_plan("true"), supervisor=("/opt/python", "start.py"))
    line = f"{{ cat {run.spec}; echo /opt/python; }} | sha256sum | cut -c-16"
    shell = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.strip()
    first = conditions_of(run, plan)
    assert first == shell
    assert conditions_of(run, replace(plan, supervisor=("/usr/bin/python3", "start.py"))) != first
    run.spec.write_text("name: demo\nsetup: [module load cuda/13]\n")
    assert conditions_of(run, plan) != first


def test_step_counts_only_of_an_attempt_with_the_same_conditions(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, conditions in ((1, "old"), (2, "new"), (3, "new")):
        run.append_event("attempt_started", attempt=attempt, job_id="17", conditions=conditions)
    run.append_event("first_step", attempt=1, job_id="17")
    assert (has_trained(run, "old"), has_trained(run, "new")) == (True, False)
    run.append_event("first_step", attempt=3, job_id="17")
    assert has_trained(run, "new")
