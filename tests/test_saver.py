"""Saves beside the training: on a disk that is full, full for a while, read-only, or just in time."""

import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.runs import RunFolder, read_lines
from cluster.signals import StopFlag
from cluster.spec import JobSpec
from jobs.checkpoint import load, read_manifest
from jobs.control import Control
from jobs.failure import kind_of
from jobs.finish import finish
from jobs.loop import Loop
from jobs.saver import SaveError
from tests.small_run import claim, lone_group, make_run, make_spec, metrics_of, start_attempt, undisturbed

group = pytest.fixture(scope="module")(lone_group)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return make_spec(tmp_path_factory.mktemp("saver"), every_steps=2, keep_last=9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; a checkpoint of the small net has 0.8."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "small", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def start_on(disk: Path, spec: JobSpec, group: dist.ProcessGroup, **checkpoint: Any) -> Loop:  # noqa: ANN401
    """An attempt whose run folder is on a disk."""
    settings = spec.checkpoint.model_copy(update=checkpoint)
    moved = spec.model_copy(update={"run_root": disk, "checkpoint": settings})
    run = make_run(moved)
    return start_attempt(moved, run, Control(group, StopFlag()), claim(run))


def fill(disk: Path, *, leaving: int) -> Path:
    """Write a file that leaves so many bytes free."""
    found = os.statvfs(disk)
    path = disk / "filler"
    path.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leaving)))
    return path


def events_of(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == name]


def test_checkpoint_holds_the_state_at_its_step_though_the_training_goes_on(
    spec: JobSpec, group: dist.ProcessGroup
) -> None:
    """The copy is held back until the next step has computed its gradients and wants to update the weights."""
    run = make_run(spec, "held_back")
    loop = start_attempt(spec, run, Control(group, StopFlag()), claim(run))
    may_copy = threading.Event()
    finish, wait = loop.saver._copy.finish, loop.saver._copy.wait
    weights: dict[int, dict[str, torch.Tensor]] = {}

    def finish_late() -> None:
        may_copy.wait()
        finish()

    def wait_and_let_go() -> None:
        may_copy.set()
        wait()
        may_copy.clear()
        weights[loop.state.step] = {name: part.clone() for name, part in loop.learner.model.named_parameters()}

    loop.saver._copy.finish, loop.saver._copy.wait = finish_late, wait_and_let_go  # type: ignore[method-assign]
    for _ in range(3):
        loop.step()
    may_copy.set()  # the third step ends an epoch and is saved, too
    loop.saver.wait()
    loop.recorder.stop_beating()
    kept = load(run.checkpoints, read_manifest(run.checkpoints, 2))
    assert list(weights) == [2]
    for name, part in weights[2].items():
        assert torch.equal(kept["model"][name], part)
        assert not torch.equal(part, dict(loop.learner.model.named_parameters())[name])
    assert [kept["state"]["step"], loop.state.step] == [2, 3]


def test_disk_that_is_full_for_a_while_costs_saves_and_no_line(
    small_disk: Path, spec: JobSpec, group: dist.ProcessGroup
) -> None:
    straight = undisturbed(spec, group, "straight")
    loop = start_on(small_disk, spec, group, max_failed_saves=9)
    loop.step()
    filler = fill(small_disk, leaving=0)
    for _ in range(3):
        loop.step()
    loop.saver.wait()
    assert loop.saver.failures == 3
    assert not list(loop.recorder.run.checkpoints.glob("*.tmp"))
    filler.unlink()
    assert loop.run()
    loop.recorder.stop_beating()
    run = loop.recorder.run
    assert metrics_of(run) == metrics_of(straight.recorder.run)
    assert [event["step"] for event in events_of(run, "checkpoint_saved")] == [6, 8]
    failed = events_of(run, "save_failed")
    assert [event["step"] for event in failed] == [2, 3, 4]


