"""Event files: each step once and equal to metrics.jsonl, however the attempts before have ended."""

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from cluster.runs import RunFolder, read_lines
from cluster.spec import JobSpec, SpecError, check_packages
from jobs.metrics import Recorder
from jobs.mirror import Mirror, unix_s
from tests.small_run import CountingControl, Killed, claim, lone_group, make_run, make_spec, metrics_of, start_attempt
from tests.training import wait_for

group = pytest.fixture(scope="module")(lone_group)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.make()
    return run


def start(run: RunFolder) -> Recorder:
    """The next attempt's."""
    recorder = Recorder(run, attempt=run.claim_attempt({}), job_id="7", writes=True)
    run.metrics.touch()
    recorder.start_mirror()
    return recorder


def float32(number: float) -> float:
    """As an event file holds it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def lines_of(run: RunFolder) -> list[tuple[int, float, dict[str, float]]]:
    """Step, moment and numbers of each line of metrics.jsonl."""
    return [
        (
            line["step"],
            unix_s(line["time"]),
            {key: float32(value) for key, value in line.items() if is_number(key, value)},
        )
        for line in read_lines(run.metrics)
    ]


def is_number(key: str, value: object) -> bool:
    return key != "step" and isinstance(value, int | float)


def mirrored(run: RunFolder) -> list[tuple[int, float, dict[str, float]]]:
    """The same of each event in all files, in the order in which viewers read them."""
    found = []
    for path in sorted(run.tensorboard.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                numbers = {value.tag: value.tensor.float_val[0] for value in event.summary.value}
                found.append((event.step, event.wall_time, numbers))
    return found


def written_by(run: RunFolder) -> list[int]:
    """Attempts whose event files are not empty; there are files of nothing else."""
    names = {path.name: path.stat().st_size for path in run.tensorboard.iterdir()}
    return sorted(int(name.removeprefix("events.out.tfevents.a")) for name, size in names.items() if size)


def test_lines_are_mirrored_in_one_file_of_the_attempt(run: RunFolder) -> None:
    recorder = start(run)
    recorder.metrics_line({"step": 1, "loss": 0.1, "slowest_rank": None})
    recorder.metrics_line({"step": 2, "loss": 0.2, "slowest_rank": 3, "test_accuracy": 0.5})
    recorder.end_mirror()
    assert mirrored(run) == lines_of(run)
    assert [sorted(numbers) for _, _, numbers in mirrored(run)] == [
        ["attempt", "loss"],
        ["attempt", "loss", "slowest_rank", "test_accuracy"],
    ]
    assert written_by(run) == [1]


def test_line_is_mirrored_while_the_training_goes_on(run: RunFolder) -> None:
    recorder = start(run)
    for step in (1, 2):
        recorder.metrics_line({"step": step, "loss": 1 / step})
        wait_for("the mirror", lambda: run.tensorboard.exists() and mirrored(run) == lines_of(run))
    recorder.end_mirror()
    assert [step for step, _, _ in mirrored(run)] == [1, 2]


def tear(path: Path) -> None:
    """A kill in the middle of a write."""
    path.write_bytes(path.read_bytes()[:-7])


def lose(path: Path) -> None:
    """A kill before anything was written."""
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [lambda path: None, tear, lose, Path.unlink])
def test_next_attempt_mirrors_what_metrics_hold_after_the_cut(run: RunFolder, damage: Callable[[Path], None]) -> None:
    first = start(run)
    for step in (1, 2, 3):
        first.metrics_line({"step": step, "loss": 1.0})
    size = run.metrics.stat().st_size
    first.metrics_line({"step": 4, "loss": 1.0})
    first.end_mirror()
    damage(run.tensorboard / "events.out.tfevents.a0001")
    (run.tensorboard / ".a0002.tmp").write_bytes(b"x")
    Recorder(run, attempt=1, job_id="7", writes=True).cut_metrics(size)
    second = start(run)
    second.metrics_line({"step": 4, "loss": 2.0})
    second.end_mirror()
    assert [step for step, _, _ in mirrored(run)] == [1, 2, 3, 4]
    assert mirrored(run) == lines_of(run)
    assert written_by(run) == [2]


def test_superseded_attempt_writes_no_event(run: RunFolder) -> None:
    first = start(run)
    first.metrics_line({"step": 1, "loss": 1.0})
    first.end_mirror()
    second = start(run)
    second.end_mirror()
    late = Mirror(run, 1)
    late.start()
    late.end()
    assert written_by(run) == [2]
    assert mirrored(run) == lines_of(run)


def test_storage_that_fails_costs_no_line(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    run.tensorboard.write_text("no folder")
    recorder = start(run)
    wait_for("the warning", lambda: caplog.messages)
    run.tensorboard.unlink()
    recorder.metrics_line({"step": 1, "loss": 1.0})
    recorder.end_mirror()
    assert mirrored(run) == lines_of(run)
    assert len(lines_of(run)) == 1
    assert len(caplog.messages) == 1


def test_viewer_that_looks_on_sees_each_step_once_over_three_restarts(tmp_path: Path, group: dist.ProcessGroup) -> None:
    spec = make_spec(tmp_path, every_steps=2, tensorboard=True)
    straight = make_run(spec, "straight")
    attempt(spec, straight, CountingControl(group))
    run = make_run(spec, "restarted")
    run.tensorboard.mkdir()
    viewer = EventAccumulator(str(run.tensorboard))
    for control in (
        CountingControl(group, kill_at=5),
        CountingControl(group, stop_at=2),
        CountingControl(group, kill_at=4),
        CountingControl(group),
    ):
        attempt(spec, run, control)
        viewer.Reload()
    steps = list(range(1, 9))
    assert [step for step, _, _ in mirrored(run)] == [step for step, _, _ in lines_of(run)] == steps
    assert mirrored(run) == lines_of(run)
    assert metrics_of(run) == metrics_of(straight)
    assert [scalar.step for scalar in viewer.Scalars("loss")] == steps
    assert [scalar.value for scalar in viewer.Scalars("loss")] == [numbers["loss"] for _, _, numbers in lines_of(run)]
    assert run.latest_attempt() == 4


def attempt(spec: JobSpec, run: RunFolder, control: CountingControl) -> None:
    """One attempt to its end, its stop or its kill."""
    loop = start_attempt(spec, run, control, claim(run))
    try:
        loop.run()
    except Killed:
        loop.saver.wait()
        loop.recorder.end_mirror()  # its thread would end with the process
    loop.recorder.stop_beating()


def test_missing_package_is_told_with_the_command_and_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.spec.find_spec", lambda _name: None)
    check_packages(make_spec(tmp_path))
    with pytest.raises(SpecError) as caught:
        check_packages(make_spec(tmp_path, tensorboard=True))
    assert caught.value.problems == (
        f"train.tensorboard: the package tensorboard is not installed for {sys.executable}; install it "
        f"({sys.executable} -m pip install tensorboard), or leave the key out",
    )
