"""Stop flag: Slurm's signals -> [signals] -> the step boundary where the ranks agree.  Standard library only.

A handler sets a flag and notes the time, nothing else: it may run in the middle of a step or of a collective.
Slurm repeats TERM within milliseconds and sends CONT with it; repeats change nothing.
Sources: signal(7); sbatch(1) --signal; slurm.conf(5) KillWait, GraceTime.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
MARGIN_S = 2.0  # between our own deadline and Slurm's SIGKILL


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread; processes started meanwhile begin with them blocked, and keep what comes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """Tells whether somebody asked this process to stop, and when first.

    Set by STOP_SIGNALS once installed.  Children made by fork inherit the handlers; their signals are not ours, so
    the handler looks at the process id.
    """

    def __init__(self) -> None:
        """A flag that is not set and not installed."""
        self.first_s: dict[int, float] = {}  # signal number -> time.monotonic() of its first arrival
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle STOP_SIGNALS from now on; those that were blocked and are pending arrive at once.

        Call it in the main thread, before any import that starts threads: a thread started earlier would keep its
        own signal mask and could swallow the signal.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def take_back(self) -> dict[str, object]:
        """Handle again what something else in this process handles since install(): signal name -> its handler.

        Call it in the main thread once all libraries are loaded: an NCCL that traps USR1, a logger that traps TERM.
        """
        taken = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        taken = {number: handler for number, handler in taken.items() if handler != self._handle}
        for number in taken:
            signal.signal(number, self._handle)
        return {number.name: handler for number, handler in taken.items()}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.first_s.setdefault(number, time.monotonic())

    def is_set(self) -> bool:
        """Whether any stop signal has come."""
        return bool(self.first_s)

    def name(self) -> str:
        """Name of the first signal, such as SIGUSR2; empty when none came."""
        return signal.Signals(min(self.first_s, key=self.first_s.__getitem__)).name if self.first_s else ""

    def maybe_deadline_s(self, *, kill_wait_s: float | None, lead_s: float | None) -> float | None:
        """time.monotonic() after which only SIGKILL can be expected, or None when nothing says so.

        kill_wait_s: slurm.conf's KillWait, seconds between TERM and KILL.  lead_s: seconds between USR2 and the end.
        """
        ends = []
        if kill_wait_s is not None and signal.SIGTERM in self.first_s:
            ends.append(self.first_s[signal.SIGTERM] + kill_wait_s - MARGIN_S)
        if lead_s is not None and signal.SIGUSR2 in self.first_s:
            ends.append(self.first_s[signal.SIGUSR2] + lead_s)
        return min(ends, default=None)
