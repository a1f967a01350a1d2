"""Watchdog: the loop's place -> [watchdog] -> exit 76 on every rank, with the stacks of all and the silent rank's name.

On each rank one thread looks at the clock and one talks to the store (board.py).  Rank 0 judges for all while it is
heard: training is collective, so where it stands still all do.  The others judge by themselves only when rank 0 is
silent for longer than its own deadline, since it may be the one that is stuck and it may serve the store.
"""

import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import KILL_WAIT_VARIABLE, RankEnv
from cluster.runs import EXIT_FAILED, EXIT_HANG, RunFolder, seconds_between, utc_now
from cluster.signals import StopFlag
from cluster.spec import JobSpec
from jobs import alarm
from jobs.board import Board, Heard
from jobs.deadlines import Deadlines, Phase
from jobs.failure import Whereabouts
from jobs.hang import Finding, publish
from jobs.pace import Pace, Work
from jobs.stacks import Accused, Seen, Stacks, accuse, merged, missing, own_stacks

log = logging.getLogger("run")

TICK_S = 1.0
LONGEST_TICK_S = 2 * TICK_S  # what a longer one lasts beyond this, this process was suspended, or had no CPU
MARGIN_S = 10.0  # for rank 0 to have ended all, before another rank judges by itself
STOP_MARGIN_S = 1.0  # rank 0 speaks first
SILENT_S = 4.0  # several beats
REPORT_S = 20.0  # for the way from here to the exit


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in its work."""

    phase: Phase = "meeting"
    step: int = 0  # optimizer steps done
    since_s: float = 0.0  # by the watch's clock


class Watch:
    """One rank's watch.  Until start() it only takes notes."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        """deadlines: the defaults when none are given."""
        self.deadlines = deadlines or Deadlines()
        self._place = Place()
        self._clock_s = 0.0  # seconds in which this process ran
        self._is_over = False
        self._wake = threading.Event()
        self._beats = itertools.count()
        self._work = Work()
        self._stop = StopFlag()  # the rank's own from start() on
        self._heard: Mapping[int, Heard] = {}  # the board's
        self._maybe_grace_end: str | None = None  # UTC; where Slurm leaves more than KillWait
        self.pace = Pace()  # rank 0's judgement

    def at(self, phase: Phase, step: int) -> None:
        """Say that this rank has come to another place; costs microseconds, for the main thread only."""
        before, now_s = self._place, self._clock_s
        is_news = phase != before.phase or not self.deadlines.has_stepped
        self._place = Place(phase, step, now_s)  # first: what is learned of the old place must not be held against it
        if before.phase == "training":
            self.deadlines.learn(now_s - before.since_s)
        if is_news:  # other deadlines hold from here on
            self._wake.set()

    def worked(self, seconds: float, pieces: int) -> None:
        """Say what this rank's own part of a step was: seconds for a number of micro-batches."""
        self._work = self._work.plus(seconds, pieces)

    def start(
        self, store: Store, spec: JobSpec, env: RankEnv, where: Whereabouts, stop: StopFlag, environ: Mapping[str, str]
    ) -> None:
        """Watch from now on.

        where: the run folder and attempt for reports; they may become known later.
        environ: says how long Slurm leaves between TERM and KILL.
        """
        self._env, self._where, self._stop = env, where, stop
        self._kill_wait_s = float(environ[KILL_WAIT_VARIABLE]) if KILL_WAIT_VARIABLE in environ else None
        self._lead_s = float(spec.signal_lead_s) if spec.cluster == "slurm" else None
        self._board = Board(
            store,
            env.rank,
            env.world_size,
            say=self._say,
            clock=lambda: self._clock_s,
            prepare=self._prepare,
            obey=lambda: os._exit(EXIT_HANG),
        )
        self._heard = self._board.heard
        self._board.start()
        # faulthandler prints file names of frames, and nothing else that could tell which rank speaks.
        code = compile("keep_watch()", f"<rank {env.rank}>", "exec")
        names = {"keep_watch": self._keep_watch}
        threading.Thread(target=lambda: exec(code, names), name="watch", daemon=True).start()

    def end(self) -> None:
        """Watch no more."""
        self._is_over = True
        self._wake.set()

    def _say(self) -> dict[str, object]:
        place, work = self._place, self._work
        return {
            "phase": place.phase,
            "step": place.step,
            "host": socket.gethostname(),
            "own_s": work.seconds,
            "pieces": work.pieces,
            "beat": next(self._beats),
            "signal": self._stop.name(),
            "grace_end": self._maybe_grace_end,
        }

    def stop_name(self) -> str:
        """The signal that has asked a rank to stop; empty while none has.

        On rank 0 of any rank: its own handler cannot run while it waits for the others in C code.
        """
        said = [self._stop.name(), *(heard.said.get("signal", "") for heard in list(self._heard.values()))]
        return next((name for name in said if name), "")

    def _keep_watch(self) -> None:
        last_s = time.monotonic()
        while not self._is_over:
            if self._wake.wait(TICK_S):
                self._wake.clear()
                self._board.say_now()
            now_s = time.monotonic()
            self._clock_s += min(now_s - last_s, LONGEST_TICK_S)
            last_s = now_s
            place = self._place
            limit_s = self.deadlines.limit_s(place.phase)
            alarm.wind(limit_s)
            if self._env.rank == 0:
                self.pace.look(dict(self._board.heard), self._clock_s)
            self._heed_stop(place, now_s)
            self._heed_clock(place, limit_s)
        self._board.end()
        alarm.unwind()

    def _heed_clock(self, place: Place, limit_s: float) -> None:
        """End this attempt, or this rank, when a deadline has passed."""
        still_s = self._clock_s - place.since_s
        if self._env.rank == 0:
            if still_s > limit_s + TICK_S:  # since_s is a tick's
                self._end_all(
                    f"nothing has moved for {still_s:.0f} s in phase {place.phase}, {limit_s:g} s are allowed"
                )
            return
        # While rank 0 saves this rank waits for it in its next step, and rank 0's thread speaks: only silence counts.
        chief = self._board.heard.get(0)
        silent_s = self._clock_s - (chief.at_s if chief else 0.0)
        if min(still_s, silent_s) > limit_s + MARGIN_S:
            self._end_own(
                f"nothing has moved for {still_s:.0f} s in phase {place.phase}, and rank 0 is silent", EXIT_HANG
            )

    def _heed_stop(self, place: Place, now_s: float) -> None:
        """Leave unsaved when a stop was asked for, its time is over and this rank has not moved since.

        A save, and what comes after it, may go on for as long as Slurm lets it.
        """
        self._heed_grace()
        deadline_s = self._stop.maybe_deadline_s(kill_wait_s=self._maybe_kill_wait_s(now_s), lead_s=self._lead_s)
        if deadline_s is None or place.phase not in ("training", "evaluating"):
            return
        asked_s = now_s - min(self._stop.first_s.values())
        is_late = now_s > deadline_s + (STOP_MARGIN_S if self._env.rank else 0.0)
        if is_late and self._clock_s - place.since_s >= asked_s:
            self._end_own(
                f"{self._stop.name()} came {asked_s:.0f} s ago and nothing has moved since: this rank leaves unsaved",
                EXIT_FAILED,
            )

    def _heed_grace(self) -> None:
        """Learn when the grace period ends in which this rank may be; the others hear it from rank 0."""
        if self._maybe_grace_end is not None or self.stop_name() != "SIGTERM":
            return
        if self._env.rank:
            chief = self._heard.get(0)
            self._maybe_grace_end = chief.said.get("grace_end") if chief else None
        elif self._where.maybe_run_dir is not None:
            self._maybe_grace_end = RunFolder(self._where.maybe_run_dir).maybe_grace_end(self._where.attempt)

    def _maybe_kill_wait_s(self, now_s: float) -> float | None:
        """Seconds from TERM to KILL: KillWait, or to the end of a grace period."""
        term_s = self._stop.first_s.get(signal.SIGTERM)
        if self._maybe_grace_end is None or term_s is None:
            return self._kill_wait_s
        return now_s - term_s + seconds_between(utc_now(), self._maybe_grace_end)

    def _end_all(self, reason: str) -> None:
        """Rank 0: collect all stacks, write them down, end everybody that can be reached."""

        def find() -> Finding:
            stacks: dict[int, Stacks] = {**self._board.ask_for_stacks(reason), 0: own_stacks()}
            seen, world_size = self._seen(), self._env.world_size
            text = merged(stacks) + "\n" + missing(world_size, seen, stacks)
            return Finding(reason, accuse(world_size, seen, stacks), text, is_of_all=True, exit_code=EXIT_HANG)

        self._end(find, EXIT_HANG)

    def _end_own(self, reason: str, exit_code: int) -> None:
        """Write down what this rank knows by itself, and end it."""

        def find() -> Finding:
            text = merged({self._env.rank: own_stacks()})
            return Finding(reason, self._accuse_unasked(), text, is_of_all=False, exit_code=exit_code)

        self._end(find, exit_code)

    def _end(self, find: Callable[[], Finding], exit_code: int) -> NoReturn:
        """Publish what is found, let those leave who were asked for their stacks, and leave, whatever fails here."""
        alarm.wind(REPORT_S)
        self._prepare()
        try:
            finding = find()
            exit_code = publish(finding, self._where)
            if finding.is_of_all:
                self._board.let_all_leave()
        except Exception:
            log.exception("the watch could not report a hang")
        os._exit(exit_code)

    def _accuse_unasked(self) -> Accused:
        """Whom to name where there is no time, or nobody, to ask."""
        seen = self._seen()
        speaking: dict[int, Stacks] = {rank: {} for rank in seen if seen[rank].silent_s < SILENT_S}
        if self._env.rank == 0:
            return accuse(self._env.world_size, seen, speaking)
        if 0 not in speaking:
            return accuse(1, {rank: place for rank, place in seen.items() if rank == 0}, speaking)
        return Accused(
            self._env.rank, socket.gethostname(), f"it is at step {self._place.step}, phase {self._place.phase}"
        )

    def _prepare(self) -> None:
        """The other ranks leave within moments, and their connections break."""
        self._where.is_being_ended = True

    def _seen(self) -> dict[int, Seen]:
        """The ranks that have come, as far as this one knows."""
        seen = {
            rank: Seen(heard.said["phase"], heard.said["step"], heard.said["host"], self._clock_s - heard.at_s)
            for rank, heard in dict(self._board.heard).items()  # a copy: the board goes on listening
        }
        own = Seen(self._place.phase, self._place.step, socket.gethostname(), 0.0)
        return dict(sorted((seen | {self._env.rank: own}).items()))
