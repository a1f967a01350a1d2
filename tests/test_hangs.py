"""Runs on this machine in which something hangs: they come back within moments and end as the undisturbed one did."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.plan import read_plan, write_plan
from cluster.runs import RunFolder
from tests import training
from tests.test_local_runs import digests, prepared_run, supervise
from tests.training import REPOSITORY, command, environment, events_of, submit, summary_of, write_spec

HOST = socket.gethostname()
STEP = 10  # done when a rank gets stuck
END_OF_EPOCH = 11  # where it is saved and evaluated
STEP_TIMEOUT_S = 4


def hasty_spec(folder: Path, data: Path, more: str = "", where: str = training.LOCAL) -> Path:
    """training.SPEC with short deadlines."""
    path = write_spec(folder, data, where)
    text = path.read_text().replace("train:\n", f"train:\n  step_timeout_s: {STEP_TIMEOUT_S}\n")
    path.write_text(text + more)
    return path


def stuck_run(
    folder: Path, data: Path, how: str, rank: int, *keys: tuple[str, str], where: str = training.LOCAL
) -> tuple[RunFolder, dict[str, Any]]:
    """Run with one rank that gets stuck in the first attempt; returns it with the verdict on that attempt."""
    spec = hasty_spec(folder, data, where=where)
    for section, line in keys:
        spec.write_text(spec.read_text().replace(f"{section}:\n", f"{section}:\n  {line}\n"))
    run = prepared_run(folder, spec, how)
    write_plan(
        training.with_stuck_rank(read_plan(run), how, rank, END_OF_EPOCH if how in ("evaluate", "save") else STEP), run
    )
    done = supervise(run, folder)
    assert done.returncode == 0, done.stderr
    return run, json.loads(run.verdict(1).read_text())


def check_comeback(run: RunFolder, undisturbed: RunFolder, verdict: dict[str, Any], rank: int) -> None:
    """The run was restarted here because of a rank's hang, and that changed nothing of its result."""
    assert (verdict["cause"], verdict["rank"], verdict["action"], verdict["exit_code"]) == ("hang", rank, "restart", 76)
    assert summary_of(run)["attempts"] == 2
    assert digests(run) == digests(undisturbed)
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)


def blocks_of(path: Path) -> dict[str, str]:
    """The paragraphs of a file of stacks by their first lines."""
    _, *blocks = path.read_text().split("\n\n")
    return {head: frames for head, _, frames in (block.strip().partition("\n") for block in blocks)}


@pytest.mark.long
def test_stopped_rank_is_named_and_the_run_comes_back_equal(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder
) -> None:
    spec = hasty_spec(tmp_path, staged_data, f"faults:\n- {{at_step: {STEP}, rank: 2, do: stop}}\n")
    done = submit(spec, environ=environment(tmp_path, {"CLUSTER_ALLOW_FAULTS": "1"}))
    assert done.returncode == 0, done.stderr
    run = training.newest_run(tmp_path)
    verdict = json.loads(run.verdict(1).read_text())
    check_comeback(run, undisturbed, verdict, 2)
    assert verdict["reason"].startswith(f"rank 2 on {HOST}: HangError: no answer for ")
    assert verdict["reason"].endswith("stacks: stacks/a0001.txt")
    record = json.loads((run.failures / "a0001_r00000.json").read_text())
    assert (record["kind"], record["rank"], record["reporter"], record["step"]) == ("hang", 2, 0, STEP)
    blocks = blocks_of(run.stacks_of(1))
    assert " in backward" in blocks["ranks 0-1,3, MainThread:"]
    assert next(head for head in blocks if head.startswith("rank 2: ")).startswith("rank 2: no answer for ")
    assert [path.name for path in run.failures.iterdir()] == ["a0001_r00000.json"]
    assert [event["cause"] for event in events_of(run, "restarted")] == ["hang"]


