"""Supervisor: what it makes of a job's variables, and attempts whose ranks are small real processes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.address import AddressError
from cluster.allocation import AllocationError
from cluster.attempt_start import SuperviseError, find_master, read_shape
from cluster.launch import Shape
from cluster.plan import make_plan, read_plan, write_plan
from cluster.runs import RunFolder, write_json
from cluster.spec import dump_spec, load_spec
from cluster.supervise import find_plan

REPOSITORY = Path(__file__).parents[1]
SLURM = "name: demo\nnodes: 2\ntasks_per_node: 3\ntime_limit: 60\n"
LOCAL = "name: demo\ncluster: local\ntasks_per_node: 2\n"


def make_run(folder: Path, text: str = LOCAL, rank: str = "pass") -> RunFolder:
    """A run as submit leaves it, whose ranks are some lines of Python that know `run` and `number`."""
    (folder / "source.yaml").write_text(text)
    spec = load_spec(Path("source.yaml"), cwd=folder)
    run = RunFolder(folder / "demo" / "a")
    run.make()
    run.spec.write_text(dump_spec(spec))
    head = (
        "import os, pathlib, sys, time; from cluster.runs import RunFolder, write_json\n"
        f"run = RunFolder(pathlib.Path({str(run.path)!r})); number = int(os.environ['RANK'])\n"
    )
    plan = make_plan(spec, run, python=sys.executable)
    write_plan(replace(plan, rank=(sys.executable, "-c", head + rank)), run)
    return run


def supervise(run: RunFolder, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cluster.supervise", str(run.path), *words],
        cwd=REPOSITORY,
        env={**os.environ, "SUBMITIT_LOCAL_JOB_ID": "17", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def said(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The lines of a supervisor's log without their times."""
    return [line.partition(" ")[2] for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("variables", "nodes", "shape"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, ("n1", "n2"), Shape(2, 4, 2)),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, ("n1", "n2"), Shape(2, 3, None)),
        ({"SLURM_TASKS_PER_NODE": "1(x2)"}, ("n1", "n2"), Shape(2, 6, 3)),
    ],
    ids=["even", "uneven", "allocated without a number of tasks"],
)
def test_allocation_says_how_many_ranks_start_where(
    tmp_path: Path, variables: dict[str, str], nodes: tuple[str, ...], shape: Shape
) -> None:
    _, plan = find_plan(make_run(tmp_path, SLURM).path, [], {})
    assert read_shape(plan, {"SLURM_JOB_NODELIST": "n[1-2]", **variables}) == (nodes, shape)


def test_missing_variable_of_a_job_is_named(tmp_path: Path) -> None:
    _, plan = find_plan(make_run(tmp_path, SLURM).path, [], {})
    with pytest.raises(SuperviseError) as caught:
        read_shape(plan, {})
    assert str(caught.value) == "SLURM_JOB_NODELIST is not set: start the supervisor inside a Slurm job"


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_HET_SIZE": "2"}, {"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_DISTRIBUTION": "cyclic"}],
    ids=str,
)
def test_job_of_a_shape_that_is_not_supported_is_refused_on_every_route_before_anything_is_made(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    (name, value) = next(iter(variables.items()))
    environ = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", **variables}
    for target in (make_run(tmp_path, SLURM).path, tmp_path / "source.yaml"):
        with pytest.raises(AllocationError) as caught:
            find_plan(target, [], environ)
        assert str(caught.value).startswith(f"{name}={value}")
    assert not (tmp_path / "runs").exists()
    find_plan(make_run(tmp_path).path, [], environ)  # a local run in such a job's shell


def test_source_spec_outside_a_job_is_an_error_that_names_the_other_command(tmp_path: Path) -> None:
    with pytest.raises(SuperviseError) as caught:
        find_plan(tmp_path / "my spec.yaml", [], {})
    assert str(caught.value) == (
        f"SLURM_JOB_ID is not set: {tmp_path}/my spec.yaml can be supervised inside a Slurm job only; "
        f"use python -m cluster.submit '{tmp_path}/my spec.yaml'"
    )


def test_values_for_a_frozen_spec_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    done = supervise(run, "train.lr=1")
    assert done.returncode == 2
    assert said(done) == [
        f"super E train.lr=1: the spec of {run.path} is frozen; give values with a spec only",
    ]
    assert run.latest_attempt() == 0


def test_commands_of_slurm_that_setup_has_taken_away_end_the_run_with_a_verdict_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLURM)
    nodes = {"SLURM_JOB_NODELIST": "node.invalid", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    done = supervise(run, PATH=str(tmp_path), SLURM_JOB_ID="17", **nodes)
    verdict = json.loads(run.verdict(1).read_text())
    assert (done.returncode, verdict["outcome"], verdict["cause"], verdict["action"]) == (2, "failed", "usage", "leave")
    assert verdict["reason"] == (
        f"srun, squeue, scontrol: not on PATH after setup ({tmp_path}); load your site's module of Slurm there, or "
        "leave PATH as it was"
    )


@pytest.mark.parametrize(("may_pass", "answers"), [(True, 2), (False, 1)], ids=["may pass", "for good"])
def test_name_that_may_resolve_later_is_looked_up_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_pass: bool, answers: int
) -> None:
    _, plan = find_plan(make_run(tmp_path, SLURM).path, [], {})
    asked: list[object] = []

    def look_up(nodes: object, environ: object) -> str:
        asked.append(nodes)
        if len(asked) < 2:
            raise AddressError("node n1: no address", may_pass=may_pass)
        return "10.0.0.1"

    monkeypatch.setattr("cluster.attempt_start.address.master_address", look_up)
    monkeypatch.setattr("cluster.attempt_start.ASK_AGAIN_S", 0.0)
    if may_pass:
        assert find_master(plan, ["n1"], {}) == "10.0.0.1"
    else:
        with pytest.raises(AddressError):
            find_master(plan, ["n1"], {})
    assert len(asked) == answers


