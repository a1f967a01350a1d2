"""Recorder: training loop -> [metrics] -> events.jsonl, metrics.jsonl, heartbeat.json.  Rank 0's alone writes.

metrics.jsonl holds each logged step once: a resumed run cuts it back to where its checkpoint stood.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.runs import EXIT_FAILED, RunFolder, SupersededError, append_line, read_lines, utc_now, write_json
from jobs.mirror import Mirror

log = logging.getLogger("run")

BEAT_S = 5.0
FENCE_S = 1.0  # less than a successor needs from its claim to its first write


class Recorder:
    """Writes what a run tells the world.  On ranks other than 0 every method does nothing."""

    def __init__(
        self, run: RunFolder, *, attempt: int, job_id: str, writes: bool, stop_name: Callable[[], str] = lambda: ""
    ) -> None:
        """writes: whether this is rank 0.  stop_name: the signal that has asked it to stop; empty while none has."""
        self._stop_name = stop_name
        self.run = run
        self.attempt = attempt
        self._job_id = job_id
        self.writes = writes
        self._looked_s = -math.inf
        self._pending: list[tuple[Path, dict[str, Any]]] = []  # lines that a full disk did not take
        self._beat: dict[str, Any] = {"phase": "starting", "step": 0}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._lines_lock = threading.Lock()
        self._maybe_mirror: Mirror | None = None
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)

    def _may_write(self) -> bool:
        """Whether this is rank 0, of the attempt that owns the run.

        Looks again once FENCE_S have passed since the last look: a process that was held still and goes on after a
        successor has started notices by the clock, before it writes anything.

        Raises SupersededError: a later attempt owns the run.
        """
        if self.writes and time.monotonic() - self._looked_s > FENCE_S:
            self.run.check_owner(self.attempt)
            self._looked_s = time.monotonic()
        return self.writes

    def event(self, name: str, /, **fields: Any) -> None:  # noqa: ANN401
        """Add one event."""
        if self._may_write():
            head = {"time": utc_now(), "event": name, "attempt": self.attempt, "job_id": self._job_id}
            self._append(self.run.events, head | fields)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        """Add a line behind those that wait still."""
        with self._lines_lock:
            self._pending.append((path, line))
            is_first = len(self._pending) == 1
        if not self.flush() and is_first:
            log.warning("%s cannot be written now; lines are kept and tried again", path)

    def flush(self) -> bool:
        """Write the lines that wait, in their order; False when the storage does not take them now.

        A full disk must not end the training, and no line may be lost: they are kept and tried again with the next.
        """
        with self._lines_lock:
            try:
                while self._pending:
                    append_line(*self._pending[0])
                    del self._pending[0]
            except OSError:
                return False
        return True

    def start_beating(self) -> None:
        """Rewrite the heartbeat every BEAT_S seconds from now on, and at each change of phase."""
        if self.writes:
            self._write_beat()
            self._thread.start()

    def beat(self, **fields: Any) -> None:  # noqa: ANN401
        """Say where the run is; a new phase is written at once, the rest with the next beat."""
        if not self._may_write():
            return
        changed = "phase" in fields and fields["phase"] != self._beat["phase"]
        self._beat = self._beat | fields
        if changed:
            self._try_to_beat()

    def stop_beating(self) -> None:
        """Write the last heartbeat and no other."""
        if self._may_write() and not self._ended.is_set():
            self._ended.set()
            self._try_to_beat()

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._try_to_beat()
            except SupersededError as error:
                log.error("%s", error)
                os._exit(EXIT_FAILED)

    def _try_to_beat(self) -> None:
        """Write a heartbeat; a full disk costs this one only.

        Raises SupersededError: a later attempt owns the run.
        """
        try:
            self.run.check_owner(self.attempt)
            self._write_beat()
        except OSError as error:
            log.warning("no heartbeat this time: %s", error)

    def _write_beat(self) -> None:
        signalled = {"stop_signal": name} if (name := self._stop_name()) else {}
        beat = {"time": utc_now(), "attempt": self.attempt, **self._beat, **signalled}
        with self._lock:  # looked at once more: a process can be held still in the middle of a write
            write_json(self.run.heartbeat, beat, before_rename=lambda: self.run.check_owner(self.attempt))

    def metrics_line(self, line: dict[str, Any]) -> None:
        """Add one logged step, with the moment and the attempt."""
        if self._may_write():
            self._append(self.run.metrics, {**line, "time": utc_now(), "attempt": self.attempt})
            if self._maybe_mirror is not None:
                self._maybe_mirror.look()

    def start_mirror(self) -> None:
        """Write tensorboard/ from now on; metrics.jsonl is cut back by now."""
        if self.writes:
            self._maybe_mirror = Mirror(self.run, self.attempt)
            self._maybe_mirror.start()

    def end_mirror(self) -> None:
        """Return once tensorboard/ says all that metrics.jsonl says."""
        if self._maybe_mirror is not None:
            self._maybe_mirror.end()

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl: the place that a checkpoint points to, once it has synced the file."""
        return self.run.metrics.stat().st_size if self.writes and self.run.metrics.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Take back the lines of steps that the checkpoint does not know."""
        if not self.writes:
            return
        self.run.metrics.touch()
        if self.run.metrics.stat().st_size > size:
            os.truncate(self.run.metrics, size)

    def best(self, step: int, accuracy: float) -> None:
        """Say which checkpoint is the best by evaluation."""
        if not self._may_write():
            return
        try:
            write_json(self.run.checkpoints / "best.json", {"step": step, "test_accuracy": accuracy})
        except OSError as error:
            log.warning("best.json does not say that step %d is the best: %s", step, error)

    def last_known_step(self) -> int:
        """The last step that earlier attempts are known to have done."""
        beat = self.run.read_json(self.run.heartbeat)
        return max([int(beat.get("step", 0)), *(int(line["step"]) for line in read_lines(self.run.metrics))])
