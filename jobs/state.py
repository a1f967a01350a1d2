"""Training state: what a run is besides weights; checkpoint -> [state] -> loop.  Times aside, equal on all ranks."""

from dataclasses import asdict, dataclass
from typing import Any

from jobs.digest import NO_SAMPLES


@dataclass
class TrainState:
    """Position and sums after some number of optimizer steps; all of it is kept in a checkpoint."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch of the next step, from 0
    samples: int = 0  # samples of that epoch that are used up; 0 at an epoch's start, never its length
    images: int = 0  # training images over all steps
    step_seconds: float = 0.0  # spent in those steps
    samples_sha256: str = NO_SAMPLES.hex()
    epoch_loss_sum: float = 0.0  # over the samples of the current epoch
    epoch_loss_samples: int = 0
    train_loss: float = 0.0  # mean of the current epoch so far; of the last one where an epoch starts
    pending_line: str = ""  # metrics line of an epoch's last step, waiting for its evaluation
    best_step: int = -1  # -1: nothing evaluated yet
    best_accuracy: float = -1.0
    test_accuracy: float = -1.0  # of the last evaluation
    test_loss: float = -1.0
    metrics_bytes: int = 0  # length of metrics.jsonl

    def advance(self, num_samples: int, epoch_length: int, seconds: float) -> None:
        """Count one optimizer step; the end of an epoch is the start of the next."""
        self.step += 1
        self.images += num_samples
        self.step_seconds += seconds
        self.samples += num_samples
        if self.samples == epoch_length:
            self.epoch, self.samples = self.epoch + 1, 0

    def add_loss(self, loss_sum: float, num_samples: int, *, ends_epoch: bool) -> None:
        """Count the loss of one global batch."""
        self.epoch_loss_sum += loss_sum
        self.epoch_loss_samples += num_samples
        self.train_loss = self.epoch_loss_sum / self.epoch_loss_samples
        if ends_epoch:
            self.epoch_loss_sum, self.epoch_loss_samples = 0.0, 0

    def as_dict(self) -> dict[str, Any]:
        """Primitives only, as a checkpoint holds them."""
        return asdict(self)
