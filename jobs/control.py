"""Agreement between ranks: signals and losses -> [control] -> the same decision at the same step boundary.

Every boundary each rank posts a small vector to an all-reduce on a gloo group of its own, beside the training, and
reads the sum of the boundary before.  That sum is complete by then, since no rank can finish a step whose gradients
another has not joined: the step waits for nothing, and one rank's signal is enough for all.
"""

import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cluster.signals import STOP_SIGNALS, StopFlag

SAVE, GIVE_UP, LOSS = range(len(STOP_SIGNALS), len(STOP_SIGNALS) + 3)  # slots behind one for each stop signal


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of what all ranks posted at one boundary."""

    stop_signal: str = ""  # name of a signal that at least one rank got, empty when none did
    save: bool = False  # rank 0's clock says that it is time
    give_up: bool = False  # rank 0 can save no more
    loss_sum: float = 0.0  # summed over the samples of one global batch


class Control:
    """One rank's end of the agreement."""

    def __init__(self, group: dist.ProcessGroup, stop: StopFlag) -> None:
        """group: a gloo group of all ranks; between post and take it carries nothing else."""
        self.group = group
        self._stop = stop
        self._vector = torch.zeros(LOSS + 1, dtype=torch.float64)
        self._work: dist.Work | None = None

    def post(self, *, save: bool = False, give_up: bool = False, loss_sum: float = 0.0) -> None:
        """Post this rank's flags and loss; what was posted before must have been taken."""
        assert self._work is None
        vector = torch.zeros(LOSS + 1, dtype=torch.float64)
        for slot, number in enumerate(STOP_SIGNALS):
            vector[slot] = float(number in self._stop.first_s)
        vector[SAVE], vector[GIVE_UP] = float(save), float(give_up)
        vector[LOSS] = loss_sum
        self._vector = vector
        self._work = dist.all_reduce(vector, group=self.group, async_op=True)

    def take(self) -> Tally:
        """Wait for what was posted last; an empty tally when nothing was."""
        if self._work is None:
            return Tally()
        self._work.wait()
        self._work = None
        values = self._vector.tolist()
        names = [signal.Signals(number).name for slot, number in enumerate(STOP_SIGNALS) if values[slot]]
        return Tally(names[0] if names else "", bool(values[SAVE]), bool(values[GIVE_UP]), values[LOSS])

    def agree_now(self) -> Tally:
        """Post and take: for boundaries outside the training steps."""
        self.post()
        return self.take()

    def wait_for_all(self) -> None:
        """Return once every rank has called this."""
        dist.barrier(group=self.group)

    def broadcast_object(self, value: Any) -> Any:  # noqa: ANN401
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with rank 0's values, whatever device it is on."""
        on_host = tensor.cpu()
        dist.broadcast(on_host, src=0, group=self.group)
        tensor.copy_(on_host)
