"""Faults on purpose: refused unless allowed, and each happens where it was asked for and once."""

import json
import socket
import subprocess
from pathlib import Path

import pytest

from cluster.spec import SpecError, dump_spec, load_spec
from tests import training
from tests.training import REPOSITORY, command, environment, events_of, last_step, newest_run, write_spec

ALLOWED = {"CLUSTER_ALLOW_FAULTS": "1"}
REFUSED = (
    "spec.yaml:3: faults: only drills and tests may break a run on purpose; set CLUSTER_ALLOW_FAULTS=1 in the "
    "environment, or leave it out"
)


def spec_with_fault(folder: Path, data: Path, do: str, more: str = "") -> Path:
    path = write_spec(folder, data)
    path.write_text(path.read_text() + f"faults:\n- {{at_step: 3, rank: 0, do: {do}{more}}}\n")
    return path


def train(spec: Path, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """One rank, for six steps with a save after each third."""
    environ = environment(folder, {**ALLOWED, **variables})
    return subprocess.run(words_for(spec), env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def words_for(spec: Path) -> list[str]:
    return command("jobs.train", spec, "train.max_steps=6", "train.warmup_epochs=0", "checkpoint.every_steps=3")


def test_faults_are_refused_unless_the_environment_allows_them(tmp_path: Path) -> None:
    text = "name: demo\ntime_limit: 60\nfaults: [{at_step: 5, rank: 0, do: kill}]\n"
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(Path("spec.yaml"), cwd=tmp_path)
    assert caught.value.problems == (REFUSED,)
    spec = load_spec(Path("spec.yaml"), cwd=tmp_path, allow_faults=True)
    assert [(fault.at_step, fault.rank, fault.do, fault.every_attempt) for fault in spec.faults] == [
        (5, 0, "kill", False)
    ]
    (tmp_path / "dumped.yaml").write_text(dump_spec(spec))
    assert load_spec(Path("dumped.yaml"), cwd=tmp_path, allow_faults=True) == spec


@pytest.mark.parametrize(("do", "exit_code"), [("raise", 1), ("kill", -9)])
def test_fault_happens_at_its_step(tmp_path: Path, staged_data: Path, do: str, exit_code: int) -> None:
    done = train(spec_with_fault(tmp_path, staged_data, do), tmp_path)
    run = newest_run(tmp_path)
    assert done.returncode == exit_code
    assert f"r00000 W breaks on purpose: {do} at step 3 of rank 0\n" in done.stderr
    assert last_step(run) == 3
    if do == "raise":
        assert json.loads((run.failures / "a0001_r00000.json").read_text())["kind"] == "exception"


def test_full_disk_costs_that_save_only(tmp_path: Path, staged_data: Path) -> None:
    done = train(spec_with_fault(tmp_path, staged_data, "enospc"), tmp_path)
    run = newest_run(tmp_path)
    assert done.returncode == 0, done.stderr
    (failed,) = events_of(run, "save_failed")
    assert (failed["step"], failed["reason"].startswith("step_00000003.pt was not saved: ")) == (3, True)
    assert [event["step"] for event in events_of(run, "checkpoint_saved")] == [6]
    assert sorted(path.name for path in run.checkpoints.glob("step_*")) == ["step_00000006.json", "step_00000006.pt"]


def test_rank_that_signals_itself_saves_and_leaves(tmp_path: Path, staged_data: Path) -> None:
    done = train(spec_with_fault(tmp_path, staged_data, "signal"), tmp_path)
    assert done.returncode == 75, done.stderr
    assert [event["signal"] for event in events_of(newest_run(tmp_path), "stopped")] == ["SIGUSR2"]


def test_paused_rank_goes_on_once_it_is_asked_to_stop(tmp_path: Path, staged_data: Path) -> None:
    spec = spec_with_fault(tmp_path, staged_data, "pause")
    log = tmp_path / "log"
    with log.open("w") as said:
        process = subprocess.Popen(words_for(spec), env=environment(tmp_path, ALLOWED), cwd=REPOSITORY, stderr=said)
    training.wait_for("the pause", lambda: "now breaks on purpose: pause" in log.read_text())
    process.terminate()
    assert process.wait() == 75
    (stopped,) = events_of(newest_run(tmp_path), "stopped")
    assert (stopped["signal"], 3 < stopped["step"] < 6) == ("SIGTERM", True)


def test_rank_0_killed_in_a_save_leaves_a_temporary_file_and_the_save_before(tmp_path: Path, staged_data: Path) -> None:
    spec = spec_with_fault(tmp_path, staged_data, "kill_save")
    spec.write_text(spec.read_text().replace("at_step: 3", "at_step: 4"))
    done = train(spec, tmp_path)
    assert done.returncode == -9, done.stderr
    left = sorted(path.name for path in newest_run(tmp_path).checkpoints.glob("step_*"))
    assert left == ["step_00000003.json", "step_00000003.pt", "step_00000006.pt.a0001.tmp"]


def test_stranger_on_the_first_port_is_passed_by_and_the_users_only_port_is_told(
    tmp_path: Path, staged_data: Path
) -> None:
    spec = spec_with_fault(tmp_path, staged_data, "port")
    assert train(spec, tmp_path).returncode == 0
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    done = train(spec, tmp_path, MASTER_PORT=str(port))
    assert done.returncode == 1
    assert f"rank 0 can bind no port on {socket.gethostname()}: {port}: Address already in use" in done.stderr


def test_killed_while_it_saves_the_run_goes_on_from_the_checkpoint_before(tmp_path: Path, staged_data: Path) -> None:
    spec = spec_with_fault(tmp_path, staged_data, "slow_save")
    spec.write_text(spec.read_text().replace("at_step: 3", "at_step: 6"))
    words = command("jobs.train", spec, "train.max_steps=9", "train.warmup_epochs=0", "checkpoint.every_steps=3")
    process = subprocess.Popen(words, env=environment(tmp_path, ALLOWED), cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    training.wait_for(
        "the temporary file", lambda: list((tmp_path / "runs").glob("*/*/checkpoints/step_00000006.pt.*.tmp"))
    )
    process.kill()
    assert process.wait() == -9
    run = newest_run(tmp_path)
    assert len(list(run.checkpoints.glob("*.tmp"))) == 1
    again = command("jobs.train", run.spec, "--run-dir", run.path)
    subprocess.run(again, env=environment(tmp_path, ALLOWED), cwd=REPOSITORY, check=True, capture_output=True)
    assert events_of(run, "resumed")[0]["from_step"] == 3
    assert list(run.checkpoints.glob("*.tmp")) == []
    assert json.loads(run.summary.read_text())["steps"] == 9
