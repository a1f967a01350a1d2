"""Whole runs with train.tensorboard on this machine: killed, stopped and resumed, and without the package."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from tests import training
from tests.executables import put_answer
from tests.test_mirror import lines_of, mirrored
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, submit, write_spec

MISSING = (
    f"train.tensorboard: the package tensorboard is not installed for {sys.executable}; install it "
    f"({sys.executable} -m pip install tensorboard), or leave the key out"
)


def without_tensorboard(folder: Path) -> dict[str, str]:
    """An environment whose interpreters find no tensorboard."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['tensorboard'] = None\n")
    return environment(folder, {"PYTHONPATH": str(folder / "hidden")})


def test_missing_package_is_told_before_anything_is_submitted(tmp_path: Path, staged_data: Path) -> None:
    environ = without_tensorboard(tmp_path)
    put_answer(tmp_path / "bin", "sbatch", "17\n")
    environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
    spec = write_spec(tmp_path, staged_data, "time_limit: 5")
    done = submit(spec, "train.tensorboard=true", environ=environ)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MISSING}\n")
    assert not (tmp_path / "runs").exists()
    assert submit(spec, environ=environ).returncode == 0


def test_missing_package_ends_the_program_at_its_start(tmp_path: Path, staged_data: Path) -> None:
    words = command("jobs.train", write_spec(tmp_path, staged_data), "train.tensorboard=true")
    done = subprocess.run(
        words, env=without_tensorboard(tmp_path), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.split(" E ")[1] == f"{MISSING}\n"
    assert not (tmp_path / "runs").exists()


def start(folder: Path, *words: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command("cluster.submit", *words),
        env=environment(folder),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_step(run: RunFolder, step: int) -> None:
    training.wait_for(f"step {step}", lambda: training.last_step(run) >= step)


@pytest.mark.long
def test_event_files_hold_each_step_once_after_three_restarts(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder
) -> None:
    process = start(tmp_path, write_spec(tmp_path, staged_data), "train.tensorboard=true")
    run = training.wait_for_step(tmp_path, 9)
    training.kill_all(run)
    process.wait()

    process = start(tmp_path, "--resume", run.path)
    wait_for_step(run, 18)
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, 75)

    process = start(tmp_path, "--resume", run.path)
    wait_for_step(run, 30)
    training.kill_all(run)
    process.wait()

    assert submit("--resume", run.path, environ=environment(tmp_path)).returncode == 0
    assert run.latest_attempt() == 4
    assert mirrored(run) == lines_of(run)
    assert [step for step, _, _ in mirrored(run)] == list(range(1, TOTAL_STEPS + 1))
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)
    assert run.tensorboard.stat().st_mode & 0o077 == 0
