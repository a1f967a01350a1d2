"""Grace: the ranks' heartbeat -> [grace] -> how long they have after TERM, for those who may still save.

A rank that gets TERM has slurm.conf's KillWait, and reckons with that.  At a preemption with a grace period it has
minutes.  Only Slurm knows, and the supervisor is not signalled then: it sees the signal in rank 0's heartbeat, asks
once, and leaves the answer where rank 0 looks for it.  Standard library only.
Source: scontrol(1), PreemptTime and EndTime, which moves to the end of the grace period: 22.05, 24.11, 26.05.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.job import Job
from cluster.runs import RunFolder, maybe_object, seconds_between, utc_now, write_json

log = logging.getLogger("run")


@dataclass
class Grace:
    """The grace period of one attempt, if it gets one."""

    run: RunFolder
    job: Job
    attempt: int
    kill_wait_s: Callable[[], float]  # asked for once, when it matters
    _is_settled: bool = False

    def look(self) -> None:
        """Tell the ranks how long they have, once TERM has come to them and that is longer than KillWait."""
        beat = {} if self._is_settled else maybe_object(self.run.heartbeat)
        if (beat.get("attempt"), beat.get("stop_signal")) != (self.attempt, "SIGTERM"):
            return
        self._is_settled = True
        end = self.job.maybe_grace_end()
        left_s = 0.0 if end is None else seconds_between(utc_now(), end)
        if end is None or left_s <= self.kill_wait_s():
            return
        log.info("preempted: %.0f s are left to save", left_s)
        try:
            write_json(self.run.grace, {"attempt": self.attempt, "end": end})
        except OSError as error:
            log.error("the ranks are not told how long they have: %s: %s", self.run.grace, error.strerror)
