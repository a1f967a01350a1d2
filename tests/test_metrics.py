"""Recorder: what rank 0 writes, and what the other ranks do not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.runs import RunFolder
from jobs.metrics import Recorder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that attempt 1 owns."""
    run = RunFolder(tmp_path)
    run.make()
    run.claim_attempt({})
    return run


@pytest.fixture
def recorder(run: RunFolder) -> Recorder:
    """Rank 0's."""
    return Recorder(run, attempt=1, job_id="7", writes=True)


def files_of(run: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def lines_of(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each of which says when it was written."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line.pop("time")[-1] for line in lines] == ["Z"] * len(lines)
    return lines


def test_other_ranks_write_nothing(run: RunFolder) -> None:
    before = files_of(run)
    recorder = Recorder(run, attempt=1, job_id="7", writes=False)
    recorder.start_beating()
    recorder.beat(phase="training", step=1)
    recorder.event("evaluated", step=1)
    recorder.metrics_line({"step": 1})
    recorder.cut_metrics(0)
    recorder.best(1, 0.5)
    recorder.stop_beating()
    assert recorder.metrics_size() == 0
    assert files_of(run) == before == ["attempts/0001"]


@pytest.mark.parametrize("field", ["name", "reason", "step"])
def test_event_may_have_a_field_of_any_name(run: RunFolder, recorder: Recorder, field: str) -> None:
    recorder.event("checkpoint_quarantined", **{field: "x"})
    (event,) = run.read_events()
    assert event.pop("time")[-1] == "Z"
    assert event == {"event": "checkpoint_quarantined", "attempt": 1, "job_id": "7", field: "x"}


def test_lines_behind_the_checkpoint_are_taken_back(run: RunFolder, recorder: Recorder) -> None:
    recorder.metrics_line({"step": 1})
    size = recorder.metrics_size()
    recorder.metrics_line({"step": 2})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')  # a kill in the middle of a line
    recorder.cut_metrics(size)
    recorder.metrics_line({"step": 2, "loss": 0.5})
    assert lines_of(run) == [{"step": 1, "attempt": 1}, {"step": 2, "loss": 0.5, "attempt": 1}]


def test_nothing_is_taken_back_of_a_file_that_is_shorter(run: RunFolder, recorder: Recorder) -> None:
    recorder.metrics_line({"step": 1})
    recorder.cut_metrics(10_000)
    assert lines_of(run) == [{"step": 1, "attempt": 1}]


def test_file_without_lines_has_size_0_before_and_after_it_is_made(run: RunFolder, recorder: Recorder) -> None:
    sizes = [recorder.metrics_size()]
    recorder.cut_metrics(0)
    assert [*sizes, recorder.metrics_size()] == [0, 0]


def test_last_known_step_is_the_furthest_of_heartbeat_and_metrics(run: RunFolder, recorder: Recorder) -> None:
    known = [recorder.last_known_step()]
    recorder.metrics_line({"step": 10})
    known.append(recorder.last_known_step())
    recorder.beat(phase="training", step=14)
    known.append(recorder.last_known_step())
    assert known == [0, 10, 14]


def test_new_phase_is_told_at_once_and_other_fields_with_the_next_beat(run: RunFolder, recorder: Recorder) -> None:
    recorder.beat(phase="training", step=1)
    recorder.beat(step=2, loss=0.5)
    beats = [json.loads(run.heartbeat.read_text())]
    recorder.stop_beating()
    beats.append(json.loads(run.heartbeat.read_text()))
    assert [beat.pop("time")[-1] for beat in beats] == ["Z", "Z"]
    common = {"format_version": 1, "attempt": 1, "phase": "training"}
    assert beats == [{**common, "step": 1}, {**common, "step": 2, "loss": 0.5}]


def test_heart_beats_while_the_loop_is_busy(
    run: RunFolder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.metrics.BEAT_S", 0.01)
    recorder.start_beating()
    recorder.beat(step=5)  # no new phase: the thread has to tell it
    deadline_s = time.monotonic() + 30
    while run.read_json(run.heartbeat)["step"] != 5 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    recorder.stop_beating()
    assert run.read_json(run.heartbeat)["step"] == 5


def test_best_step_is_kept_beside_the_checkpoints(run: RunFolder, recorder: Recorder) -> None:
    recorder.best(3, 0.25)
    recorder.best(6, 0.5)
    best = json.loads((run.checkpoints / "best.json").read_text())
    assert best == {"format_version": 1, "step": 6, "test_accuracy": 0.5}
