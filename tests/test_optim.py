"""The optimizer and the learning rate of each step."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

from cluster.spec import TrainSpec
from jobs.model import build_model
from jobs.numerics import Numerics
from jobs.optim import Updater, as_matrix, lr_at


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return Numerics(torch.device("cpu"), "fp32").place(build_model("small", 10))


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
def test_sgd_is_torchs(settings: dict[str, Any]) -> None:
    train = TrainSpec(lr=0.1, weight_decay=0.01, **settings)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    updater = Updater(model, train)
    expected = torch.optim.SGD(
        reference.parameters(), lr=0.1, weight_decay=0.01, nesterov=train.momentum > 0, **settings
    )
    for peak_share in (0.5, 1.0, 0.25):
        for net in (model, reference):
            net(torch.ones(1, 3)).square().sum().backward()
        assert updater.update(lambda peak, share=peak_share: peak * share) == 0.1 * peak_share  # type: ignore[misc]
        expected.param_groups[0]["lr"] = 0.1 * peak_share
        expected.step()
        expected.zero_grad()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert model.weight.grad is None


def test_muon_is_torchs_on_filters_as_matrices_and_sgd_does_the_rest() -> None:
    train = TrainSpec(lr=0.1, optimizer="muon", muon_lr=0.02, muon_momentum=0.9, weight_decay=0.01)
    model = small_net()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updater = Updater(model, train)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    updater.update(lambda peak: peak)
    filters = [f"layer{number}.0.weight" for number in (2, 3, 4)]
    for name, parameter in model.named_parameters():
        old = nn.Parameter((before[name].flatten(1) if name in filters else before[name]).clone())
        old.grad = gradients[name].reshape(old.shape)
        torch_own: torch.optim.Optimizer = (
            torch.optim.Muon([old], lr=0.02, momentum=0.9, weight_decay=0.01)
            if name in filters
            else torch.optim.SGD([old], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
        )
        torch_own.step()
        # Muon computes in bf16, and the columns of its matrices stand in another order here.
        torch.testing.assert_close(parameter.detach(), old.detach().view_as(parameter), rtol=1e-3, atol=2e-3)
        assert not torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_rates_of_both_optimizers_follow_one_schedule() -> None:
    model, asked = small_net(), []
    updater = Updater(model, TrainSpec(lr=0.1, optimizer="muon", muon_lr=0.02))
    model(torch.randn(2, 3, 32, 32)).sum().backward()

    def rate(peak: float) -> float:
        asked.append(peak)
        return peak / 2

    assert updater.update(rate) == 0.05
    assert sorted(set(asked)) == [0.02, 0.1]


def test_matrix_of_filters_is_a_view_in_either_layout() -> None:
    filters = torch.randn(4, 3, 3, 3)
    for laid_out in (filters, filters.contiguous(memory_format=torch.channels_last)):
        matrix = as_matrix(laid_out)
        assert matrix.shape == (4, 27)
        assert matrix.data_ptr() == laid_out.data_ptr()
        torch.testing.assert_close(matrix @ matrix.T, filters.flatten(1) @ filters.flatten(1).T)
