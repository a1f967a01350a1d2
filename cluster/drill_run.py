"""One run of a drill: a small spec -> [drill_run] -> submitted, watched, stopped, damaged, resumed.

The run is submitted by cluster.submit as a child process, as its user would, and watched through its run folder.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.cancel import cancel
from cluster.drill_card import FAULT_LINE
from cluster.owner import command_of, maybe_owner
from cluster.runs import EXIT_UNREACHED, RunFolder, manifest_steps
from cluster.stop import stop

LOOK_S = 0.1  # between two looks into the run folder
ASK_S = {"local": 0.5, "slurm": 5.0}  # between two questions who runs it
LEAVING_S = 20.0  # for a local run that was cancelled
MAX_SILENCE_S = 120.0  # of Slurm, until it counts as not reached


class DrillError(RuntimeError):
    """The drill cannot go on."""

    def __init__(self, message: str, exit_code: int) -> None:
        """exit_code: of the whole drill."""
        super().__init__(message)
        self.exit_code = exit_code


class NotTriedError(RuntimeError):
    """A fault that this user cannot cause here, and nothing like it."""


@dataclass
class DrillRun:
    """A run while it goes on."""

    run: RunFolder
    job_id: str
    route: str  # slurm or local
    environ: Mapping[str, str]
    patience_s: float  # without any sign of life while the ranks run, before it counts as hung
    process: "subprocess.Popen[str]"  # cluster.submit; on the local route it stays until the run has ended
    log: Path  # what cluster.submit said
    is_hung: bool = False
    _state: str = "PENDING"
    _asked_s: float = 0.0
    _answered_s: float = field(default_factory=time.monotonic)
    _life: tuple[int, ...] = ()
    _lived_s: float = field(default_factory=time.monotonic)

    @classmethod
    def submit(cls, words: list[str], log: Path, environ: Mapping[str, str], patience_s: float) -> "DrillRun":
        """`python -m cluster.submit words`.

        Raises DrillError: nothing was submitted.
        """
        process, told = start_submit(words, log, environ)
        run = RunFolder(Path(told["run_dir"]))
        return cls(run, told["job_id"], told["cluster"], environ, patience_s, process, log)

    def wait(self, condition: Callable[[], bool], *, patience_s: float | None = None) -> bool:
        """Wait until a condition holds; False when the run is over, or hangs, before that.

        patience_s: in place of the drill's.
        """
        while not condition():
            if self.is_over():
                return condition()
            if self.silence_s() > (patience_s or self.patience_s):
                self.is_hung = True
                return False
            time.sleep(LOOK_S)
        return True

    def is_over(self) -> bool:
        """Whether the run is finished, or nobody runs it any more."""
        if self.run.summary.exists():
            self.process.wait()
            return True
        if self.route == "local" and self.process.poll() is None:
            self._state = "RUNNING"
            return False
        now = time.monotonic()
        if now - self._asked_s >= ASK_S[self.route]:
            self._asked_s = now
            try:
                owner = maybe_owner(self.run, self.environ)
            except slurm.SlurmError as error:
                if now - self._answered_s > MAX_SILENCE_S:
                    raise DrillError(f"Slurm was not reached: {error}", EXIT_UNREACHED) from None
                return False
            self._answered_s = now
            self._state = owner.state if owner else "gone"
        return self._state == "gone"

    def silence_s(self) -> float:
        """Seconds since the ranks' last sign of life; a job that waits is not expected to give any."""
        files = (self.run.events, self.run.metrics)
        life = (self.run.latest_attempt(), *(path.stat().st_size for path in files if path.exists()))
        if life != self._life or self._state != "RUNNING":
            self._life, self._lived_s = life, time.monotonic()
        return time.monotonic() - self._lived_s

    def has_broken(self, fault: str) -> bool:
        """Whether a fault of the spec has happened in the first attempt."""
        log = self.run.attempt_log(1)
        text = log.read_text(errors="replace") if log.exists() else ""
        return any(what == fault for _, what in FAULT_LINE.findall(text))

    def is_disturbed(self) -> bool:
        """Whether the first attempt has ended, or is about to."""
        return self.run.verdict(1).exists() or any(e["event"] == "stop_requested" for e in self.run.read_events())

    def take_down(self) -> None:
        """Let the run save and leave, to come back through the queue; without one, to be resumed.

        Raises NotTriedError: it could not be asked.
        """
        answer = stop(self.run, self.environ, requeue=self.route == "slurm")
        if answer.exit_code:
            raise NotTriedError(answer.text)
        # On the local route until its submission has ended, too: that one follows whoever claims the next attempt.
        self.wait(lambda: self.route == "slurm" and self.run.verdict(1).exists())

    def newest_checkpoint(self) -> Path:
        """Its data file.

        Raises NotTriedError: there is none.
        """
        steps = manifest_steps(self.run.checkpoints)
        if not steps:
            raise NotTriedError("the run left no checkpoint")
        return self.run.checkpoints / f"step_{steps[-1]:08d}.pt"

    def last_verdict(self) -> dict[str, Any]:
        """How the last attempt with a verdict ended; empty before the first."""
        attempts = reversed(range(1, self.run.latest_attempt() + 1))
        return next(filter(None, (self.run.read_json(self.run.verdict(attempt)) for attempt in attempts)), {})

    def reason(self) -> str:
        """Why the run is not finished, in one line."""
        if self.is_hung:
            return f"no sign of life in {self.patience_s:.0f} s; it was cancelled"
        verdict = self.last_verdict()
        why = f" ({verdict['why']})" if verdict.get("why") else ""
        return f"{verdict['reason']}{why}" if "reason" in verdict else "its job is gone, and left no word"

    def resume(self) -> None:
        """`python -m cluster.submit --resume`.

        Raises DrillError: it was refused.
        """
        self._close()
        self.process, told = start_submit(["--resume", str(self.run.path)], self.log, self.environ)
        self.job_id = told["job_id"]
        self._state, self._asked_s = "PENDING", time.monotonic()

    def end(self) -> None:
        """Leave nothing behind that runs."""
        if not self.run.summary.exists() and not self.is_over():
            cancel(self.run, self.environ)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=LEAVING_S)
        if self.process.poll() is None:  # ranks of this machine that hang hear nothing, and no Slurm kills them
            kill_processes_of(self.run)
            self.process.kill()
        self._close()

    def _close(self) -> None:
        """The submission has ended or is about to."""
        self.process.communicate()


def start_submit(
    words: list[str], log: Path, environ: Mapping[str, str]
) -> tuple["subprocess.Popen[str]", dict[str, str]]:
    """Start cluster.submit and read what it tells; standard error goes into the log.

    Raises DrillError: nothing was submitted.
    """
    with log.open("a") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.submit", *words, "--json"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for the drill
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except KeyboardInterrupt:
        process.terminate()
        raise
    if not line:
        process.communicate()
        raise DrillError(log.read_text().strip(), process.returncode)
    return process, dict(json.loads(line))


def kill_processes_of(run: RunFolder) -> None:
    """kill -9 of every process of this machine whose command line names the run folder."""
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if pid != os.getpid() and str(run.path).encode() in command_of(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def truncate(path: Path) -> None:
    """Cut a file to half its length."""
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file.

    In the third byte of four, so that a float32 there gets another value and stays a number.
    """
    place = path.stat().st_size // 2 // 4 * 4 + 2
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())
