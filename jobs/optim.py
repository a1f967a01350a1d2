"""Optimizer and learning rate: spec -> [optim] -> training loop.

The learning rate is a pure function of the step, so a checkpoint holds no scheduler.
"""

import math
from typing import Literal

import torch
from torch import nn

from cluster.spec import TrainSpec


def build_optimizer(model: nn.Module, train: TrainSpec) -> torch.optim.SGD:
    """SGD with Nesterov momentum (plain SGD when momentum is 0).

    Weight decay acts on every parameter, biases and BatchNorm included: the classic CIFAR recipe.
    The caller sets each step's learning rate from lr_at.
    """
    return torch.optim.SGD(
        model.parameters(),
        lr=train.lr,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        nesterov=train.momentum > 0,  # torch refuses Nesterov without momentum
    )


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
