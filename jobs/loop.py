"""Training loop: one step after another; where the ranks agree to stop, save and evaluate."""

import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.rank import RankEnv
from cluster.spec import JobSpec
from jobs.control import Control, Tally
from jobs.data import DataSet
from jobs.device import memory_mib
from jobs.digest import next_samples_digest
from jobs.done import Done, OnItsWay, Window
from jobs.evaluate import broadcast_buffers, evaluate
from jobs.faults import Faults
from jobs.learner import Learner
from jobs.metrics import Recorder
from jobs.numerics import Numerics
from jobs.phases import Phases
from jobs.saver import SaveError, Saver
from jobs.state import TrainState
from jobs.step import Length, Stepper
from jobs.watchdog import Watch

log = logging.getLogger("run")


class NanLossError(ArithmeticError):
    """The loss is no number; every rank raises this at the same boundary, and before a save."""

    failure_kind = "nan"


@dataclass
class Loop:
    """The parts of one attempt, wired; run() trains until the end or until the ranks agree to stop.

    Losses travel behind the steps: at the boundary of step k this rank posts its loss of step k-1 and learns the sum of
    step k-2.  Before anything is saved both are waited for, so a checkpoint knows every loss up to its step.
    """

    spec: JobSpec
    env: RankEnv
    data: DataSet
    numerics: Numerics
    learner: Learner
    stepper: Stepper
    control: Control
    recorder: Recorder
    state: TrainState
    length: Length
    saver: Saver
    faults: Faults
    stop_signal: str = ""
    saved_step: int = 0  # the last step that was saved, or is being saved
    phases: Phases = field(default_factory=Phases)  # of the start, until the first step has ended
    watch: Watch = field(default_factory=Watch)
    _is_first: bool = True
    _saved_s: float = field(default_factory=time.monotonic)
    _posted: Done | None = None  # its loss is on its way to the other ranks
    _unposted: OnItsWay | None = None  # its loss is on its way to the host
    _window: Window = field(default_factory=Window)

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
        self.watch.at("saving", self.state.step)
        self.saver.finish()
        self.recorder.end_mirror()
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
        self.watch.at("saving", self.state.step)
        if not self.saver.finish():
            log.error("the run goes on from step %d: the last save failed", self.saver.committed_step)
        self.recorder.event("stopped", step=self.saver.committed_step, signal=self.stop_signal)
        self.recorder.end_mirror()

    def step(self) -> None:
        """One optimizer step and the boundary after it."""
        began = time.monotonic()
        self.stepper.clock.begin()
        state = self.state
        self.watch.at("training", state.step)
        self.faults.before_step(state.step)
        epoch, with_norm = state.epoch, self.recorder.writes and self.is_next_logged()
        made = self.stepper.make(state, before_update=self.saver.release, with_norm=with_norm)
        state.samples_sha256 = next_samples_digest(bytes.fromhex(state.samples_sha256), made.ids).hex()
        save_agreed = self.boundary()
        seconds = time.monotonic() - began
        state.advance(len(made.ids), len(self.data.train_labels), seconds)
        done = Done(state.step, epoch, len(made.ids), made.lr, seconds, ends_epoch=state.samples == 0)
        self._unposted = OnItsWay.of(done, made)
        self.after_step(done, save_agreed)

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
            self._posted, loss_sum = self._unposted.arrived()
            self.watch.worked(self._unposted.made.own.seconds(), self._unposted.made.pieces)
            self._unposted = None
        self.control.post(save=self.is_save_due(), give_up=self.saver.check(), loss_sum=loss_sum)

    def learn(self, tally: Tally) -> None:
        """Take in one sum: a stop, and the loss of the step that was posted."""
        self.stop_signal = self.stop_signal or tally.stop_signal
        if tally.give_up:
            raise SaveError(self.control.broadcast_object(self.saver.last_failure))
        done, self._posted = self._posted, None
        if done is not None:
            if not math.isfinite(tally.loss_sum):
                raise NanLossError(f"the loss of step {done.step} is {tally.loss_sum}; nothing is saved from here on")
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
            self.phases.end("first_step")
            told = {"seconds": self.phases.total_s(), "phases": self.phases.seconds}
            self.recorder.event("first_step", step=done.step, **told)
            self._is_first = False
        self.name_slow_rank()
        at_end = done.ends_epoch or done.step == self.length.total_steps
        if at_end or save_agreed or (every is not None and done.step % every == 0):
            self.settle()
            self.save()

    def is_next_logged(self) -> bool:
        """Whether the step that comes next gets a line of metrics."""
        ends_epoch = self.state.samples + self.length.global_batch >= len(self.data.train_labels)
        return self.is_logged(self.state.step + 1, ends_epoch=ends_epoch)

    def is_logged(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether a step gets a line of metrics."""
        return step == self.length.total_steps or ends_epoch or step % self.spec.train.log_every_steps == 0

    def log_step(self, done: Done, loss: float) -> None:
        """Write a step's line of metrics; that of an epoch's last step waits for its evaluation."""
        self._window.add(done)
        if not self.is_logged(done.step, ends_epoch=done.ends_epoch):
            return
        window, self._window = self._window, Window()
        line: dict[str, Any] = {
            "step": done.step,
            "epoch": done.epoch,
            "loss": loss,
            "lr": done.lr,
            "grad_norm": done.maybe_grad_norm,
            **window.figures(),
            "slowest_rank": self.watch.pace.maybe_slowest,
            "memory_mib": memory_mib(self.numerics.device),
        }
        self.recorder.beat(loss=loss, images_per_s=line["images_per_s"])
        every = self.spec.train.eval_every_epochs
        if done.step == self.length.total_steps or (done.ends_epoch and (done.epoch + 1) % every == 0):
            self.state.pending_line = json.dumps(line)
        else:
            self.recorder.metrics_line(line)

    def name_slow_rank(self) -> None:
        """Tell of a rank for which the others have been waiting."""
        slow = self.watch.pace.maybe_news()
        if slow is not None:
            log.warning(
                "rank %d on %s is slow: its own part of a step takes %.1f times as long as the others' (median)",
                slow.rank,
                slow.host,
                slow.factor,
            )
            self.recorder.event("slow_rank", rank=slow.rank, host=slow.host, factor=slow.factor)

    def save(self) -> None:
        """Begin to save this step, unless that was done."""
        if self.state.step != self.saved_step:
            self.saved_step, self._saved_s = self.state.step, time.monotonic()
            self.watch.at("saving", self.state.step)
            self.saver.begin(self.state, {**asdict(self.length), "precision": self.numerics.precision})

    def evaluate(self) -> None:
        """Evaluate the epoch that has just ended and write its line; nothing is kept when the ranks agree to stop."""
        state = self.state
        self.recorder.beat(phase="evaluating")
        self.watch.at("evaluating", state.step)
        if self.env.world_size > 1:
            broadcast_buffers(self.learner.evaluated)
        result = evaluate(
            self.learner.evaluated,
            self.data,
            rank=self.env.rank,
            world_size=self.env.world_size,
            numerics=self.numerics,
            with_mirrored=self.spec.train.eval_flip,
            keep_going=self.keep_going,
            group=self.control.group,
        )
        if result is None:
            return
        line = json.loads(state.pending_line)
        state.pending_line, state.test_accuracy, state.test_loss = "", result.accuracy, result.loss
        figures = {"test_accuracy": result.accuracy, "test_loss": result.loss}
        self.recorder.metrics_line({**line, **figures})
        self.recorder.event("evaluated", step=state.step, **figures)
        self.recorder.beat(accuracy=result.accuracy)
        log.info("step %d: test accuracy %.4f, test loss %.4f", state.step, result.accuracy, result.loss)
        if result.accuracy > state.best_accuracy:
            state.best_step, state.best_accuracy = state.step, result.accuracy
            self.recorder.best(state.step, result.accuracy)
            self.saver.maybe_best_step = state.step

    def keep_going(self) -> bool:
        """The boundary before each micro-batch of an evaluation; waits for the other ranks, who have as many."""
        self.watch.at("evaluating", self.state.step)
        self.learn(self.control.agree_now())
        return not self.stop_signal
