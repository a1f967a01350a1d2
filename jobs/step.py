"""One optimizer step: position -> [step] -> gradients, weights.  Where it is in the run is all it needs to know."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.rank import RankEnv
from cluster.spec import JobSpec
from jobs.batch import Reader
from jobs.data import DataSet, epoch_order, global_batch_ids, share_of, steps_per_epoch
from jobs.learner import Learner
from jobs.numerics import Numerics
from jobs.optim import lr_at
from jobs.pace import OwnClock, Span
from jobs.parallel import settle_buckets
from jobs.state import TrainState


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is; frozen when it starts, and the length of its schedule."""

    global_batch: int  # samples of a full step
    micro_batches: int  # that each step is cut into
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
        parts = num_micro_batches(spec, batch, world_size)
        return cls(batch, parts, per_epoch, total, round(spec.train.warmup_epochs * per_epoch))


def num_micro_batches(spec: JobSpec, global_batch: int, world_size: int) -> int:
    """Into how many parts a new run cuts a global batch: one for each rank of the largest world that the spec asks for.

    A run keeps this number, so that BatchNorm sees the same samples together whatever world it comes back on.
    """
    if spec.train.global_batch_size is None:
        return world_size
    if spec.train.micro_batch_size is not None:
        return -(-global_batch // spec.train.micro_batch_size)
    return max(spec.world_size, world_size)


class HostNumber:
    """A number on its way from the device to the host, read one step later so that no step waits for it."""

    def __init__(self, number: Tensor) -> None:
        """number: float32 (), on the device of the model."""
        self._event: torch.cuda.Event | None = None
        self._value = number.detach()
        if number.is_cuda:
            self._value = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._value.copy_(number.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> float:
        """The value; waits for the step that made it, not for those queued since."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


@dataclass(frozen=True, slots=True)
class Made:
    """What one step has made."""

    ids: Tensor  # of the global batch's samples, int64 (n,)
    loss: Tensor  # this rank's sum of losses, float32 ()
    lr: float
    maybe_grad_norm: Tensor | None  # of the gradient over all parameters, before clipping, float32 (); if asked for
    own: Span  # this rank's passes, without the wait for the others
    pieces: int  # micro-batches of this rank, at least 1


@dataclass
class Stepper:
    """Makes the steps of one rank; pure in the position but for the weights and the optimizer."""

    spec: JobSpec
    env: RankEnv
    data: DataSet
    numerics: Numerics
    ddp: nn.parallel.DistributedDataParallel
    learner: Learner
    length: Length
    _order: tuple[int, Tensor] | None = None  # (epoch, sample ids)
    clock: OwnClock = field(init=False)
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        """The clock hooks on to the model."""
        self.clock = OwnClock(self.ddp.module, self.numerics.device)
        self.reader = Reader(self.data, self.numerics, self.spec.dataset.augment, self.spec.train.seed)

    def settle(self) -> None:
        """Run DDP in before the first step; a compiled model as that step will, so that nothing is compiled in vain."""
        if not self.spec.train.compile:
            settle_buckets(self.ddp, self.numerics)
            return
        number = next(iter(self.own_micro_batches()), 1)
        set_running_statistics(self.ddp, tracked=number == 0)
        whole = torch.arange(self.length.global_batch)
        settle_buckets(self.ddp, self.numerics, max(1, len(share_of(whole, number, self.length.micro_batches))))

    def make(self, state: TrainState, before_update: Callable[[], None], *, with_norm: bool = False) -> Made:
        """Make the step that follows a position.

        before_update: called when the weights are about to change.  with_norm: whether to measure the gradient, which
        changes nothing.  The clock was begun by the caller.
        """
        ids = self.batch_ids(state)
        loss = self.forward_backward(ids, state)
        own = self.clock.span()
        before_update()
        norm = self.clip(with_norm=with_norm)
        return Made(ids, loss, self.update(state), norm, own, max(1, len(self.own_micro_batches())))

    def own_micro_batches(self) -> list[int]:
        """Numbers of this rank's micro-batches."""
        return share_of(torch.arange(self.length.micro_batches), self.env.rank, self.env.world_size).tolist()

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

        DDP averages gradients over ranks, so each rank's loss is weighted by world size / global batch.  Ranks share
        the micro-batches; all sum their gradients in the backward pass of their last one.
        """
        numbers = self.own_micro_batches()
        losses = []
        for number in numbers[:-1]:
            with self.ddp.no_sync():
                losses.append(self.micro_batch(number, ids, state))
        losses.append(self.micro_batch(numbers[-1] if numbers else None, ids, state))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def micro_batch(self, number: int | None, ids: Tensor, state: TrainState) -> Tensor:
        """Forward and backward pass of one micro-batch; its sum of losses, float32 ().

        number: which one of the step.  None, or one without samples: the rank joins the collectives with a loss of
        nothing.
        """
        train = self.spec.train
        mine = ids[:0] if number is None else share_of(ids, number, self.length.micro_batches)
        self.seed_generators(step_seed(train.seed, state.step, number or 0))
        set_running_statistics(self.ddp, tracked=number == 0)
        images, labels = self.reader.read(mine if len(mine) else ids[:1], state.epoch)
        with self.numerics.autocast():
            logits = self.ddp(images).float()
        loss: Tensor = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=train.label_smoothing
        ) * float(len(mine) > 0)
        (loss * (self.env.world_size / len(ids))).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seed_generators(self, seed: int) -> None:
        """Seed the generators that a forward pass may draw from; torch.manual_seed asks every backend, for 0.1 ms."""
        torch.default_generator.manual_seed(seed)
        if self.numerics.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def clip(self, *, with_norm: bool) -> Tensor | None:
        """Clip the gradient where the spec says so; returns its norm before that, float32 (), where it was measured."""
        limit = self.spec.train.clip_grad_norm
        if limit is not None:
            return nn.utils.clip_grad_norm_(self.ddp.parameters(), limit)
        if not with_norm:
            return None
        return nn.utils.get_total_norm(
            [parameter.grad for parameter in self.ddp.parameters() if parameter.grad is not None]
        )

    def update(self, state: TrainState) -> float:
        """Set the learning rates, step, clear gradients; returns SGD's rate."""
        return self.learner.update(
            lambda peak: lr_at(
                state.step,
                base_lr=peak,
                warmup_steps=self.length.warmup_steps,
                total_steps=self.length.total_steps,
                schedule=self.spec.train.schedule,
            )
        )


def set_running_statistics(model: nn.Module, *, tracked: bool) -> None:
    """Let BatchNorm update its running statistics or leave them as they are; it normalises by the batch either way.

    Only the first micro-batch of a step counts, which is rank 0's, and rank 0's statistics are the ones that are kept:
    so they do not depend on how many micro-batches a rank has.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = tracked


def step_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of torch's generators for one micro-batch of one step, so that no random state needs saving.

    micro_batch: its number within the step, over all ranks.
    """
    text = f"step seed {seed} {step} {micro_batch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