@pytest.mark.parametrize("visible", ["MIG-2,MIG-5", None])
def test_local_ranks_see_the_gpus_of_the_submission_and_not_those_that_submitit_chose(
    tmp_path: Path, visible: str | None
) -> None:
    see = "(run.path / f'seen{number}').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'))"
    run = make_run(tmp_path, rank=f"{see}; number or write_json(run.summary, {{}})")
    write_plan(replace(read_plan(run), maybe_visible_gpus=visible), run)
    assert supervise(run, CUDA_VISIBLE_DEVICES="0,1").returncode == 0
    assert [(run.path / f"seen{number}").read_text() for number in (0, 1)] == [visible or "unset"] * 2


@pytest.mark.parametrize(
    ("rank", "exit_code", "cause", "reason"),
    [
        ("write_json(run.summary, {}) if number == 0 else None", 0, "finished", "all steps done"),
        (
            "run.append_event('stopped', attempt=1, job_id='17', step=40, signal='SIGTERM') if number == 0 else None;"
            " sys.exit(75)",
            75,
            "stopped",
            "stopped (SIGTERM), saved at step 40",
        ),
        (
            "if number == 0: time.sleep(600)\n"
            "(run.failures / 'a0001_r00001.json').write_text('{\"rank\": 1, \"ki'); sys.exit(3)",
            1,
            "unknown",
            "the ranks ended without a word; rank 0: -9, rank 1: 3",
        ),
        (
            "sys.exit(3) if number == 1 else time.sleep(600)",
            1,
            "unknown",
            "the ranks ended without a word; rank 0: -9, rank 1: 3",
        ),
    ],
    ids=["finished", "stopped", "half a record", "no word"],
)
def test_end_of_the_ranks_becomes_a_verdict_and_the_jobs_exit_code(
    tmp_path: Path, rank: str, exit_code: int, cause: str, reason: str
) -> None:
    run = make_run(tmp_path, rank=rank)
    done = supervise(run)
    verdict = json.loads(run.verdict(1).read_text())
    assert (done.returncode, verdict["exit_code"]) == (exit_code, exit_code)
    assert (verdict["attempt"], verdict["job_id"], verdict["cause"], verdict["reason"]) == (1, "17", cause, reason)
    expected = ["attempt_started", "attempt_failed"] if exit_code == 1 else ["attempt_started"]
    assert [event["event"] for event in run.read_events() if event["event"] != "stopped"] == expected


def test_superseded_supervisor_writes_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank="time.sleep(600) if number == 0 else run.claim_attempt({}); sys.exit(1)")
    done = supervise(run)
    assert done.returncode == 1
    assert said(done)[-1] == f"super E attempt 2 owns {run.path}; attempt 1 writes nothing more"
    assert not run.verdict(1).exists()
    assert [event["event"] for event in run.read_events()] == ["attempt_started"]


def test_finished_run_starts_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, {})
    done = supervise(run)
    assert (done.returncode, said(done)) == (0, [f"super I {run.path} is finished; nothing to do"])
    assert run.latest_attempt() == 0


KILLED_ONCE = """
if run.latest_attempt() == 1:
    os.kill(os.getpid(), 9) if number == 1 else time.sleep(600)
write_json(run.summary, {}) if number == 0 else None
"""


