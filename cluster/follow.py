"""Following a run: [follow] shows where it is until it ends, from its run folder and, on Slurm, from squeue.

Nothing is taken from submitit's job objects: their local state says FINISHED whatever became of the tasks.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from cluster import slurm
from cluster.owner import maybe_owner
from cluster.plan import LaunchPlan
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, RunFolder

LOOK_S = 0.2  # between two looks into the run folder
ASK_S = 10.0  # between two questions to Slurm; administrators mind more
SAY_S = 5.0  # between two lines where there is no terminal

Say = Callable[[str], None]  # shows a text in place of the last one


class Watched(Protocol):
    """What runs the ranks: a job in the queue, or a supervisor on this machine."""

    def is_over(self) -> bool:
        """Whether the run will not go on by itself."""

    def waits_for(self) -> str:
        """What it waits for before the ranks have started."""


@dataclass
class LocalWatch:
    """A supervisor on this machine."""

    run: RunFolder
    controller_pid: int  # submitit's process, our child
    previous_attempt: int  # the last attempt of earlier submissions
    _stop_wanted: bool = False

    def supervisor_pid(self) -> int | None:
        """The process that claimed an attempt since the submission."""
        attempt = self.run.latest_attempt()
        owner = self.run.read_attempt(attempt) if attempt > self.previous_attempt else {}
        return int(owner["pid"]) if owner else None

    def is_over(self) -> bool:
        """Whether there is a verdict, or nobody left to write one."""
        self._pass_on()
        attempt = self.run.latest_attempt()
        if (
            attempt > self.previous_attempt
            and self.run.read_json(self.run.verdict(attempt)).get("action", "restart") != "restart"
        ):
            return True
        # A supervisor that finds the run finished claims nothing, and its controller ends.
        return not is_running(self.supervisor_pid() or self.controller_pid)

    def waits_for(self) -> str:
        """Nothing but the start of the processes."""
        return "starting"

    def ask_to_stop(self) -> None:
        """Ask the supervisor to stop the run; one that has not begun yet is asked when it has."""
        self._stop_wanted = True
        self._pass_on()

    def _pass_on(self) -> None:
        pid = self.supervisor_pid()
        if self._stop_wanted and pid is not None:
            self._stop_wanted = False
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGINT)


@dataclass
class SlurmWatch:
    """A job in Slurm's queue, and those that go on when it has ended."""

    run: RunFolder
    job_id: str
    environ: Mapping[str, str]
    state: str = "PENDING"
    reason: str = ""
    _ended: bool = False
    _asked_s: float = field(default_factory=lambda: time.monotonic() - ASK_S + 1)

    def is_over(self) -> bool:
        """Whether the run is finished, or Slurm has answered that the job has left the queue.

        No answer leaves the last known state: it says nothing about the job.
        """
        if not self._ended and time.monotonic() - self._asked_s >= ASK_S:
            self._asked_s = time.monotonic()
            try:
                job = maybe_owner(self.run, self.environ) or slurm.maybe_job_state(self.job_id, self.environ)
            except slurm.SlurmError as error:
                print(f"Slurm does not answer; asking again: {error}", file=sys.stderr)
            else:
                self._ended = job is None or job.state in slurm.ENDED_STATES
                self.state, self.reason = (job.state, job.reason) if job else ("gone", "")
        return self._ended or self.run.summary.exists()

    def waits_for(self) -> str:
        """Slurm's state and reason; the wait after a requeue is called by its name."""
        if self.reason == "BeginTime":
            return f"{self.state} (Slurm holds a requeued job back for about two minutes)"
        return f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state


def follow(
    run: RunFolder,
    plan: LaunchPlan,
    job_id: str,
    environ: Mapping[str, str],
    *,
    previous_attempt: int,
    show_log: bool,
    quiet: bool,
) -> int:
    """Show progress until the run ends; returns submit's exit code.

    quiet: standard output belongs to the caller's JSON; what is said goes to standard error.
    Ctrl-C leaves a Slurm job alone, and stops and saves a local run; so do TERM and HUP.
    """
    local = LocalWatch(run, int(job_id), previous_attempt) if plan.cluster == "local" else None
    watched: Watched = local or SlurmWatch(run, job_id, environ)
    if local is not None:  # a closed terminal or a plain kill ends a local run as Ctrl-C does, saved
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
    with progress_line(quiet) as say:
        shown = LogCopy(run, previous_attempt, sys.stderr if quiet else sys.stdout) if show_log else None
        while True:
            try:
                watch(run, watched, say, shown, previous_attempt)
                break
            except KeyboardInterrupt:
                if local is None:
                    print(f"job {job_id} goes on; to end it: scancel {job_id}; run folder: {run.path}", file=sys.stderr)
                    return EXIT_INTERRUPTED
                local.ask_to_stop()  # before a word is said: the terminal may be gone
                with suppress(OSError):
                    print("stopping: the run is saved first", file=sys.stderr)
    return tell_result(run, watched, previous_attempt, sys.stderr if quiet else sys.stdout)