@pytest.mark.long
def test_stopped_rank_0_is_named_by_the_others(tmp_path: Path, staged_data: Path, undisturbed: RunFolder) -> None:
    spec = hasty_spec(tmp_path, staged_data, f"faults:\n- {{at_step: {STEP}, rank: 0, do: stop}}\n")
    done = submit(spec, environ=environment(tmp_path, {"CLUSTER_ALLOW_FAULTS": "1"}))
    assert done.returncode == 0, done.stderr
    run = training.newest_run(tmp_path)
    check_comeback(run, undisturbed, json.loads(run.verdict(1).read_text()), 0)
    assert sorted(path.name for path in run.stacks.iterdir()) == [f"a0001_r0000{rank}.txt" for rank in (1, 2, 3)]
    for rank in (1, 2, 3):
        assert " in backward" in blocks_of(run.stacks_of(1, rank))[f"rank {rank}, MainThread:"]
        record = json.loads((run.failures / f"a0001_r0000{rank}.json").read_text())
        assert (record["kind"], record["rank"], record["exit_code"]) == ("hang", 0, 76)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "rank", "frame"),
    [
        pytest.param("read", 1, " in read_from_nobody", id="stuck in a read"),
        pytest.param("read", 0, " in read_from_nobody", id="rank 0 stuck in a read"),
        pytest.param("skip", 2, " in backward", id="a collective that one rank skips"),
        pytest.param("evaluate", 3, " in read_from_nobody", id="stuck in an evaluation"),
    ],
)
def test_stuck_rank_is_named_by_its_stack(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, how: str, rank: int, frame: str
) -> None:
    run, verdict = stuck_run(tmp_path, staged_data, how, rank)
    check_comeback(run, undisturbed, verdict, rank)
    blocks = blocks_of(run.stacks_of(1))
    assert frame in blocks[f"rank {rank}, MainThread:"]
    assert len([head for head in blocks if head.endswith(", MainThread:")]) == 2


@pytest.mark.long
def test_rank_0_stuck_in_a_save_is_named(tmp_path: Path, staged_data: Path, undisturbed: RunFolder) -> None:
    run, verdict = stuck_run(tmp_path, staged_data, "save", 0, ("checkpoint", "save_timeout_s: 5"))
    check_comeback(run, undisturbed, verdict, 0)
    assert " in read_from_nobody" in blocks_of(run.stacks_of(1))["rank 0, MainThread:"]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_rank_that_holds_its_interpreter_is_named_and_leaves_its_stacks_in_the_log(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, rank: int
) -> None:
    run, verdict = stuck_run(tmp_path, staged_data, "hold", rank)
    check_comeback(run, undisturbed, verdict, rank)
    (dump,) = run.attempt_log(1).read_text().split("Timeout (0:00:")[1:]
    assert f'File "<rank {rank}>", line 1' in dump
    assert " in hold_the_interpreter\n" in dump


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "frame"), [("hold", " in hold_the_interpreter\n"), ("open", " in open_staged_from_nobody\n")]
)
def test_lone_rank_that_cannot_watch_itself_is_ended_by_its_alarm(
    tmp_path: Path, staged_data: Path, how: str, frame: str
) -> None:
    run, verdict = stuck_run(
        tmp_path, staged_data, how, 0, ("train", "start_timeout_s: 30"), where="cluster: local\ntasks_per_node: 1"
    )
    assert (verdict["cause"], verdict["rank"], verdict["action"], verdict["exit_code"]) == ("hang", 0, "restart", 76)
    assert summary_of(run)["attempts"] == 2
    assert frame in run.attempt_log(1).read_text()


@pytest.mark.long
def test_rank_that_never_starts_is_named(tmp_path: Path, staged_data: Path, undisturbed: RunFolder) -> None:
    run, verdict = stuck_run(tmp_path, staged_data, "never", 3, ("train", "start_timeout_s: 40"))
    check_comeback(run, undisturbed, verdict, 3)
    assert verdict["reason"].startswith("rank 3 on an unknown host: HangError: never came; nothing has moved for 4")
    assert verdict["reason"].endswith(" s in phase meeting, 40 s are allowed; stacks: stacks/a0001.txt")
    assert blocks_of(run.stacks_of(1))["rank 3: never came"] == ""


@pytest.mark.long
def test_job_that_was_suspended_for_longer_than_its_deadline_goes_on(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder
) -> None:
    run = prepared_run(tmp_path, hasty_spec(tmp_path, staged_data), "suspended")
    process = subprocess.Popen(
        command("cluster.supervise", run.path),
        env=environment(tmp_path, {"SUBMITIT_LOCAL_JOB_ID": "7"}),
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
    )
    training.wait_for(f"step {STEP}", lambda: training.last_step(run) >= STEP)
    ranks = [pid for pid in training.processes_of(run) if pid != process.pid]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(5 * STEP_TIMEOUT_S)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert process.wait() == 0
    assert digests(run) == digests(undisturbed)
    assert summary_of(run)["attempts"] == 1
    assert list(run.stacks.iterdir()) == []