def test_killed_rank_is_started_again_in_the_same_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank=KILLED_ONCE)
    assert supervise(run).returncode == 0
    verdicts = [json.loads(run.verdict(number).read_text()) for number in (1, 2)]
    told = [(verdict["cause"], verdict["rank"], verdict["action"]) for verdict in verdicts]
    assert told == [("killed", 1, "restart"), ("finished", None, "leave")]
    events = [event["event"] for event in run.read_events()]
    assert events == ["attempt_started", "attempt_failed", "restarted", "attempt_started"]


def test_two_attempts_in_a_row_without_progress_end_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank="os.kill(os.getpid(), 9)")
    assert supervise(run).returncode == 1
    verdict = json.loads(run.verdict(2).read_text())
    assert (run.latest_attempt(), verdict["action"]) == (2, "stop")
    assert verdict["why"] == "no progress in 2 attempts: the newest checkpoint is still of step 0"


FAILS = """
if number == 1:
    write_json(run.checkpoints / 'step_00000040.json', {})
    content = {'rank': 1, 'host': 'here', 'time': '', 'kind': 'exception', 'exception': 'ValueError: x', 'exit_code': 1}
    write_json(run.failures / f"a{run.latest_attempt():04d}_r00001.json", content)
    sys.exit(1)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("max_failures", "actions", "why"),
    [
        (0, ["stop"], "1 failures since the last progress, requeue.max_failures is 0"),
        (1, ["restart", "stop"], "2 failures since the last progress, requeue.max_failures is 1"),
    ],
)
def test_failure_of_the_program_is_tried_again_as_often_as_the_spec_says(
    tmp_path: Path, max_failures: int, actions: list[str], why: str
) -> None:
    run = make_run(tmp_path, f"{LOCAL}requeue: {{max_failures: {max_failures}}}\n", FAILS)
    assert supervise(run).returncode == 1
    verdicts = [json.loads(run.verdict(number + 1).read_text()) for number in range(len(actions))]
    assert [verdict["action"] for verdict in verdicts] == actions
    assert (verdicts[-1]["reason"], verdicts[-1]["why"]) == ("rank 1 on here: ValueError: x", why)
    assert (run.latest_attempt(), verdicts[-1]["checkpoint_step"]) == (len(actions), 40)


def test_failures_in_an_earlier_job_of_the_run_count_so_restarts_and_requeues_do_not_multiply(tmp_path: Path) -> None:
    run = make_run(tmp_path, f"{LOCAL}requeue: {{max_failures: 1}}\n", FAILS)
    run.claim_attempt({"job_id": "16"})
    write_json(run.verdict(1), {"cause": "exception", "checkpoint_step": 40, "action": "restart", "job_id": "16"})
    assert supervise(run, SUBMITIT_LOCAL_JOB_ID="17").returncode == 1
    verdict = json.loads(run.verdict(2).read_text())
    why = "2 failures since the last progress, requeue.max_failures is 1"
    assert (run.latest_attempt(), verdict["action"], verdict["why"]) == (2, "stop", why)


def test_stop_that_comes_during_the_back_off_starts_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank=f"os.kill(os.getppid(), {signal.SIGTERM:d}); os.kill(os.getpid(), 9)")
    done = supervise(run)
    assert (done.returncode, run.latest_attempt()) == (1, 1)
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["action"], verdict["why"]) == ("leave", "there is no queue on this machine")
    assert [event["event"] for event in run.read_events()] == ["attempt_started", "attempt_failed"]


@pytest.mark.parametrize(
    ("mark", "exit_code", "said_last"),
    [
        ("stop.json", 75, "was stopped by its user; to go on: python -m cluster.submit --resume"),
        ("cancelled.json", 1, "was cancelled by its user"),
    ],
)
def test_mark_of_the_user_ends_a_supervisor_at_once(tmp_path: Path, mark: str, exit_code: int, said_last: str) -> None:
    run = make_run(tmp_path)
    write_json(run.path / mark, {"requeue": False})
    done = supervise(run)
    assert (done.returncode, run.latest_attempt()) == (exit_code, 0)
    assert said(done)[-1].removesuffix(f" {run.path}") == f"super I {run.path} {said_last}"


def test_attempt_whose_supervisor_died_gets_a_verdict_from_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank="write_json(run.summary, {}) if number == 0 else None")
    run.claim_attempt({})
    assert supervise(run).returncode == 0
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["cause"], verdict["action"], verdict["checkpoint_step"]) == ("lost", "leave", 0)
    assert run.latest_attempt() == 2
