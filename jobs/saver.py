"""Saver: training loop -> [saver] -> checkpoints, written beside the training.  Rank 0's alone writes.

One save is in flight at a time.  What goes wrong with it is seen at the next step: a storage that fails costs that save
and a warning, until checkpoint.max_failed_saves of them in a row.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.spec import CheckpointSpec
from jobs.checkpoint import CheckpointError, data_path, prune, save
from jobs.faults import Faults
from jobs.hostcopy import HostCopy
from jobs.learner import Learner
from jobs.metrics import Recorder
from jobs.state import TrainState
from jobs.storage import free_bytes, reserve

log = logging.getLogger("run")

OVERHEAD_BYTES = 1 << 18  # of a checkpoint beside its tensors: names, shapes, padding


class SaveError(RuntimeError):
    """No checkpoint can be saved."""

    failure_kind = "disk"


@dataclass
class Saver:
    """Takes the state of one attempt and keeps it safe."""

    recorder: Recorder
    settings: CheckpointSpec
    learner: Learner
    environment: Mapping[str, Any]  # what bit-equality depends on; goes into every manifest
    faults: Faults
    committed_step: int = 0  # the last step that a checkpoint holds
    maybe_best_step: int | None = None  # kept beside the newest
    lead_s: float = math.inf  # from Slurm's warning to the end of the allocation
    failures: int = 0  # in a row
    last_failure: str = ""
    _size: int = 0  # bytes of a checkpoint, about
    _stall_s: float = 0.0  # what the save in flight has cost the training
    _told_of_lead: bool = False
    _copy: HostCopy = field(default_factory=HostCopy)
    _thread: threading.Thread | None = None
    _maybe_error: BaseException | None = None  # of the thread: not the storage's

    def prepare(self) -> None:
        """Allocate the host buffers, and try whether the folder takes a checkpoint.

        Raises SaveError: it does not, and there is none to go on from: better now than after the first hour.
        """
        if not self.recorder.writes:
            return
        self._size = OVERHEAD_BYTES + self._copy.prepare(self.learner.expected_state())
        run = self.recorder.run
        try:
            reserve(run.checkpoints / f"trial.a{self.recorder.attempt:04d}.tmp", self._size)
        except OSError as error:
            self._note_failure(f"trial of a save: {self._describe(error)}")
            if self.committed_step == 0:
                raise SaveError(self.last_failure) from None

    def begin(self, state: TrainState, schedule: Mapping[str, Any]) -> None:
        """Start to save this position; waits for the save before it, if that is still being written."""
        if not self.recorder.writes:
            return
        began = time.monotonic()
        self.wait()
        if not self.recorder.flush():  # a checkpoint speaks of lines that are in metrics.jsonl
            self._note_failure(f"step {state.step} was not saved: metrics.jsonl cannot be written", step=state.step)
            return
        content = {
            **self.learner.state(),
            "schedule": dict(schedule),
            "state": state.as_dict() | {"metrics_bytes": self.recorder.metrics_size()},
        }
        copy = self._copy.start(content, self.learner.model.buffers())
        self._thread = threading.Thread(target=self._write, args=(copy,), name="saver", daemon=True)
        self._thread.start()
        self._stall_s = time.monotonic() - began

    def release(self) -> None:
        """Return when weights and optimizer state may change: the save in flight has its copy of them."""
        if self._thread is not None:
            began = time.monotonic()
            self._copy.wait()
            self._stall_s += time.monotonic() - began

    def check(self) -> bool:
        """Look after the save in flight; True when too many have failed to go on.

        Raises SupersededError: a later attempt owns the run.  Raises whatever else the writing thread met.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        return self.failures >= self.settings.max_failed_saves

    def wait(self) -> None:
        """Wait until no save is in flight; raises as check() does."""
        if self._thread is not None:
            if self._thread.is_alive():
                self.recorder.beat(phase="saving")
            self._thread.join()
            self._thread = None
        error, self._maybe_error = self._maybe_error, None
        if error is not None:
            raise error

    def _write(self, content: dict[str, Any]) -> None:
        """Save what is being copied; on a thread of its own, while the training goes on."""
        began = time.monotonic()
        step = content["state"]["step"]
        try:
            self._copy.finish()
            manifest = save(
                self.recorder.run,
                content,
                step=step,
                epoch=content["state"]["epoch"],
                attempt=self.recorder.attempt,
                environment=self.environment,
                while_writing=lambda: self.faults.while_saving(step),
            )
            self.committed_step, self._size, self.failures = step, manifest.size, 0
            seconds = time.monotonic() - began
            figures = {"seconds": round(seconds, 3), "stall_seconds": round(self._stall_s, 5)}
            self.recorder.event("checkpoint_saved", step=step, bytes=manifest.size, **figures)
            self._compare_with_lead(seconds)
        except (OSError, CheckpointError) as error:
            path = data_path(self.recorder.run.checkpoints, step)
            self._note_failure(f"{path.name} was not saved: {self._describe(error)}", step=step)
        except BaseException as error:
            self._maybe_error = error
        else:
            self._drop_old()

    def _compare_with_lead(self, seconds: float) -> None:
        """Warn once where a save takes so long that the one before a time limit may come too late."""
        if 2 * seconds > self.lead_s and not self._told_of_lead:
            self._told_of_lead = True
            log.warning(
                "a save took %.1f s, and signal_lead_s is %.0f s: give at least twice what a save takes, and a step",
                seconds,
                self.lead_s,
            )

    def finish(self) -> bool:
        """Wait for the save in flight; whether the last one that was begun has been committed."""
        self.wait()
        if self.recorder.writes and self.failures == 0:
            self._drop_old()  # what was the best until the last evaluation
        return self.failures == 0

    def _drop_old(self) -> None:
        """Keep the newest checkpoints and the best; the newest has been read back by now."""
        try:
            prune(
                self.recorder.run.checkpoints,
                keep_last=self.settings.keep_last,
                maybe_best_step=self.maybe_best_step,
                maybe_max_bytes=self.settings.keep_size_bytes,
            )
        except OSError as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def _note_failure(self, text: str, **fields: int) -> None:
        self.failures += 1
        limit = self.settings.max_failed_saves
        self.last_failure = text
        log.warning("%s (failure %d in a row; checkpoint.max_failed_saves is %d)", text, self.failures, limit)
        self.recorder.event("save_failed", reason=text, **fields)

    def _describe(self, error: Exception) -> str:
        """What the storage said, and how much was asked of it."""
        folder = self.recorder.run.checkpoints
        if not isinstance(error, OSError):
            return f"{folder}: {error}"
        return f"{folder}: {error.strerror}; {self._size:,} bytes were wanted, {free_bytes(folder):,} are free"
