"""Learner: [learner] is all that training changes: weights, momentum, and the average of weights where one is kept.

Source of the average: torch.optim.swa_utils, "Custom averaging strategies".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cluster.spec import TrainSpec
from jobs.optim import Updater

AVERAGE_PREFIX = "module."  # of AveragedModel's names


@dataclass(frozen=True, slots=True)
class Learner:
    """One rank's; equal on all ranks but for BatchNorm's statistics, of which rank 0's count."""

    model: nn.Module  # unwrapped, uncompiled
    updater: Updater
    maybe_average: AveragedModel | None = None
    decay: float = 0.0  # of the average

    @classmethod
    def of(cls, model: nn.Module, train: TrainSpec) -> "Learner":
        """model: on its device and in its memory format, with the weights that training starts from."""
        average = None
        if train.ema_decay is not None:
            # Its counter stays on the host (device=None), so that no step waits for a GPU to tell it.
            average = AveragedModel(model, use_buffers=True)
        return cls(model, Updater(model, train), average, train.ema_decay or 0.0)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and exported."""
        return self.model if self.maybe_average is None else self.maybe_average.module

    def update(self, rate: Callable[[float], float]) -> float:
        """Change the weights by their gradients; arguments and result as of Updater.update."""
        lr = self.updater.update(rate)
        if self.maybe_average is not None:
            share = share_kept(self.decay, int(self.maybe_average.n_averaged))
            self.maybe_average.multi_avg_fn = get_ema_multi_avg_fn(share)  # type: ignore[no-untyped-call]
            self.maybe_average.update_parameters(self.model)
        return lr

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        parts: dict[str, Any] = {"model": dict(self.model.state_dict()), "optimizer": self.updater.state_dict()}
        if self.maybe_average is not None:
            parts["average"] = dict(self.maybe_average.state_dict())
        return parts

    def expected_state(self) -> dict[str, Any]:
        """A tree with the names and shapes of state() after a step; values mean nothing."""
        return self.state() | {"optimizer": self.updater.expected_state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint; an average that it lacks begins with the next step."""
        self.model.load_state_dict(state["model"])
        self.updater.load_state_dict(state["optimizer"])
        if self.maybe_average is not None and "average" in state:
            self.maybe_average.load_state_dict(state["average"])

    def tensors_behind_weights(self) -> Iterator[Tensor]:
        """What other ranks need of rank 0's beside the model's weights, in the same order everywhere."""
        yield from self.updater.momentum_buffers()
        if self.maybe_average is not None:
            yield from self.maybe_average.state_dict().values()


def share_kept(decay: float, num_steps: int) -> float:
    """How much of an average a step leaves.  num_steps: that are in it.

    Less than the decay at first: with 0.99 the weights of the first steps would weigh for hundreds.
    """
    return min(decay, (1 + num_steps) / (10 + num_steps))


def exported_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The plain state dict of a checkpoint's, or a learner's, state(): contiguous tensors on the host."""
    weights = state["model"]
    if "average" in state:
        weights = {
            name.removeprefix(AVERAGE_PREFIX): tensor
            for name, tensor in state["average"].items()
            if name.startswith(AVERAGE_PREFIX)
        }
    return {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
