"""What training changes: the average of weights, and what a checkpoint and an export hold of it all."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster.spec import TrainSpec
from jobs.learner import Learner, exported_weights, share_kept
from jobs.model import build_model
from jobs.numerics import Numerics

NUMERICS = Numerics(torch.device("cpu"), "bf16")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.0},
    {"ema_decay": 0.9},
    {"optimizer": "muon", "ema_decay": 0.5},
    {"optimizer": "muon", "momentum": 0.0},
]


def make_learner(seed: int = 0, **train: Any) -> Learner:  # noqa: ANN401
    torch.manual_seed(seed)
    return Learner.of(NUMERICS.place(build_model("small", 10)), TrainSpec(model="small", lr=0.05, **train))


def train(learner: Learner, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        learner.model(torch.randn(8, 3, 32, 32)).square().sum().backward()
        learner.update(lambda peak: peak / 10)


def tensors(tree: Any) -> list[Tensor]:  # noqa: ANN401
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_average_is_the_exponential_mean_of_the_weights_after_each_step() -> None:
    learner = make_learner(ema_decay=0.3)
    expected: Tensor | None = None
    for step in range(4):
        train(learner, range(step, step + 1))
        now = flat(learner.model)
        share = share_kept(0.3, step)
        expected = now if expected is None else share * expected + (1 - share) * now
    assert expected is not None
    torch.testing.assert_close(flat(learner.evaluated), expected)
    averages, newest = learner.evaluated.state_dict(), learner.model.state_dict()
    assert not torch.equal(averages["layer1.1.running_mean"], newest["layer1.1.running_mean"])


def test_average_forgets_the_first_steps_and_then_keeps_its_share() -> None:
    assert [share_kept(0.9, num_steps) for num_steps in (1, 10, 80, 81, 10_000)] == [2 / 11, 11 / 20, 0.9, 0.9, 0.9]


def test_without_an_average_the_model_itself_is_evaluated() -> None:
    learner = make_learner()
    assert learner.evaluated is learner.model


@pytest.mark.parametrize("options", OPTIONS)
def test_learner_that_takes_over_a_state_goes_on_with_the_same_bits(options: dict[str, Any]) -> None:
    straight, second = make_learner(**options), make_learner(seed=1, **options)
    train(straight, range(3))
    second.load(copy.deepcopy(straight.state()))  # torch would share the buffers
    for learner in (straight, second):
        train(learner, range(3, 6))
    ours, theirs = tensors(second.state()), tensors(straight.state())
    assert len(ours) == len(theirs) > 20
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_expected_state_has_the_shapes_of_the_state_after_a_step(options: dict[str, Any]) -> None:
    learner = make_learner(**options)
    expected = [tensor.shape for tensor in tensors(learner.expected_state())]
    train(learner, range(1))
    assert [tensor.shape for tensor in tensors(learner.state())] == expected


def test_momentum_in_another_memory_layout_is_put_into_that_of_the_weights() -> None:
    """A fused optimizer goes through the memory of both side by side, and does not look at strides."""
    straight, second = make_learner(), make_learner(seed=1)
    train(straight, range(2))
    state = copy.deepcopy(straight.state())
    for moments in state["optimizer"]["state"].values():
        moments["momentum_buffer"] = moments["momentum_buffer"].contiguous()
    second.load(state)
    for learner in (straight, second):
        train(learner, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(tensors(second.state()), tensors(straight.state()), strict=True))


def test_average_that_a_checkpoint_lacks_begins_with_the_next_step() -> None:
    plain, averaging = make_learner(), make_learner(seed=1, ema_decay=0.9)
    train(plain, range(2))
    averaging.load(plain.state())
    train(averaging, range(2, 3))
    assert torch.equal(flat(averaging.evaluated), flat(averaging.model))


def test_other_ranks_get_momentum_and_average_beside_the_weights() -> None:
    learner = make_learner(optimizer="muon", ema_decay=0.9)
    shared = list(learner.tensors_behind_weights())
    num_parameters = len(list(learner.model.parameters()))
    assert len(shared) == num_parameters + len(learner.model.state_dict()) + 1  # the average counts its steps


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}])
def test_exported_weights_are_those_that_are_evaluated_plain_and_contiguous(options: dict[str, Any]) -> None:
    learner = make_learner(**options)
    train(learner, range(3))
    weights = exported_weights(learner.state())
    assert list(weights) == list(build_model("small", 10).state_dict())
    assert all(torch.equal(weights[name], tensor) for name, tensor in learner.evaluated.state_dict().items())
    assert all(tensor.is_contiguous() for tensor in weights.values())
