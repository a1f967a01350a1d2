"""Steps that are done: step -> [done] -> the numbers of a line of metrics.  They reach the host behind the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jobs.step import HostNumber, Made


@dataclass(frozen=True, slots=True)
class Done:
    """What one step did; its loss arrives at a later boundary."""

    step: int  # its number, from 1
    epoch: int
    num_samples: int
    lr: float
    seconds: float
    ends_epoch: bool
    maybe_grad_norm: float | None = None  # before clipping; of logged steps, on rank 0


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """A step whose numbers have not reached the host yet."""

    done: Done
    made: Made
    loss: HostNumber
    maybe_grad_norm: HostNumber | None

    @classmethod
    def of(cls, done: Done, made: Made) -> "OnItsWay":
        """Send them."""
        norm = made.maybe_grad_norm
        return cls(done, made, HostNumber(made.loss), None if norm is None else HostNumber(norm))

    def arrived(self) -> tuple[Done, float]:
        """The step with its norm, and this rank's loss; waits for the step, not for those queued since."""
        loss = self.loss.read()
        if self.maybe_grad_norm is None:
            return self.done, loss
        norm = self.maybe_grad_norm.read()
        return replace(self.done, maybe_grad_norm=norm if math.isfinite(norm) else None), loss


@dataclass
class Window:
    """The steps since the last logged one, as rank 0 saw them."""

    images: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, done: Done) -> None:
        """Count one step."""
        self.images += done.num_samples
        self.seconds.append(done.seconds)

    def figures(self) -> dict[str, float]:
        """Rate and step times, in the words of metrics.jsonl."""
        in_order = sorted(self.seconds)
        return {
            "images_per_s": round(self.images / sum(in_order), 1),
            "step_ms_p50": round(1000 * percentile(in_order, 50), 3),
            "step_ms_p95": round(1000 * percentile(in_order, 95), 3),
        }


def percentile(in_order: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many percent of all do not exceed.  in_order: ascending, not empty."""
    return in_order[math.ceil(len(in_order) * percent / 100) - 1]
