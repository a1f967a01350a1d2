"""One optimizer step: position -> [step] -> gradients, weights.  Where it is in the run is all it needs to know."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.rank import RankEnv
from cluster.spec import JobSpec
from jobs.augment import augment, normalize
from jobs.data import DataSet, epoch_order, global_batch_ids, share_of, steps_per_epoch
from jobs.optim import lr_at
from jobs.state import TrainState


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is; frozen when it starts, and the length of its schedule."""

    global_batch: int  # samples of a full step
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int

    @classmethod
    def of(cls, spec: JobSpec, num_samples: int, world_size: int) -> "Length":
        """epochs or max_steps, whichever ends first."""
        batch = spec.train.global_batch(world_size)
        per_epoch = steps_per_epoch(num_samples, batch)
        total = spec.train.epochs * per_epoch
        if spec.train.max_steps is not None:
            total = min(total, spec.train.max_steps)
        return cls(batch, per_epoch, total, round(spec.train.warmup_epochs * per_epoch))


class HostLoss:
    """A loss on its way from the device to the host, read one step later so that no step waits for it."""

    def __init__(self, loss: Tensor) -> None:
        """loss: float32 (), on the device of the model."""
        self._event: torch.cuda.Event | None = None
        self._value = loss.detach()
        if loss.is_cuda:
            self._value = torch.empty((), dtype=loss.dtype, pin_memory=True)
            self._value.copy_(loss.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> float:
        """The value; waits for the step that made it, not for those queued since."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


@dataclass
class Stepper:
    """Makes the steps of one rank; pure in the position but for the weights and the optimizer."""

    spec: JobSpec
    env: RankEnv
    data: DataSet  # on the device
    device: torch.device
    ddp: nn.parallel.DistributedDataParallel
    optimizer: torch.optim.SGD
    length: Length
    _order: tuple[int, Tensor] | None = None  # (epoch, sample ids)

    def make(self, state: TrainState, before_update: Callable[[], None]) -> tuple[Tensor, Tensor, float]:
        """Make the step that follows a position.

        before_update: called when the weights are about to change.

        Returns the global batch's sample ids, int64 (n,); this rank's sum of losses, float32 (); the learning rate.
        """
        ids = self.batch_ids(state)
        loss = self.forward_backward(ids, state)
        before_update()
        return ids, loss, self.update(state)

    def batch_ids(self, state: TrainState) -> Tensor:
        """Sample ids of the next global batch, int64 (n,)."""
        if self._order is None or self._order[0] != state.epoch:
            self._order = (
                state.epoch,
                epoch_order(self.spec.train.seed, state.epoch, len(self.data.train_labels)),
            )
        return global_batch_ids(self._order[1], state.samples // self.length.global_batch, self.length.global_batch)

    def forward_backward(self, ids: Tensor, state: TrainState) -> Tensor:
        """Gradients of the mean loss over the global batch, on every rank; returns this rank's sum of losses.

        DDP averages gradients over ranks, so each rank's loss is weighted by world size / global batch.  A rank without
        samples joins the collectives with a loss of nothing.
        """
        train, world_size = self.spec.train, self.env.world_size
        mine = share_of(ids, self.env.rank, world_size)
        torch.manual_seed(step_seed(train.seed, state.step, self.env.rank))
        images, labels = self.batch(mine if len(mine) else ids[:1], state.epoch)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=train.precision == "bf16"):
            logits = self.ddp(images).float()
        loss: Tensor = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=train.label_smoothing
        ) * float(len(mine) > 0)
        (loss * (world_size / len(ids))).backward()  # type: ignore[no-untyped-call]
        return loss

    def batch(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Augmented, normalised images float32 (m, 3, 32, 32) and labels int64 (m,) on the device."""
        ids = ids.to(self.data.train_images.device)
        images = augment(
            self.data.train_images[ids],
            ops=self.spec.dataset.augment,
            seed=self.spec.train.seed,
            epoch=epoch,
            sample_ids=ids,
        )
        return normalize(images, self.data.mean, self.data.std), self.data.train_labels[ids]

    def update(self, state: TrainState) -> float:
        """Clip, set the learning rate, step, clear gradients; returns the rate."""
        train = self.spec.train
        if train.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), train.clip_grad_norm)
        lr = lr_at(
            state.step,
            base_lr=train.lr,
            warmup_steps=self.length.warmup_steps,
            total_steps=self.length.total_steps,
            schedule=train.schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr


def step_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of torch's generators for one micro-batch of one step, so that no random state needs saving.

    micro_batch: its number within the step, over all ranks.
    """
    text = f"step seed {seed} {step} {micro_batch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
