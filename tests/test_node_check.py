"""Node check: what a batch script does on a first node that lacks something, in bash with stand-ins for Slurm.

On a real Slurm: tests/slurm/test_unfit_nodes.py.
"""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.conditions import conditions_of
from cluster.plan import refusal
from cluster.requeue import MAX_SPOILT_ATTEMPTS
from cluster.runs import RunFolder
from tests.executables import put_executable
from tests.test_launch import make_plan

SCRIPT = Path(__file__).parents[1] / "cluster" / "node_check.sh"
ENVIRON = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n3", "HOSTNAME": "n3.site"}
WHY = 'python: /opt/it\'s "here" is not on n3.site; install it'


def make_run(folder: Path, *, trained_with: str = "/opt/python") -> RunFolder:
    """A run that has done a step with an interpreter."""
    run = RunFolder(folder / "it's a run")
    run.make()
    run.spec.write_text("name: demo\n")
    plan = replace(make_plan("true"), supervisor=(trained_with, "start.py"))
    told = {"nodes": ["n1", "n2"], "world_size": 2, "restart_count": 0, "conditions": conditions_of(run, plan)}
    run.append_event("attempt_started", attempt=11, job_id="17", **told)
    run.append_event("first_step", attempt=11, job_id="17", step=1)
    return run


def meet_unfit_node(
    folder: Path, run: RunFolder, excluded: str = "(null)", **environ: str
) -> tuple[int, str, list[str]]:
    """Exit code, what was said, and the orders that Slurm got."""
    answer = f"echo \"$@\" >> {folder}/orders; echo '   ReqNodeList=(null) ExcNodeList={excluded}'; "
    put_executable(folder / "bin", "scontrol", f'{answer} [ "$1" != requeue ] || kill -TERM $PPID')
    line = f'. {SCRIPT} "$RUN" /opt/python\n' + refusal("-x", '/opt/it\'s "here"', "python", "install it")
    done = subprocess.run(
        ["bash", "-c", line],
        env={**ENVIRON, "RUN": str(run.path), "PATH": f"{folder}/bin:/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    orders = (folder / "orders").read_text().splitlines() if (folder / "orders").exists() else []
    return done.returncode, done.stderr, orders


@pytest.mark.parametrize(
    ("excluded", "environ", "job", "wanted"),
    [
        ("(null)", {}, "17", "n3"),
        ("n[7-8]", {}, "17", "n[7-8],n3"),
        ("(null)", {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}, "15_2", "n3"),
    ],
    ids=["a job", "with nodes left out", "an array member"],
)
def test_job_of_a_run_that_has_trained_goes_back_into_the_queue_without_its_node(
    tmp_path: Path, excluded: str, environ: dict[str, str], job: str, wanted: str
) -> None:
    run = make_run(tmp_path)
    code, said, orders = meet_unfit_node(tmp_path, run, excluded, **environ)
    assert (code, said) == (2, f"{WHY}\nn3 is left out, and the job goes back into the queue\n")
    assert orders == [f"show job {job}", f"requeue {job}", f"update JobId={job} ExcNodeList={wanted}"]
    event = run.read_events()[-1]
    assert {**event, "time": ""} == {
        "time": "", "event": "node_unfit", "attempt": 0, "job_id": job, "node": "n3", "reason": WHY.replace('"', ""),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trained_with", "environ"),
    [("/opt/other", {}), ("/opt/python", {"SLURM_JOB_ID": ""})],
    ids=["never trained with this interpreter", "no job"],
)
def test_run_that_has_not_trained_like_this_ends_with_2(
    tmp_path: Path, trained_with: str, environ: dict[str, str]
) -> None:
    run = make_run(tmp_path, trained_with=trained_with)
    before = run.events.read_text()
    assert meet_unfit_node(tmp_path, run, **environ) == (2, f"{WHY}\n", [])
    assert run.events.read_text() == before


def test_sixth_unfit_node_in_a_row_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(MAX_SPOILT_ATTEMPTS):
        assert meet_unfit_node(tmp_path, run)[1].endswith("back into the queue\n")
    assert meet_unfit_node(tmp_path, run)[:2] == (2, f"{WHY}\n")
    run.append_event("first_step", attempt=12, job_id="17", step=40)
    assert meet_unfit_node(tmp_path, run)[1].endswith("back into the queue\n")


def test_event_of_a_shell_is_a_line_like_all_others(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    meet_unfit_node(tmp_path, run)
    line = run.events.read_text().splitlines()[-1]
    assert json.dumps(json.loads(line), ensure_ascii=False) == line
