"""Following a run: [follow] shows where it is until it ends, from its run folder and, on Slurm, from squeue.

Nothing is taken from submitit's job objects: their local state says FINISHED whatever became of the tasks.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from cluster.log_copy import LogCopy
from cluster.plan import LaunchPlan
from cluster.progress import Shown, shown_on
from cluster.run_state import RunState
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, RunFolder
from cluster.view import look_at

LOOK_S = 0.2  # between two looks into the run folder
SOON_S, LATE_S = 1.0, 30.0  # between two questions to Slurm: at first and after news, and at most
LATEST_S = 120.0  # the same while Slurm does not answer
PATIENCE_S = 10.0  # for an answer; nobody waits for it


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
class RunWatch:
    """A run with whatever runs it, now or later: jobs in Slurm's queue, or a process of somebody's.

    Slurm is asked soon after anything has happened to the run, and then less and less often: administrators mind.
    """

    run: RunFolder
    environ: Mapping[str, str]
    state: RunState = field(default_factory=lambda: RunState("pending"))
    _is_told: bool = False  # that it never starts
    _seen: tuple[int, bool] = (-1, False)  # the latest attempt, and whether it has a verdict
    _pause_s: float = SOON_S
    _asked_s: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Whether the run is finished, or will not go on and its job has ended.

        No answer leaves the last known state: it says nothing about the job.
        """
        attempt = self.run.latest_attempt()
        seen = (attempt, self.run.verdict(attempt).exists())
        if seen != self._seen:
            self._seen, self._pause_s = seen, SOON_S
        if time.monotonic() - self._asked_s >= self._pause_s:
            self._ask()
        job = self.state.maybe_job
        is_ending = job is not None and job.kind == "running"
        return (self.state.is_over and not is_ending) or self.run.summary.exists()

    def _ask(self) -> None:
        sight = look_at(self.run, self.environ, PATIENCE_S)
        self._asked_s = time.monotonic()
        if sight.slurm_error:
            self._pause_s = min(LATEST_S, 2 * self._pause_s)
            print(f"Slurm does not answer; asking again: {sight.slurm_error}", file=sys.stderr)
            return
        self.state = sight.views[0].state
        self._pause_s = min(2.0 if sight.views[0].facts.is_local else LATE_S, 2 * self._pause_s)
        if self.state.never_starts and not self._is_told:
            self._is_told = True
            job_id = self.state.job_id
            print(f"job {job_id} never starts: {self.state.because}\nto end it: scancel {job_id}", file=sys.stderr)

    def waits_for(self) -> str:
        """Its state, and what Slurm says about that."""
        return f"{self.state.word}: {self.state.because}" if self.state.because else self.state.word


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
    Ctrl-C leaves a Slurm job alone, and stops and saves a local run; so do TERM, HUP and a standard output that nobody
    reads any more.
    """
    local = LocalWatch(run, int(job_id), previous_attempt) if plan.cluster == "local" else None
    watched: Watched = local or RunWatch(run, environ)
    if local is not None:  # a closed terminal or a plain kill ends a local run as Ctrl-C does, saved
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
    with shown_on(sys.stdout, environ, maybe_errors=sys.stderr if quiet else None) as shown:
        log = LogCopy(run, shown.log, after=previous_attempt, has_banners=False) if show_log else None
        while True:
            try:
                watch(run, watched, shown, log, previous_attempt)
                break
            except (KeyboardInterrupt, BrokenPipeError) as error:
                if isinstance(error, BrokenPipeError):
                    leave_output()
                if local is None:
                    say(f"job {job_id} goes on; to end it: scancel {job_id}; run folder: {run.path}")
                    return EXIT_INTERRUPTED
                local.ask_to_stop()  # before a word is said: the terminal may be gone
                say("stopping: the run is saved first")
    return tell_result(run, watched, previous_attempt, sys.stderr if quiet else sys.stdout)


def watch(run: RunFolder, watched: Watched, shown: Shown, log: LogCopy | None, previous_attempt: int) -> None:
    """Look again and again until the run is over."""
    while not watched.is_over():
        beat = run.read_json(run.heartbeat)
        attempt = beat.get("attempt", 0)
        is_current = attempt > previous_attempt and "total_steps" in beat and not run.verdict(attempt).exists()
        shown.progress(beat) if is_current else shown.wait(watched.waits_for())
        if log is not None:
            log.copy(is_last=False)
        time.sleep(LOOK_S)
    if log is not None:
        log.copy(is_last=True)


def say(text: str) -> None:
    """A line on standard error, if somebody reads that still."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def leave_output() -> None:
    """Write to nowhere from here on; standard output has no reader, and each further word would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def tell_result(run: RunFolder, watched: Watched, previous_attempt: int, out: TextIO) -> int:
    """Say how the run ended; returns submit's exit code."""
    code = exit_code_of(run, previous_attempt)
    attempt = run.latest_attempt()
    verdict = run.read_json(run.verdict(attempt)) if attempt > previous_attempt else {}
    if code == EXIT_FINISHED:
        summary = run.read_json(run.summary)
        print(
            f"finished: test accuracy {summary['test_accuracy']:.4f}, {summary['epochs']} epochs, "
            f"{summary['steps']} steps, {summary['images_per_s']:.0f} images/s, {summary['wall_s']:.1f} s; "
            f"{run.summary}",
            file=out,
        )
    elif code == EXIT_STOPPED and run.cancel_mark.exists():
        print(f"cancelled by its user: {verdict['reason']}; it stays ended", file=sys.stderr)
    elif code == EXIT_STOPPED:
        print(f"{verdict['reason']}; to go on: python -m cluster.submit --resume {run.path}", file=sys.stderr)
    else:
        reason = verdict.get("reason") or f"no rank left a word ({watched.waits_for()})"
        log = run.attempt_log(attempt) if attempt > previous_attempt else run.submitit
        if verdict.get("cause") == "usage":
            to_do = "correct the spec or the environment, and submit it anew"
        elif verdict.get("cause") == "exception":
            to_do = f"once it is corrected: python -m cluster.submit --resume {run.path} code=live"
        else:
            to_do = f"to go on: python -m cluster.submit --resume {run.path}"
        print(f"failed: {reason}\nlog: {log}\n{to_do}", file=sys.stderr)
    return code


def exit_code_of(run: RunFolder, previous_attempt: int = 0) -> int:
    """submit's exit code for a run that is over.

    previous_attempt: the last one of earlier submissions; what they left does not count.
    """
    if run.summary.exists():
        return EXIT_FINISHED
    attempt = run.latest_attempt()
    verdict = run.read_json(run.verdict(attempt)) if attempt > previous_attempt else {}
    return EXIT_STOPPED if verdict.get("outcome") == "stopped" else EXIT_FAILED


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; a child that nobody has waited for has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"
