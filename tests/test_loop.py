"""One rank, whole runs: stopped or killed at every boundary there is, and gone on with."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.runs import MEASURED, RunFolder, read_lines
from cluster.signals import StopFlag
from cluster.spec import JobSpec
from jobs.control import Control
from jobs.deadlines import Phase
from jobs.digest import weights_sha256
from jobs.done import percentile
from jobs.loop import Loop, NanLossError
from jobs.pace import SlowRank
from jobs.state import TrainState
from jobs.watchdog import Watch
from tests.small_run import (
    CountingControl,
    Killed,
    claim,
    lone_group,
    make_run,
    make_spec,
    metrics_of,
    start_attempt,
    undisturbed,
)

NUM_BOUNDARIES = 14
"""Agreements of the small run: one before the first step, one a step, three before saves, two in evaluations."""
NUM_BOUNDARIES_SAVING = NUM_BOUNDARIES + 2
"""The same with a save every two steps."""
VARYING = {"step_seconds", "metrics_bytes"}


group = pytest.fixture(scope="module")(lone_group)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return make_spec(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def saving(spec: JobSpec) -> JobSpec:
    """The same run with a save every two steps."""
    return with_checkpoints(spec, every_steps=2)


def with_checkpoints(spec: JobSpec, **changes: float) -> JobSpec:
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=changes)})


@pytest.fixture(scope="module")
def straight(spec: JobSpec, group: dist.ProcessGroup) -> Loop:
    """The run that nothing disturbs."""
    return undisturbed(spec, group, "straight")


def attempt(spec: JobSpec, run: RunFolder, control: Control) -> tuple[Loop, bool]:
    """Run one attempt until it finishes, stops or is killed; whether it finished."""
    loop = start_attempt(spec, run, control, claim(run))
    try:
        return loop, loop.run()
    except Killed:
        return loop, False
    finally:
        loop.saver.wait()  # the thread of a process that is killed ends with it
        loop.recorder.stop_beating()


def outcome(loop: Loop) -> dict[str, Any]:
    """All that must not depend on how often a run was interrupted."""
    state = {key: value for key, value in loop.state.as_dict().items() if key not in VARYING}
    return state | {
        "weights": weights_sha256(loop.learner.model.state_dict()),
        "metrics": metrics_of(loop.recorder.run),
    }


def events_of(loop: Loop, name: str) -> list[dict[str, Any]]:
    return [event for event in loop.recorder.run.read_events() if event["event"] == name]


def test_undisturbed_run_logs_each_step_once_and_evaluates_where_it_should(straight: Loop) -> None:
    lines = metrics_of(straight.recorder.run)
    assert [(line["step"], line["epoch"], "test_loss" in line) for line in lines] == [
        (1, 0, False),
        (2, 0, False),
        (3, 0, False),
        (4, 1, False),
        (5, 1, False),
        (6, 1, True),
        (7, 2, False),
        (8, 2, True),
    ]
    assert (straight.state.images, straight.state.epoch, straight.state.samples) == (28, 2, 8)


def test_train_loss_is_the_mean_over_the_samples_of_the_epoch(straight: Loop) -> None:
    losses = {line["step"]: line["loss"] for line in metrics_of(straight.recorder.run)}
    assert straight.state.train_loss == pytest.approx((losses[7] * 4 + losses[8] * 4) / 8, rel=1e-12)


def test_boundaries_of_this_file_are_all_that_there_are(
    spec: JobSpec, saving: JobSpec, group: dist.ProcessGroup
) -> None:
    controls = CountingControl(group), CountingControl(group)
    attempt(spec, make_run(spec, "counted"), controls[0])
    attempt(saving, make_run(spec, "counted_saving"), controls[1])
    assert [control.num_posts for control in controls] == [NUM_BOUNDARIES, NUM_BOUNDARIES_SAVING]


@pytest.mark.parametrize("boundary", range(NUM_BOUNDARIES))
def test_run_stopped_at_any_boundary_ends_as_the_undisturbed_one(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop, boundary: int
) -> None:
    run = make_run(spec, f"stopped_{boundary}")
    first, finished = attempt(spec, run, CountingControl(group, stop_at=boundary))
    assert not finished
    second, finished = attempt(spec, run, CountingControl(group))
    assert finished
    assert outcome(second) == outcome(straight)
    stopped, resumed = events_of(second, "stopped"), events_of(second, "resumed")
    assert [event["step"] for event in stopped] == [event["from_step"] for event in resumed] == [first.state.step]
    assert [event["lost_steps"] for event in resumed] == [0]


@pytest.mark.parametrize(
    "train",
    [
        {"precision": "fp32"},
        {"optimizer": "muon", "ema_decay": 0.5, "eval_flip": True, "gradient_compression": "bf16"},
        {"optimizer": "muon", "momentum": 0.0, "clip_grad_norm": 1.0},
        pytest.param({"compile": True}, marks=pytest.mark.long),  # compiles for half a minute
    ],
)
def test_run_with_other_choices_ends_as_the_undisturbed_one_too(
    tmp_path: Path, group: dist.ProcessGroup, straight: Loop, train: dict[str, Any]
) -> None:
    spec = make_spec(tmp_path, **train)
    whole = undisturbed(spec, group, "whole")
    run = make_run(spec, "stopped")
    assert not attempt(spec, run, CountingControl(group, stop_at=5))[1]
    second, finished = attempt(spec, run, CountingControl(group))
    assert finished
    assert outcome(second) == outcome(whole)
    assert outcome(second)["weights"] != outcome(straight)["weights"]


def test_run_keeps_the_precision_it_began_with_where_the_spec_leaves_it_open(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop
) -> None:
    run = make_run(spec, "other_node")
    attempt(spec, run, CountingControl(group, stop_at=5))
    second = start_attempt(spec, run, Control(group, StopFlag()), claim(run), has_bf16=False)
    assert second.run()
    second.recorder.stop_beating()
    assert second.numerics.precision == "bf16"
    assert outcome(second) == outcome(straight)


@pytest.mark.parametrize("boundary", range(NUM_BOUNDARIES_SAVING))
def test_run_killed_at_any_boundary_ends_as_the_undisturbed_one(
    saving: JobSpec, group: dist.ProcessGroup, straight: Loop, boundary: int
) -> None:
    run = make_run(saving, f"killed_{boundary}")
    attempt(saving, run, CountingControl(group, kill_at=boundary))
    second, finished = attempt(saving, run, CountingControl(group))
    assert finished
    assert outcome(second) == outcome(straight)


def test_run_whose_attempts_are_all_stopped_after_two_boundaries_gets_to_the_same_end(
    saving: JobSpec, group: dist.ProcessGroup, straight: Loop
) -> None:
    run = make_run(saving, "again_and_again")
    ends = [attempt(saving, run, CountingControl(group, stop_at=2)) for _ in range(6)]
    assert [loop.state.step for loop, _ in ends] == [2, 3, 4, 6, 8, 8]
    assert [finished for _, finished in ends] == [False] * 5 + [True]
    assert outcome(ends[-1][0]) == outcome(straight)


def test_stop_before_the_first_step_saves_nothing(spec: JobSpec, group: dist.ProcessGroup) -> None:
    loop, finished = attempt(spec, make_run(spec, "at_once"), CountingControl(group, stop_at=0))
    assert not finished
    assert [(event["event"], event.get("step")) for event in loop.recorder.run.read_events()[2:]] == [
        ("stop_requested", 0),
        ("stopped", 0),
    ]
    assert list(loop.recorder.run.checkpoints.iterdir()) == []


def test_stop_is_learnt_one_step_later_and_told_before_its_save(spec: JobSpec, group: dist.ProcessGroup) -> None:
    loop, _ = attempt(spec, make_run(spec, "told"), CountingControl(group, stop_at=1))
    told = [(event["event"], event["step"]) for event in loop.recorder.run.read_events() if "step" in event]
    assert told == [("first_step", 1), ("stop_requested", 2), ("checkpoint_saved", 2), ("stopped", 2)]


def test_clock_of_rank_0_asks_for_a_save_at_the_next_boundary(spec: JobSpec, group: dist.ProcessGroup) -> None:
    always = with_checkpoints(spec, every_minutes=1e-9)
    loop, _ = attempt(always, make_run(spec, "clock"), CountingControl(group))
    assert [event["step"] for event in events_of(loop, "checkpoint_saved")] == [2, 3, 5, 6, 8]


@pytest.mark.parametrize("at_step", [1, 2, 8])
def test_loss_that_is_no_number_ends_a_rank_before_it_is_saved(
    spec: JobSpec, group: dist.ProcessGroup, at_step: int
) -> None:
    each = with_checkpoints(spec, every_steps=1)
    run = make_run(spec, f"nan_{at_step}")
    loop = start_attempt(each, run, CountingControl(group), claim(run))
    whole_step = loop.stepper.forward_backward

    def forward_backward(ids: torch.Tensor, state: TrainState) -> torch.Tensor:
        return whole_step(ids, state) * (float("nan") if state.step + 1 == at_step else 1.0)

    loop.stepper.forward_backward = forward_backward  # type: ignore[method-assign]
    with pytest.raises(NanLossError) as caught:
        loop.run()
    loop.saver.wait()
    loop.recorder.stop_beating()
    assert str(caught.value) == f"the loss of step {at_step} is nan; nothing is saved from here on"
    assert [event["step"] for event in events_of(loop, "checkpoint_saved")] == list(range(1, at_step))
    assert [line["step"] for line in metrics_of(run)] == list(range(1, at_step))


class NotingWatch(Watch):
    """Remembers every place."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, int]] = []

    def at(self, phase: Phase, step: int) -> None:
        self.places.append((phase, step))
        super().at(phase, step)


