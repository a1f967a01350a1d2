"""Faults on purpose: the spec's faults -> [faults] -> a rank that breaks at a known step, for drills and tests.

Nothing else in this program breaks anything on purpose, and a spec that asks for it is refused unless the environment
allows it.
"""

import errno
import logging
import os
import signal
import time
from dataclasses import dataclass

from cluster.rank import RankEnv
from cluster.runs import UsageError
from cluster.spec import FaultSpec, JobSpec

log = logging.getLogger("run")

SLOW_SAVE_S = 5.0
IN_SAVES = ("enospc", "slow_save")


class FaultError(RuntimeError):
    """The exception of a fault."""


class FaultRankError(UsageError):
    """A fault for a rank that is not there."""


@dataclass
class Faults:
    """What is still to go wrong with one rank in one attempt; mostly nothing."""

    waiting: tuple[FaultSpec, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec, env: RankEnv, attempt: int) -> "Faults":
        """The faults of this rank in this attempt, counted from 1.

        Raises FaultRankError: one is for a rank that this world does not have; every rank raises it.
        """
        for fault in spec.faults:
            if fault.rank >= env.world_size:
                raise FaultRankError(f"faults.rank: {fault.rank} is no rank of a run with {env.world_size}")
        return cls(
            tuple(fault for fault in spec.faults if fault.rank == env.rank and (attempt == 1 or fault.every_attempt))
        )

    def announce(self) -> None:
        """Warn of each, so that nobody takes it for an accident."""
        for fault in self.waiting:
            log.warning("breaks on purpose: %s at step %d of rank %d", fault.do, fault.at_step, fault.rank)

    def before_step(self, num_done: int) -> None:
        """Break before a step is made.

        num_done: steps done.

        Raises FaultError: as asked for.
        """
        for fault in self.waiting:
            if fault.at_step == num_done and fault.do not in IN_SAVES:
                self._note(fault)
                if fault.do == "raise":
                    raise FaultError(f"broken on purpose at step {num_done}")
                os.kill(os.getpid(), signal.SIGKILL if fault.do == "kill" else signal.SIGSTOP)

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
                time.sleep(SLOW_SAVE_S)

    def _note(self, fault: FaultSpec) -> None:
        """Each happens once."""
        self.waiting = tuple(other for other in self.waiting if other is not fault)
        log.warning("now breaks on purpose: %s", fault.do)
