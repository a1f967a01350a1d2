"""Training loop: one step after another; where the ranks agree to stop, save and evaluate."""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.rank import RankEnv
from cluster.spec import JobSpec
from jobs.augment import augment, normalize
from jobs.checkpoint import prune, save
from jobs.control import Control, Tally
from jobs.data import DataSet, epoch_order, global_batch_ids, share_of, steps_per_epoch
from jobs.digest import next_samples_digest
from jobs.evaluate import broadcast_buffers, evaluate
from jobs.metrics import Recorder
from jobs.optim import lr_at
from jobs.state import TrainState

log = logging.getLogger("run")


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


@dataclass(frozen=True, slots=True)
class Done:
    """What one step did; its loss arrives at a later boundary."""

    step: int  # its number, from 1
    epoch: int
    num_samples: int
    lr: float
    seconds: float
    ends_epoch: bool


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
class Loop:
    """The parts of one attempt, wired; run() trains until the end or until the ranks agree to stop.

    Losses travel behind the steps: at the boundary of step k this rank posts its loss of step k-1 and learns the sum of
    step k-2.  Before anything is saved both are waited for, so a checkpoint knows every loss up to its step.
    """

    spec: JobSpec
    env: RankEnv
    data: DataSet
    device: torch.device
    model: nn.Module  # unwrapped
    ddp: nn.parallel.DistributedDataParallel
    optimizer: torch.optim.SGD
    control: Control
    recorder: Recorder
    state: TrainState
    length: Length
    environment: Mapping[str, Any]  # what bit-equality depends on; goes into every manifest
    stop_signal: str = ""
    saved_step: int = 0  # the last step that a checkpoint holds
    began_s: float = 0.0  # time.monotonic() when the process started
    _is_first: bool = True
    _saved_s: float = field(default_factory=time.monotonic)
    _posted: Done | None = None  # its loss is on its way to the other ranks
    _unposted: tuple[Done, HostLoss] | None = None  # its loss is on its way to the host
    _order: tuple[int, Tensor] | None = None  # (epoch, sample ids)
    _window: tuple[int, float] = (0, 0.0)  # images and seconds since the last logged step

    def run(self) -> bool:
        """Train; True when all steps are done, False when the ranks agreed to stop and the run is saved."""
        self.learn(self.control.agree_now())
        while not self.is_done():
            if self.stop_signal:
                self.save_and_stop()
                return False
            if self.state.pending_line:
                self.evaluate()
            else:
                self.step()
        return True

    def is_done(self) -> bool:
        """Whether nothing is left to do; a stop that comes later than that is no reason to come back."""
        return self.state.step >= self.length.total_steps and not self.state.pending_line

    def save_and_stop(self) -> None:
        """What every rank does at the boundary where all have learned of a stop."""
        self.recorder.event("stop_requested", step=self.state.step, signal=self.stop_signal)
        log.info("%s: all ranks stop after step %d", self.stop_signal, self.state.step)
        self.settle()
        self.save()
        self.recorder.event("stopped", step=self.state.step, signal=self.stop_signal)

    def step(self) -> None:
        """One optimizer step and the boundary after it."""
        began = time.monotonic()
        state = self.state
        ids = self.batch_ids()
        epoch = state.epoch
        loss = self.forward_backward(ids)
        lr = self.update()
        state.samples_sha256 = next_samples_digest(bytes.fromhex(state.samples_sha256), ids).hex()
        save_agreed = self.boundary()
        seconds = time.monotonic() - began
        state.advance(len(ids), len(self.data.train_labels), seconds)
        done = Done(state.step, epoch, len(ids), lr, seconds, ends_epoch=state.samples == 0)
        self._unposted = (done, HostLoss(loss))
        self.after_step(done, save_agreed)

    def batch_ids(self) -> Tensor:
        """Sample ids of the next global batch, int64 (n,)."""
        if self._order is None or self._order[0] != self.state.epoch:
            self._order = (
                self.state.epoch,
                epoch_order(self.spec.train.seed, self.state.epoch, len(self.data.train_labels)),
            )
        return global_batch_ids(
            self._order[1], self.state.samples // self.length.global_batch, self.length.global_batch
        )

    def forward_backward(self, ids: Tensor) -> Tensor:
        """Gradients of the mean loss over the global batch, on every rank; returns this rank's sum of losses.

        DDP averages gradients over ranks, so each rank's loss is weighted by world size / global batch.  A rank without
        samples joins the collectives with a loss of nothing.
        """
        train, world_size = self.spec.train, self.env.world_size
        mine = share_of(ids, self.env.rank, world_size)
        torch.manual_seed(step_seed(train.seed, self.state.step, self.env.rank))
        images, labels = self.batch(mine if len(mine) else ids[:1])
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=train.precision == "bf16"):
            logits = self.ddp(images).float()
        loss: Tensor = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=train.label_smoothing
        ) * float(len(mine) > 0)
        (loss * (world_size / len(ids))).backward()  # type: ignore[no-untyped-call]
        return loss

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented, normalised images float32 (m, 3, 32, 32) and labels int64 (m,) on the device."""
        ids = ids.to(self.data.train_images.device)
        images = augment(
            self.data.train_images[ids],
            ops=self.spec.dataset.augment,
            seed=self.spec.train.seed,
            epoch=self.state.epoch,
            sample_ids=ids,
        )
        return normalize(images, self.data.mean, self.data.std), self.data.train_labels[ids]

    def update(self) -> float:
        """Clip, set the learning rate, step, clear gradients; returns the rate."""
        train = self.spec.train
        if train.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), train.clip_grad_norm)
        lr = lr_at(
            self.state.step,
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

    def boundary(self) -> bool:
        """Learn what the ranks posted one boundary ago, and post; returns whether to save now."""
        tally = self.control.take()
        self.learn(tally)
        self.post()
        return tally.save

    def post(self) -> None:
        """Post this rank's flags, and its loss of the step before."""
        self._posted, loss_sum = (None, 0.0)
        if self._unposted is not None:
            self._posted, loss_sum = self._unposted[0], self._unposted[1].read()
            self._unposted = None
        self.control.post(save=self.is_save_due(), loss_sum=loss_sum)

    def learn(self, tally: Tally) -> None:
        """Take in one sum: a stop, and the loss of the step that was posted."""
        self.stop_signal = self.stop_signal or tally.stop_signal
        done, self._posted = self._posted, None
        if done is not None:
            self.state.add_loss(tally.loss_sum, done.num_samples, ends_epoch=done.ends_epoch)
            self.log_step(done, tally.loss_sum / done.num_samples)

    def settle(self) -> None:
        """Learn everything that is still on its way; every rank calls it at the same boundary."""
        self.learn(self.control.take())
        self.post()
        self.learn(self.control.take())

    def is_save_due(self) -> bool:
        """Whether rank 0's clock asks for a save."""
        minutes = self.spec.checkpoint.every_minutes
        return self.env.rank == 0 and minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    def after_step(self, done: Done, save_agreed: bool) -> None:
        """Save where one is due."""
        every = self.spec.checkpoint.every_steps
        self.recorder.beat(phase="training", step=done.step, epoch=done.epoch)
        if self._is_first:
            self.recorder.event("first_step", step=done.step, seconds=round(time.monotonic() - self.began_s, 3))
            self._is_first = False
        at_end = done.ends_epoch or done.step == self.length.total_steps
        if at_end or save_agreed or (every is not None and done.step % every == 0):
            self.settle()
            self.save()

    def log_step(self, done: Done, loss: float) -> None:
        """Write a step's line of metrics; that of an epoch's last step waits for its evaluation."""
        train = self.spec.train
        images, seconds = self._window
        self._window = (images + done.num_samples, seconds + done.seconds)
        is_last = done.step == self.length.total_steps
        if not (is_last or done.ends_epoch or done.step % train.log_every_steps == 0):
            return
        rate = self._window[0] / self._window[1]
        self._window = (0, 0.0)
        line = {"step": done.step, "epoch": done.epoch, "loss": loss, "lr": done.lr, "images_per_s": round(rate, 1)}
        self.recorder.beat(loss=loss, images_per_s=round(rate, 1))
        if is_last or (done.ends_epoch and (done.epoch + 1) % train.eval_every_epochs == 0):
            self.state.pending_line = json.dumps(line)
        else:
            self.recorder.metrics_line({**line, "attempt": self.recorder.attempt})

    def save(self) -> None:
        """Commit a checkpoint of this step, unless there is one."""
        if self.state.step == self.saved_step:
            return
        self.saved_step, self._saved_s = self.state.step, time.monotonic()
        if not self.recorder.writes:
            return
        self.recorder.beat(phase="saving")
        self.state.metrics_bytes = self.recorder.metrics_size()
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": asdict(self.length),
            "state": self.state.as_dict(),
        }
        run, state = self.recorder.run, self.state
        manifest = save(
            run,
            content,
            step=state.step,
            epoch=state.epoch,
            attempt=self.recorder.attempt,
            environment=self.environment,
        )
        seconds = round(time.monotonic() - self._saved_s, 3)
        self.recorder.event("checkpoint_saved", step=state.step, bytes=manifest.size, seconds=seconds)
        self.drop_old()

    def drop_old(self) -> None:
        """Keep the newest checkpoints and the best; the newest has been read back by now."""
        best = self.state.best_step if self.state.best_step >= 0 else None
        if self.recorder.writes:
            prune(self.recorder.run.checkpoints, keep_last=self.spec.checkpoint.keep_last, maybe_best_step=best)

    def evaluate(self) -> None:
        """Evaluate the epoch that has just ended and write its line; nothing is kept when the ranks agree to stop."""
        state = self.state
        self.recorder.beat(phase="evaluating")
        if self.env.world_size > 1:
            broadcast_buffers(self.model)
        result = evaluate(
            self.model,
            self.data,
            rank=self.env.rank,
            world_size=self.env.world_size,
            device=self.device,
            precision=self.spec.train.precision,
            keep_going=self.keep_going,
            group=self.control.group,
        )
        if result is None:
            return
        line = json.loads(state.pending_line)
        state.pending_line, state.test_accuracy, state.test_loss = "", result.accuracy, result.loss
        figures = {"test_accuracy": result.accuracy, "test_loss": result.loss}
        self.recorder.metrics_line({**line, **figures, "attempt": self.recorder.attempt})
        self.recorder.event("evaluated", step=state.step, **figures)
        self.recorder.beat(accuracy=result.accuracy)
        log.info("step %d: test accuracy %.4f, test loss %.4f", state.step, result.accuracy, result.loss)
        if result.accuracy > state.best_accuracy:
            state.best_step, state.best_accuracy = state.step, result.accuracy
            self.recorder.best(state.step, result.accuracy)
            self.drop_old()  # the one that was the best before

    def keep_going(self) -> bool:
        """The boundary before each micro-batch of an evaluation; waits for the other ranks, who have as many."""
        self.learn(self.control.agree_now())
        return not self.stop_signal


def step_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of torch's generators for one micro-batch of one step, so that no random state needs saving.

    micro_batch: its number within the step, over all ranks.
    """
    text = f"step seed {seed} {step} {micro_batch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
