"""The optimizer and the learning rate of each step."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

from cluster.spec import TrainSpec
from jobs.optim import build_optimizer, lr_at


def rates(warmup_steps: int, total_steps: int, schedule: Literal["cosine", "linear"], count: int) -> list[float]:
    return [
        lr_at(step, base_lr=0.4, warmup_steps=warmup_steps, total_steps=total_steps, schedule=schedule)
        for step in range(count)
    ]


def test_linear_schedule_rises_to_the_base_rate_and_falls_to_zero() -> None:
    assert rates(4, 8, "linear", 10) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_cosine_schedule_is_half_way_down_in_the_middle() -> None:
    assert rates(0, 4, "cosine", 5) == pytest.approx([0.4, 0.2 + 0.2 * 0.5**0.5, 0.2, 0.2 - 0.2 * 0.5**0.5, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_warm_up_longer_than_the_training_only_rises(schedule: Literal["cosine", "linear"]) -> None:
    assert rates(8, 4, schedule, 5) == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.0])
    assert rates(4, 4, schedule, 5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.0])


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"momentum": 0.0}])
def test_optimizer_equals_torchs_sgd(settings: dict[str, Any]) -> None:
    train = TrainSpec(lr=0.1, weight_decay=0.01, **settings)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    nesterov = settings["momentum"] > 0
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.01, nesterov=nesterov, **settings)
    for net, optimizer in ((model, build_optimizer(model, train)), (reference, expected)):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, reference.weight)
    assert torch.equal(model.bias, reference.bias)