def watch(run: RunFolder, watched: Watched, say: Say, shown: "LogCopy | None", previous_attempt: int) -> None:
    """Look again and again until the run is over."""
    while not watched.is_over():
        beat = run.read_json(run.heartbeat)
        is_current = beat.get("attempt", 0) > previous_attempt
        say(progress_text(beat) if is_current else watched.waits_for())
        if shown is not None:
            shown.copy()
        time.sleep(LOOK_S)
    if shown is not None:
        shown.copy()


@contextmanager
def progress_line(quiet: bool) -> Iterator[Say]:
    """One line that changes in a terminal; elsewhere a line now and then."""
    if quiet:
        yield lambda text: None
    elif sys.stdout.isatty():
        from rich.console import Console

        with Console().status("starting") as status:
            yield status.update
    else:
        yield OccasionalLines()


@dataclass
class OccasionalLines:
    """Prints a text when it has changed, at most once in SAY_S seconds."""

    last: str = ""
    last_s: float = 0.0

    def __call__(self, text: str) -> None:
        """Print it, or not yet."""
        now = time.monotonic()
        if text != self.last and now - self.last_s >= SAY_S:
            self.last, self.last_s = text, now
            print(text, flush=True)


def progress_text(beat: Mapping[str, Any]) -> str:
    """`training: step 120/960, epoch 4/30, loss 1.234, accuracy 0.6500, 512 images/s, 0:32 left`."""
    step, total, per_epoch = beat.get("step", 0), beat.get("total_steps", 0), beat.get("steps_per_epoch", 1)
    epoch, epochs = min(step, total - 1) // per_epoch + 1, -(-total // per_epoch)
    parts = [f"{beat['phase']}: step {step}/{total}, epoch {epoch}/{epochs}"]
    parts += [f"loss {beat['loss']:.3f}"] if "loss" in beat else []
    parts += [f"accuracy {beat['accuracy']:.4f}"] if "accuracy" in beat else []
    if beat.get("images_per_s"):  # 0.0 where a step takes minutes
        left = int((total - step) * beat["global_batch"] / beat["images_per_s"])
        parts += [f"{beat['images_per_s']:.0f} images/s", f"{left // 60}:{left % 60:02d} left"]
    return ", ".join(parts)


@dataclass
class LogCopy:
    """Copies the attempts' logs as they grow."""

    run: RunFolder
    previous_attempt: int
    out: TextIO
    offsets: dict[Path, int] = field(default_factory=dict)

    def copy(self) -> None:
        """Copy what is new."""
        for attempt in range(self.previous_attempt + 1, self.run.latest_attempt() + 1):
            path = self.run.attempt_log(attempt)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self.offsets.get(path, 0))
                    self.out.write(file.read().decode(errors="replace"))
                    self.out.flush()
                    self.offsets[path] = file.tell()


def tell_result(run: RunFolder, watched: Watched, previous_attempt: int, out: TextIO) -> int:
    """Say how the run ended; returns submit's exit code."""
    summary = run.read_json(run.summary)
    if summary:
        print(
            f"finished: test accuracy {summary['test_accuracy']:.4f}, {summary['epochs']} epochs, "
            f"{summary['steps']} steps, {summary['images_per_s']:.0f} images/s, {summary['wall_s']:.1f} s; "
            f"{run.summary}",
            file=out,
        )
        return EXIT_FINISHED
    attempt = run.latest_attempt()
    verdict = run.read_json(run.verdict(attempt)) if attempt > previous_attempt else {}
    if verdict.get("outcome") == "stopped":
        print(f"{verdict['reason']}; to go on: python -m cluster.submit --resume {run.path}", file=sys.stderr)
        return EXIT_STOPPED
    reason = verdict.get("reason") or f"no rank left a word (job: {watched.waits_for()})"
    log = run.attempt_log(attempt) if attempt > previous_attempt else run.submitit
    if verdict.get("cause") == "usage":
        to_do = "correct the spec or the environment, and submit it anew"
    else:
        to_do = f"to go on: python -m cluster.submit --resume {run.path}"
    print(f"failed: {reason}\nlog: {log}\n{to_do}", file=sys.stderr)
    return EXIT_FAILED


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; a child that nobody has waited for has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"
