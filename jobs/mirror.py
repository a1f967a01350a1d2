"""Mirror: metrics.jsonl -> [mirror] -> tensorboard/, which says the same.  Rank 0's alone writes.

An event file cannot be cut back to where a checkpoint stood, and a kill leaves its end torn.  So it is no second
record: each attempt writes one event file anew from metrics.jsonl, once that is cut back, and empties the older ones.
Source: tensorboard 2.15 to 2.21.  For viewers that look on while a run comes back: a SessionLog START takes back the
steps from its own on, and a DirectoryWatcher goes on to the next file unless the one before it is gone.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import IO, Any

from cluster.runs import RunFolder, SupersededError

log = logging.getLogger("run")

POLL_S = 30.0  # after which lines that a full disk kept back are looked for
LAST_S = 10.0  # for the last lines; Slurm may be about to kill this process


class Mirror(threading.Thread):
    """Writes event files beside the training; no step waits for it, and what fails here fails nothing else."""

    def __init__(self, run: RunFolder, attempt: int) -> None:
        """Nothing is read or written before start(), and metrics.jsonl is cut back by then."""
        super().__init__(name="mirror", daemon=True)
        self._run, self._attempt = run, attempt
        self._wake, self._is_over = threading.Event(), False
        self._maybe_file: IO[bytes] | None = None
        self._read = 0  # bytes of metrics.jsonl that are mirrored
        self._has_warned = False

    def look(self) -> None:
        """metrics.jsonl may have grown."""
        self._wake.set()

    def end(self) -> None:
        """Return once all lines are mirrored, or LAST_S have passed; the next attempt would do the rest."""
        self._is_over = True
        self._wake.set()
        self.join(LAST_S)

    def run(self) -> None:
        """Follow metrics.jsonl to its end."""
        try:
            while not self._is_over:
                self._wake.clear()
                self._follow()
                self._wake.wait(POLL_S)
            self._follow()
        except SupersededError:  # the run has another owner; the main thread notices by itself
            return
        except Exception:
            log.exception("tensorboard/ is no longer written; the training goes on, and so does metrics.jsonl")
        finally:
            self._close()

    def _close(self) -> None:
        if self._maybe_file is not None:
            with contextlib.suppress(OSError):
                self._maybe_file.close()
        self._maybe_file = None

    def _follow(self) -> None:
        """Mirror what is new; after the storage has failed, all of it once more."""
        try:
            if self._maybe_file is None:
                self._start_file()
            self._copy()
        except OSError as error:
            self._close()
            self._read = 0
            if not self._has_warned:
                self._has_warned = True
                log.warning("tensorboard/ cannot be written now, and is tried again: %s", error)

    def _start_file(self) -> None:
        """Make this attempt's event file, with all lines so far; those of earlier attempts are empty from then on."""
        folder = self._run.tensorboard
        self._run.check_owner(self._attempt)
        folder.mkdir(exist_ok=True)
        path = folder / f"events.out.tfevents.a{self._attempt:04d}"  # sorts by attempt, as viewers read them
        temporary = folder / f".a{self._attempt:04d}.tmp"  # viewers read whatever has tfevents in its name
        self._maybe_file = temporary.open("wb")
        write_records(self._maybe_file, opening_records())
        self._copy()
        self._run.check_owner(self._attempt)
        temporary.replace(path)
        for old in folder.iterdir():
            if old.suffix == ".tmp":
                old.unlink()
            elif old != path:
                os.truncate(old, 0)

    def _copy(self) -> None:
        """Add the lines that are whole and not mirrored yet."""
        assert self._maybe_file is not None
        with self._run.metrics.open("rb") as metrics:
            metrics.seek(self._read)
            text = metrics.read()
        text = text[: text.rfind(b"\n") + 1]
        if text:
            self._run.check_owner(self._attempt)
            write_records(self._maybe_file, [record_of(line) for line in objects(text)])
            self._read += len(text)


def objects(text: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of whole lines; a line that a kill cut short is left out, as everywhere."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield dict(json.loads(line))


def write_records(file: IO[bytes], records: Iterable[bytes]) -> None:
    """Add records in TensorFlow's framing, and hand them to the storage.

    Raises OSError: it did not take them.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    for record in records:
        writer.write(record)
    file.flush()


def opening_records() -> list[bytes]:
    """How an event file begins: its form, and that all steps come anew."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now_s = time.time()
    start = Event(wall_time=now_s, step=0, session_log=SessionLog(status=SessionLog.START))
    return [event.SerializeToString() for event in (Event(wall_time=now_s, file_version="brain.Event:2"), start)]


def record_of(line: Mapping[str, Any]) -> bytes:
    """One line of metrics.jsonl as an event: every number in it is a scalar of its key's name."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = {key: value for key, value in line.items() if key != "step" and isinstance(value, int | float)}
    values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
    event = Event(wall_time=unix_s(line["time"]), step=line["step"], summary=Summary(value=values))
    return bytes(event.SerializeToString())


def unix_s(text: str) -> float:
    """Seconds since 1970 of a text that utc_now() made."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
