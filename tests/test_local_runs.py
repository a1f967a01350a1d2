"""Whole runs on this machine, at 4 ranks with several gradient buckets unless said otherwise."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.plan import make_plan, read_plan, write_plan
from cluster.rank import draw_master_ports
from cluster.runs import RunFolder, read_lines, write_atomic
from cluster.spec import dump_spec, load_spec
from jobs.digest import weights_sha256
from jobs.model import build_model
from tests import training
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, events_of, submit, summary_of, write_spec

KILL_SEED = 20  # of the step at which the run is killed


@pytest.fixture
def background() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts and leaves running."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start_submit(
    folder: Path, spec: Path, background: list[subprocess.Popen[str]], *words: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command("cluster.submit", spec, *words),
        env=environment(folder),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    background.append(process)
    return process


def prepared_run(folder: Path, spec_path: Path, run_id: str) -> RunFolder:
    """A run folder as submit leaves it, with nothing started."""
    spec = load_spec(spec_path, cwd=REPOSITORY)
    run = RunFolder(spec.run_root / spec.name / run_id)
    run.make()
    write_atomic(run.spec, dump_spec(spec))
    run.append_event("submitted", attempt=0, job_id="7", route="local")
    write_plan(make_plan(spec, run, python=command("")[0]), run)
    return run


def supervise(run: RunFolder, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = environment(folder, {"SUBMITIT_LOCAL_JOB_ID": "7"})
    return subprocess.run(
        command("cluster.supervise", run.path), env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def digests(run: RunFolder) -> tuple[str, str]:
    summary = summary_of(run)
    return summary["weights_sha256"], summary["samples_sha256"]


def test_undisturbed_run_says_what_it_did(undisturbed: RunFolder) -> None:
    summary = summary_of(undisturbed)
    told = [summary[key] for key in ("status", "steps", "epochs", "world_size", "attempts", "lost_steps", "bit_exact")]
    assert told == ["finished", TOTAL_STEPS, 4, 4, 1, 0, True]
    assert [line["step"] for line in read_lines(undisturbed.metrics)] == list(range(1, TOTAL_STEPS + 1))
    assert 0 < summary["goodput"] < 1
    assert [event["event"] for event in undisturbed.read_events()][:4] == [
        "submitting",
        "submitted",
        "attempt_started",
        "first_step",
    ]


def test_final_model_loads_into_the_bare_net(undisturbed: RunFolder) -> None:
    model = build_model("small", 10)
    model.load_state_dict(torch.load(undisturbed.model_final, weights_only=True))
    assert weights_sha256(model.state_dict()) == summary_of(undisturbed)["weights_sha256"]


def test_checkpoints_kept_are_the_newest_two_and_the_best(undisturbed: RunFolder) -> None:
    best = json.loads((undisturbed.checkpoints / "best.json").read_text())["step"]
    kept = {int(path.stem.removeprefix("step_")) for path in undisturbed.checkpoints.glob("step_*.pt")}
    assert kept == {best, 42, TOTAL_STEPS}


def test_killed_run_resumed_by_hand_equals_the_undisturbed_one(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, background: list[subprocess.Popen[str]]
) -> None:
    kill_at = random.Random(KILL_SEED).randint(TOTAL_STEPS // 5, TOTAL_STEPS * 4 // 5)
    process = start_submit(tmp_path, write_spec(tmp_path, staged_data), background)
    run = training.wait_for_step(tmp_path, kill_at)
    assert training.kill_all(run) >= 5  # four ranks and their supervisor
    assert process.wait() == 1
    reached = max(training.last_step(run), json.loads(run.heartbeat.read_text())["step"])
    saved = max(int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("step_*.json"))
    assert TOTAL_STEPS / 5 <= reached <= TOTAL_STEPS * 0.9

    done = submit("--resume", run.path, environ=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = summary_of(run)
    assert digests(run) == digests(undisturbed)
    assert (summary["attempts"], summary["lost_steps"], summary["bit_exact"]) == (2, reached - saved, True)
    assert events_of(run, "first_step")[1]["step"] == saved + 1 > 1
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)


def test_ctrl_c_saves_and_the_resumed_run_equals_the_undisturbed_one(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, background: list[subprocess.Popen[str]]
) -> None:
    process = start_submit(tmp_path, write_spec(tmp_path, staged_data), background)
    run = training.wait_for_step(tmp_path, 10)
    # Held still until the request has gone its way: a run of seconds could be over first.
    ranks = [pid for pid in training.processes_of(run) if is_rank(pid)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    training.wait_for("TERM to wait for the ranks", lambda: all(map(has_pending_signal, ranks)))
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    stopped_at = events_of(run, "stopped")[0]["step"]
    assert f"saved at step {stopped_at}; to go on: python -m cluster.submit --resume {run.path}" in errors

    assert submit("--resume", run.run_id, environ=environment(tmp_path)).returncode == 0
    assert digests(run) == digests(undisturbed)
    assert summary_of(run)["lost_steps"] == 0
    assert events_of(run, "first_step")[1]["step"] == stopped_at + 1
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)


def is_rank(pid: int) -> bool:
    """Whether a process is a rank, and not a supervisor."""
    return b"\0jobs.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def has_pending_signal(pid: int) -> bool:
    """Whether a signal waits for a process; proc(5), ShdPnd."""
    return int(Path(f"/proc/{pid}/status").read_text().split("ShdPnd:")[1].split()[0], 16) != 0


@pytest.mark.long
def test_reader_who_leaves_ends_the_run_saved(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    line = f"{' '.join(command('cluster.submit', spec, 'train.epochs=400'))} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], env=environment(tmp_path), cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    run = training.newest_run(tmp_path)
    assert done.stdout == f"submitted to this machine; run folder: {run.path}\n75\n"
    step = events_of(run, "stopped")[0]["step"]
    said = f"stopped (SIGTERM), saved at step {step}; to go on: python -m cluster.submit --resume {run.path}"
    assert done.stderr.splitlines() == ["stopping: the run is saved first", said]
    training.wait_for("all processes to end", lambda: not training.processes_of(run))


@pytest.mark.long
def test_other_seed_gives_other_digests_and_one_rank_the_same_samples(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder
) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = [command("jobs.train", spec), command("jobs.train", spec, "train.seed=1", "train.max_steps=15")]
    for words_of_one in words:
        subprocess.run(words_of_one, env=environment(tmp_path), cwd=REPOSITORY, check=True, capture_output=True)
    one_rank, other_seed = sorted((tmp_path / "runs").glob("*/*"))
    assert digests(RunFolder(one_rank))[1] == digests(undisturbed)[1]
    assert summary_of(RunFolder(one_rank))["world_size"] == 1
    weights, samples = digests(RunFolder(other_seed))
    assert weights != digests(undisturbed)[0]
    assert samples != digests(undisturbed)[1]
    assert summary_of(RunFolder(other_seed))["steps"] == 15


def test_finished_run_starts_nothing_and_can_be_made_longer(tmp_path: Path, staged_data: Path) -> None:
    environ = environment(tmp_path)
    spec = write_spec(tmp_path, staged_data, where="cluster: local\ntasks_per_node: 2")
    assert submit(spec, "train.epochs=1", environ=environ).returncode == 0
    run = training.newest_run(tmp_path)

    again = submit("--resume", run.path, environ=environ)
    assert (again.returncode, again.stderr) == (0, f"{run.path} is finished; nothing to do\n")
    assert supervise(run, tmp_path).returncode == 0
    assert run.latest_attempt() == 1

    refused = submit("--resume", run.path, "train.lr=0.2", environ=environ)
    assert refused.returncode == 2
    assert refused.stderr.startswith("train.lr: fixed since the run began; a resumption may change ")

    assert submit("--resume", run.path, "train.epochs=2", environ=environ).returncode == 0
    summary = summary_of(run)
    assert (summary["epochs"], summary["attempts"], summary["bit_exact"]) == (2, 2, False)
    assert json.loads((run.path / "summary.a0001.json").read_text())["epochs"] == 1
    assert load_spec(run.path / "spec.a0001.yaml", cwd=run.path).train.epochs == 1
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, 23))


def test_exception_in_one_rank_ends_the_run_and_is_what_the_user_sees(tmp_path: Path, staged_data: Path) -> None:
    run = prepared_run(tmp_path, write_spec(tmp_path, staged_data), "faulty")
    write_plan(training.with_faulty_rank(read_plan(run), rank=1, at_step=5), run)
    done = supervise(run, tmp_path)
    ended = time.time()

    assert done.returncode == 1
    record = json.loads((run.failures / "a0001_r00001.json").read_text())
    told = {key: record[key] for key in ("rank", "attempt", "step", "kind", "exit_code", "exception")}
    assert told == {
        "rank": 1, "attempt": 1, "step": 5, "kind": "exception", "exit_code": 1,
        "exception": "ArithmeticError: broken on purpose at step 5",
    }  # fmt: skip
    failed = events_of(run, "attempt_failed")[0]
    assert (failed["rank"], failed["cause"]) == (1, "exception")
    assert failed["reason"] == f"rank 1 on {socket.gethostname()}: ArithmeticError: broken on purpose at step 5"
    log = run.attempt_log(1).read_text()
    assert any(" r00001 E ArithmeticError: broken on purpose at step 5" in line for line in log.splitlines())
    assert ended - float(record["traceback"].rstrip().rpartition("second line, ")[2]) < 10
    assert not training.processes_of(run)


@pytest.mark.long
def test_attempt_that_was_held_still_changes_no_file_once_it_has_a_successor(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, background: list[subprocess.Popen[str]]
) -> None:
    run = prepared_run(tmp_path, write_spec(tmp_path, staged_data), "stopped")
    words = command("cluster.supervise", run.path)
    environ = environment(tmp_path, {"SUBMITIT_LOCAL_JOB_ID": "7"})
    background.append(
        subprocess.Popen(
            words, env=environ, cwd=REPOSITORY, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, text=True
        )
    )
    training.wait_for("step 10", lambda: training.last_step(run) >= 10)
    old = training.processes_of(run)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    assert supervise(run, tmp_path).returncode == 0
    files = contents(run)
    for pid in old:
        os.kill(pid, signal.SIGCONT)
    assert background[-1].wait() == 1
    training.wait_for("the old ranks to go", lambda: not training.processes_of(run))
    assert contents(run) == files
    assert digests(run) == digests(undisturbed)
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)


def contents(run: RunFolder) -> dict[str, bytes]:
    """Every file of a run but the logs, and but what a process was in the middle of writing: it takes that back."""
    found = (path for path in sorted(run.path.rglob("*")) if path.is_file() and run.logs not in path.parents)
    files = (path for path in found if path.suffix != ".tmp")
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


@pytest.mark.long
def test_failure_budget_is_spent_and_the_run_then_fails_with_its_first_cause(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    spec.write_text(spec.read_text() + "requeue:\n  max_failures: 2\n")
    run = prepared_run(tmp_path, spec, "budget")
    write_plan(training.with_faulty_rank(read_plan(run), rank=1, at_step=10), run)
    assert supervise(run, tmp_path).returncode == 1
    verdicts = [json.loads(run.verdict(number).read_text()) for number in range(1, run.latest_attempt() + 1)]
    told = [(verdict["cause"], verdict["rank"], verdict["action"], verdict["checkpoint_step"]) for verdict in verdicts]
    assert told == [("exception", 1, "restart", 7), ("exception", 1, "restart", 7), ("exception", 1, "stop", 7)]
    assert verdicts[-1]["reason"].endswith(": ArithmeticError: broken on purpose at step 10")


def test_taken_ports_cost_seconds_and_not_the_job(tmp_path: Path, staged_data: Path) -> None:
    run = prepared_run(tmp_path, write_spec(tmp_path, staged_data, where="cluster: local\ntasks_per_node: 2"), "ports")
    ports = draw_master_ports("7.ports.1")
    silent = socket.create_server(("0.0.0.0", ports[0]))  # accepts, by its backlog, and never answers
    other = TCPStore("127.0.0.1", ports[1], is_master=True, wait_for_workers=False)
    other.set("cluster/token", "another run's")
    try:
        assert supervise(run, tmp_path).returncode == 0
    finally:
        silent.close()
        del other
    assert summary_of(run)["world_size"] == 2


def test_gpus_that_are_not_there_are_an_error_and_no_cpu_run(tmp_path: Path, staged_data: Path) -> None:
    where = "cluster: local\ngpus_per_node: 2"
    path = write_spec(tmp_path, staged_data, where=where)
    path.write_text(path.read_text().replace("device: cpu", "device: auto"))
    run = prepared_run(tmp_path, path, "gpus")
    environ = environment(tmp_path, {"SUBMITIT_LOCAL_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        command("cluster.supervise", run.path), env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    verdict = json.loads(run.verdict(1).read_text())
    assert (verdict["cause"], verdict["exit_code"]) == ("usage", 2)
    assert "sees 0 GPUs" in verdict["reason"]


def test_data_set_that_is_not_staged_stops_the_program_with_the_command(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, tmp_path / "nothing")
    done = subprocess.run(
        command("jobs.train", spec),
        env=environment(tmp_path),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    missing = tmp_path / "nothing/staged/synthetic_640_128.pt"
    assert done.stderr.split(" E ")[1] == f"{missing} does not exist: stage it first: python -m jobs.stage SPEC\n"
    assert not (tmp_path / "runs").exists()


def test_torchrun_starts_the_same_program(tmp_path: Path, staged_data: Path, undisturbed: RunFolder) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = command("torch.distributed.run", "--nproc-per-node=2", "-m", "jobs.train", spec, "train.max_steps=12")
    subprocess.run(words, env=environment(tmp_path), cwd=REPOSITORY, check=True, capture_output=True)
    summary = summary_of(training.newest_run(tmp_path))
    assert (summary["world_size"], summary["steps"], summary["epochs"]) == (2, 12, 1)


def test_term_to_torchrun_saves_on_all_ranks_before_it_kills_them(
    tmp_path: Path, staged_data: Path, background: list[subprocess.Popen[str]]
) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = command("torch.distributed.run", "--nproc-per-node=2", "-m", "jobs.train", spec, "train.epochs=1000")
    agent = subprocess.Popen(
        words,
        env=environment(tmp_path),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    background.append(agent)
    training.wait_for("a run", lambda: list((tmp_path / "runs").glob("*/*/metrics.jsonl")))
    run = training.newest_run(tmp_path)
    training.wait_for("step 3", lambda: training.last_step(run) >= 3)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() != 0
    told = run.read_events()[-2:]
    assert [event["event"] for event in told] == ["checkpoint_saved", "stopped"]
    assert told[0]["step"] == told[1]["step"]


def test_nothing_of_a_run_holds_the_value_of_a_secret(undisturbed: RunFolder) -> None:
    (value,) = training.SECRETS.values()
    found = [path for path in undisturbed.path.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]
    assert found == []


def test_run_folder_and_all_in_it_are_their_owners_alone(undisturbed: RunFolder) -> None:
    assert undisturbed.path.stat().st_mode & 0o777 == 0o700
    assert [path for path in undisturbed.path.rglob("*") if path.stat().st_mode & 0o077] == []
