"""A run whose storage is full when its job has to come back: what can't be written keeps no job from the queue.

Sisters: the verdict, the events of an end, the script and the event of a successor, the next start's verdict on the
attempt: here and in tests/test_history.py.  A claim that can't be written ends the job: without it nothing may train.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from tests import training
from tests.slurm.test_comeback import check_equal, environ, hold_still, preempt, start_run, undisturbed, where
from tests.slurm.test_successors import SUCCESSOR, jobs_of, state_of, successor_of, wait_until_finished

__all__ = ["environ", "preempt", "undisturbed"]  # fixtures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "small", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    training.wait_for("nobody to use the disk", lambda: subprocess.run(["umount", str(disk)]).returncode == 0)


def fill(disk: Path) -> Path:
    """Take all that is left; returns the file to remove."""
    path = disk / "filler"
    with path.open("wb") as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(file.fileno(), b"x" * size)
            except OSError:
                continue
    return path


@pytest.mark.parametrize("mode", ["requeue", pytest.param("successor", marks=pytest.mark.long)])
def test_full_disk_keeps_no_run_from_coming_back(
    mode: str,
    small_disk: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    preempt: Callable[[], None],
) -> None:
    more = SUCCESSOR if mode == "successor" else ""
    run, job_id = start_run(small_disk, staged_data, environ, where("low-nograce" if more else "low", more=more))
    waiting = successor_of(run) if more else job_id
    hold_still(run)
    filler = fill(small_disk)
    preempt()
    training.wait_for("the job to leave its nodes", lambda: state_of(job_id, environ) in ("PENDING", "PREEMPTED"))
    assert not run.verdict(1).exists()
    filler.unlink()
    wait_until_finished(run, environ)
    cause = json.loads(run.verdict(1).read_text())["cause"]
    assert cause in ("preempted", "lost")  # as the log has it, unless there was no room for that line either
    summary = check_equal(run, undisturbed, [cause])
    assert summary["attempts"] == 2
    assert jobs_of(run)[:2] == ([job_id, waiting] if more else [job_id])