def test_run_that_can_save_no_more_stops_and_says_why(
    small_disk: Path, spec: JobSpec, group: dist.ProcessGroup
) -> None:
    loop = start_on(small_disk, spec, group, max_failed_saves=2)
    for _ in range(2):
        loop.step()
    loop.saver.wait()
    fill(small_disk, leaving=400_000)
    with pytest.raises(SaveError) as caught:
        loop.run()
    loop.recorder.stop_beating()
    run = loop.recorder.run
    reason = str(caught.value)
    assert reason.startswith(f"step_00000004.pt was not saved: {run.checkpoints}: No space left on device; ")
    assert reason.endswith(" are free")
    assert " bytes were wanted, " in reason
    assert sorted(path.name for path in run.checkpoints.glob("step_*")) == ["step_00000002.json", "step_00000002.pt"]


def test_full_disk_is_found_before_the_first_step(small_disk: Path, spec: JobSpec, group: dist.ProcessGroup) -> None:
    run = make_run(spec.model_copy(update={"run_root": small_disk}))
    fill(small_disk, leaving=200_000)
    with pytest.raises(SaveError) as caught:
        start_on(small_disk, spec, group)
    assert str(caught.value).startswith(f"trial of a save: {run.checkpoints}: No space left on device; ")
    assert not list(run.checkpoints.iterdir())


def test_disk_that_is_full_when_a_run_comes_back_does_not_end_it(
    small_disk: Path, spec: JobSpec, group: dist.ProcessGroup
) -> None:
    loop = start_on(small_disk, spec, group)
    for _ in range(2):
        loop.step()
    loop.saver.wait()
    loop.recorder.stop_beating()
    filler = fill(small_disk, leaving=200_000)
    again = start_on(small_disk, spec, group)
    assert (again.state.step, again.saver.failures) == (2, 1)
    filler.unlink()
    assert again.run()
    again.recorder.stop_beating()


def test_stop_on_a_full_disk_says_from_where_the_run_goes_on(
    small_disk: Path, spec: JobSpec, group: dist.ProcessGroup
) -> None:
    loop = start_on(small_disk, spec, group)
    for _ in range(2):
        loop.step()
    loop.saver.wait()
    fill(small_disk, leaving=200_000)
    loop.step()
    loop.stop_signal = "SIGTERM"
    assert not loop.run()
    loop.recorder.stop_beating()
    (stopped,) = events_of(loop.recorder.run, "stopped")
    assert (loop.state.step, stopped["step"]) == (3, 2)


def test_run_whose_result_cannot_be_written_is_not_finished(
    small_disk: Path, spec: JobSpec, group: dist.ProcessGroup
) -> None:
    loop = start_on(small_disk, spec, group, keep_last=1)
    assert loop.run()
    loop.recorder.stop_beating()
    fill(small_disk, leaving=0)
    with pytest.raises(OSError, match="No space left on device") as caught:
        finish(loop)
    assert kind_of(caught.value) == "disk"  # the rank leaves with code 1
    run = loop.recorder.run
    assert (run.summary.exists(), run.model_final.exists(), events_of(run, "finished")) == (False, False, [])


def test_lead_that_is_short_for_a_save_is_told_once(
    tmp_path: Path, spec: JobSpec, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    loop = start_on(tmp_path, spec, group)
    loop.saver.lead_s = 0.0
    with caplog.at_level(logging.WARNING, logger="run"):
        assert loop.run()
    loop.recorder.stop_beating()
    assert len(events_of(loop.recorder.run, "checkpoint_saved")) > 1
    (message,) = caplog.messages
    assert re.sub(r"[\d.]+ s,", "_ s,", message, count=1) == (
        "a save took _ s, and signal_lead_s is 0 s: give at least twice what a save takes, and a step"
    )


def test_checkpoints_beyond_the_size_go_earlier(spec: JobSpec, group: dist.ProcessGroup, tmp_path: Path) -> None:
    loop = start_on(tmp_path, spec, group, keep_size="2M")
    assert loop.run()
    loop.recorder.stop_beating()
    run = loop.recorder.run
    best = json.loads((run.checkpoints / "best.json").read_text())["step"]
    kept = sorted(int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("*.pt"))
    assert kept == sorted({best, 8}) or kept == [6, 8]
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, 9))
