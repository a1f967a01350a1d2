"""Faults on purpose: the spec's faults -> [faults] -> a rank that breaks at a known step, for drills and tests.

Nothing else in this program breaks anything on purpose, and a spec that asks for it is refused unless the environment
allows it.
"""

import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.rank import RankEnv
from cluster.runs import UsageError
from cluster.spec import FaultSpec, JobSpec

log = logging.getLogger("run")

SLOW_SAVE_S = 5.0
PAUSE_S = 900.0  # at most; a drill waits for a time limit of minutes
IN_SAVES = ("enospc", "slow_save", "kill_save")
AT_START = ("port",)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "signal": signal.SIGUSR2}


class FaultError(RuntimeError):
    """The exception of a fault."""


class FaultRankError(UsageError):
    """A fault for a rank that is not there."""


@dataclass
class Faults:
    """What is still to go wrong with one rank in one attempt; mostly nothing."""

    waiting: tuple[FaultSpec, ...] = ()
    is_asked_to_stop: Callable[[], bool] = lambda: False

    @classmethod
    def of(
        cls, spec: JobSpec, env: RankEnv, attempt: int, is_asked_to_stop: Callable[[], bool] = lambda: False
    ) -> "Faults":
        """The faults of this rank in this attempt, counted from 1.

        is_asked_to_stop: ends a pause.

        Raises FaultRankError: one is for a rank that this world does not have; every rank raises it.
        """
        for fault in spec.faults:
            if fault.rank >= env.world_size:
                raise FaultRankError(f"faults.rank: {fault.rank} is no rank of a run with {env.world_size}")
        return cls(
            tuple(fault for fault in spec.faults if fault.rank == env.rank and (attempt == 1 or fault.every_attempt)),
            is_asked_to_stop,
        )

    def announce(self) -> None:
        """Warn of each, so that nobody takes it for an accident."""
        for fault in self.waiting:
            log.warning("breaks on purpose: %s at step %d of rank %d", fault.do, fault.at_step, fault.rank)

    def before_meeting(self, port: int) -> None:
        """Be the stranger who holds a port and says nothing, for as long as this process lives.

        port: the first one on which rank 0 would serve the store.
        """
        for fault in self.waiting:
            if fault.do in AT_START:
                self._note(fault)
                with contextlib.suppress(OSError):  # somebody else holds it: just as well
                    socket.create_server(("", port), backlog=64).detach()

    def before_step(self, num_done: int) -> None:
        """Break before a step is made.

        num_done: steps done.

        Raises FaultError: as asked for.
        """
        for fault in self.waiting:
            if fault.at_step == num_done and fault.do not in (*IN_SAVES, *AT_START):
                self._note(fault)
                if fault.do == "raise":
                    raise FaultError(f"broken on purpose at step {num_done}")
                if fault.do == "pause":
                    self._pause()
                else:
                    os.kill(os.getpid(), SIGNALS[fault.do])

    def while_saving(self, step: int) -> None:
        """Break a save while its temporary file is there.

        step: that of the checkpoint.

        Raises OSError: as a full disk does.
        """
        for fault in self.waiting:
            if fault.at_step <= step and fault.do in IN_SAVES:
                self._note(fault)
                if fault.do == "enospc":
                    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, on purpose at step {step}")
                if fault.do == "kill_save":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(SLOW_SAVE_S)

    def _pause(self) -> None:
        """Hold the run still, so that one of seconds is not over before Slurm or its user acts."""
        end = time.monotonic() + PAUSE_S
        while not self.is_asked_to_stop() and time.monotonic() < end:
            time.sleep(0.02)

    def _note(self, fault: FaultSpec) -> None:
        """Each happens once."""
        self.waiting = tuple(other for other in self.waiting if other is not fault)
        log.warning("now breaks on purpose: %s", fault.do)