def test_watch_is_told_of_every_step_save_and_piece_of_an_evaluation(tmp_path: Path, group: dist.ProcessGroup) -> None:
    spec = make_spec(tmp_path, every_steps=2, max_steps=3)
    run = make_run(spec)
    loop = start_attempt(spec, run, Control(group, StopFlag()), claim(run))
    loop.watch = watch = NotingWatch()
    assert loop.run()
    loop.recorder.stop_beating()
    assert watch.places == [
        ("training", 0),
        ("training", 1),
        ("saving", 2),
        ("training", 2),
        ("saving", 3),
        ("evaluating", 3),
        ("evaluating", 3),
        ("saving", 3),
    ]


def test_line_of_a_step_has_all_its_keys_and_that_of_an_evaluation_two_more(straight: Loop) -> None:
    lines = list(read_lines(straight.recorder.run.metrics))
    keys = ["step", "epoch", "loss", "lr", "grad_norm", *MEASURED]
    assert sorted(lines[0]) == sorted(keys)
    assert sorted(lines[5]) == sorted([*keys, "test_accuracy", "test_loss"])
    assert all(0 < line["step_ms_p50"] <= line["step_ms_p95"] for line in lines)
    assert all(10 < line["memory_mib"] < 1e5 for line in lines)


def test_measuring_the_gradient_changes_no_bit(spec: JobSpec, group: dist.ProcessGroup, straight: Loop) -> None:
    rarely = spec.model_copy(update={"train": spec.train.model_copy(update={"log_every_steps": 100})})
    loop = undisturbed(rarely, group, "rarely")
    lines = {line["step"]: line for line in metrics_of(straight.recorder.run)}
    assert metrics_of(loop.recorder.run) == [lines[step] for step in (3, 6, 8)]
    assert weights_sha256(loop.learner.model.state_dict()) == weights_sha256(straight.learner.model.state_dict())


