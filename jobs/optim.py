"""Optimizer and learning rate: spec -> [optim] -> training loop.

The learning rate is a pure function of the step, so a checkpoint holds no scheduler.
Sources: torch.optim, "SGD" and "Muon"; Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cluster.spec import TrainSpec


class Updater:
    """Turns gradients into weights: SGD for all parameters, or Muon for the convolutions and SGD for the rest.

    SGD with Nesterov momentum (plain SGD when momentum is 0).  Its weight decay acts on every parameter, biases and
    BatchNorm included: the classic CIFAR recipe.
    """

    def __init__(self, model: nn.Module, train: TrainSpec) -> None:
        """model: on its device and in its memory format already, since Muon's matrices are views of its filters."""
        filters = hidden_filters(model) if train.optimizer == "muon" else []
        self._filters = [(weight, nn.Parameter(as_matrix(weight.detach()))) for weight in filters]
        taken = {id(weight) for weight in filters}
        sgd = torch.optim.SGD(
            [parameter for parameter in model.parameters() if id(parameter) not in taken],
            lr=train.lr,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            nesterov=train.momentum > 0,  # torch refuses Nesterov without momentum
            fused=True,  # one pass over the weights; on a CPU four times as fast as torch's default
        )
        self._parts: list[tuple[str, torch.optim.Optimizer, float]] = [("sgd", sgd, train.lr)]
        if filters:
            muon = torch.optim.Muon(
                [matrix for _, matrix in self._filters],
                lr=train.muon_lr,
                momentum=train.muon_momentum,
                weight_decay=train.weight_decay,
            )
            self._parts.append(("muon", muon, train.muon_lr))

    def update(self, rate: Callable[[float], float]) -> float:
        """Update the weights and clear the gradients; returns SGD's learning rate.

        rate: a learning rate of this step, given its peak.
        """
        for weight, matrix in self._filters:
            assert weight.grad is not None
            matrix.grad = as_matrix(weight.grad)
        for _, optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate(peak)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for weight, _ in self._filters:
            weight.grad = None
        return rate(self._parts[0][2])

    def state_dict(self) -> dict[str, Any]:
        """SGD's own where it is alone, else one by name."""
        if len(self._parts) == 1:
            return self._parts[0][1].state_dict()
        return {name: optimizer.state_dict() for name, optimizer, _ in self._parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what state_dict() gave."""
        for name, optimizer, _ in self._parts:
            optimizer.load_state_dict(dict(state if len(self._parts) == 1 else state[name]))
        for holder, parameter in self._moments():
            kept = holder.get("momentum_buffer")
            if kept is not None and kept.stride() != parameter.stride():
                # A fused kernel goes through both in the order of their bytes, and does not look.
                holder["momentum_buffer"] = torch.empty_like(parameter).copy_(kept)

    def expected_state(self) -> dict[str, Any]:
        """A tree with the names and shapes of what state_dict() gives once a step was made; values mean nothing."""
        trees = {}
        for name, optimizer, _ in self._parts:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            names = ["momentum_buffer"] if optimizer.defaults.get("momentum") else []
            trees[name] = {"state": {number: dict.fromkeys(names, p) for number, p in enumerate(parameters)}}
        return trees["sgd"] if len(trees) == 1 else trees

    def momentum_buffers(self) -> Iterator[Tensor]:
        """All of them, in the same order on every rank; those that are not there yet are made."""
        for holder, parameter in self._moments():
            if holder.get("momentum_buffer") is None:
                holder["momentum_buffer"] = torch.zeros_like(parameter)
            yield holder["momentum_buffer"]

    def _moments(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Of each parameter that has momentum: its optimizer's state, and itself."""
        for _, optimizer, _ in self._parts:
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["momentum"] else ():
                    yield optimizer.state[parameter], parameter


def hidden_filters(model: nn.Module) -> list[Tensor]:
    """Weights of all convolutions but the first, which reads pixels: Muon is made for what lies between others."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)][1:]


def as_matrix(filters: Tensor) -> Tensor:
    """A view of filters (channels_out, channels_in, height, width) with a row for each output channel.

    The order of its columns is that of the memory; Muon's result does not depend on it.
    """
    is_last = filters.is_contiguous(memory_format=torch.channels_last)
    return (filters.permute(0, 2, 3, 1) if is_last else filters).view(len(filters), -1)


def lr_at(
    step: int, *, base_lr: float, warmup_steps: int, total_steps: int, schedule: Literal["cosine", "linear"]
) -> float:
    """Learning rate of one step, counted from 0.

    It rises linearly from base_lr / warmup_steps at step 0 to base_lr at the last warm-up step, then falls to 0 at
    total_steps.  A warm-up longer than the training never ends: the rate only rises.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return base_lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)  # in [0, 1)
    if schedule == "linear":
        return base_lr * (1 - progress)
    return base_lr * (1 + math.cos(math.pi * progress)) / 2
