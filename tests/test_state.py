"""Training state: where a run stands."""

import dataclasses
import json

import pytest

from jobs.state import TrainState


def test_new_run_stands_at_the_beginning() -> None:
    state = TrainState()
    assert (state.step, state.epoch, state.samples, state.samples_sha256) == (0, 0, 0, "0" * 64)


def test_end_of_an_epoch_is_the_start_of_the_next() -> None:
    state = TrainState()
    seen = []
    for num_samples in (4, 4, 2, 4):
        state.advance(num_samples, 10, seconds=0.5)
        seen.append((state.step, state.epoch, state.samples))
    assert seen == [(1, 0, 4), (2, 0, 8), (3, 1, 0), (4, 1, 4)]
    assert (state.images, state.step_seconds) == (14, 2.0)


def test_train_loss_is_the_mean_per_sample_of_the_epoch_so_far() -> None:
    state = TrainState()
    means = []
    for loss_sum, num_samples, ends_epoch in ((8.0, 4, False), (1.0, 2, True), (6.0, 2, False)):
        state.add_loss(loss_sum, num_samples, ends_epoch=ends_epoch)
        means.append(state.train_loss)
    assert means == [2.0, 1.5, 3.0]


def test_sums_start_anew_after_an_epoch() -> None:
    state = TrainState()
    state.add_loss(8.0, 4, ends_epoch=True)
    assert (state.epoch_loss_sum, state.epoch_loss_samples, state.train_loss) == (0.0, 0, 2.0)


@pytest.mark.parametrize(
    "state", [TrainState(), TrainState(step=3, pending_line='{"step": 3}', epoch_loss_sum=0.1 + 0.2)]
)
def test_state_survives_as_primitives(state: TrainState) -> None:
    kept = state.as_dict()
    assert {type(value) for value in kept.values()} <= {int, float, str}
    assert TrainState(**json.loads(json.dumps(kept))) == state
    assert list(kept) == [field.name for field in dataclasses.fields(TrainState)]