def test_norm_is_that_of_the_gradient_before_it_is_clipped(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop
) -> None:
    norm = metrics_of(straight.recorder.run)[0]["grad_norm"]
    clipped = spec.model_copy(update={"train": spec.train.model_copy(update={"clip_grad_norm": norm / 2})})
    assert metrics_of(undisturbed(clipped, group, "clipped").recorder.run)[0]["grad_norm"] == norm
    loop = start_attempt(spec, run := make_run(spec, "by_hand"), Control(group, StopFlag()), claim(run))
    loop.stepper.forward_backward(loop.stepper.batch_ids(loop.state), loop.state)
    squares = [
        float((parameter.grad**2).sum()) for parameter in loop.learner.model.parameters() if parameter.grad is not None
    ]
    assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-5)
    loop.recorder.stop_beating()


@pytest.mark.parametrize(
    ("count", "percent", "expected"), [(1, 50, 1), (1, 95, 1), (2, 50, 1), (3, 50, 2), (10, 95, 10), (100, 95, 95)]
)
def test_percentile_is_one_of_the_values(count: int, percent: int, expected: int) -> None:
    assert percentile([float(number) for number in range(1, count + 1)], percent) == expected


def test_slow_rank_is_told_once(
    spec: JobSpec, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(spec, "slow_rank")
    loop = start_attempt(spec, run, Control(group, StopFlag()), claim(run))
    news = [None, SlowRank(3, "n2", 2.5)]
    monkeypatch.setattr(loop.watch.pace, "maybe_news", lambda: news.pop(0) if news else None)
    loop.watch.pace.maybe_slowest = 3
    with caplog.at_level(logging.WARNING, logger="run"):
        assert loop.run()
    loop.recorder.stop_beating()
    told = [{key: event[key] for key in ("rank", "host", "factor")} for event in events_of(loop, "slow_rank")]
    assert told == [{"rank": 3, "host": "n2", "factor": 2.5}]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "rank 3 on n2 is slow: its own part of a step takes 2.5 times as long as the others' (median)"
    ]
    assert {line["slowest_rank"] for line in read_lines(run.metrics)} == {3}
