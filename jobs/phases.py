"""Phases: the start of a rank -> [phases] -> the event first_step: which stage of it took how long.  Standard library.

A new process reads and imports for seconds before it can say anything; the kernel knows when it was forked.
Source: proc(5), /proc/pid/stat, field 22.
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/self/stat")


class Phases:
    """Seconds of one stage after the other, without a gap: they add up to the time since the process began."""

    def __init__(self, began_s: float | None = None) -> None:
        """began_s: time.monotonic() when the first phase began; now, by default."""
        self.seconds: dict[str, float] = {}
        self._since_s = time.monotonic() if began_s is None else began_s

    def end(self, name: str) -> None:
        """Say that the phase of this name ends here, and another one begins."""
        now_s = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now_s - self._since_s, 3)
        self._since_s = now_s

    def total_s(self) -> float:
        """What all phases took together, as the sum of what each is said to have taken."""
        return round(sum(self.seconds.values()), 3)


def process_began_s(stat: Path = STAT) -> float:
    """When the kernel made this process, as time.monotonic() counts; to a hundredth of a second.

    A program that this process was before, such as a shell that called exec, counts as well.
    """
    after_name = stat.read_text().rpartition(")")[2].split()  # the name may hold spaces and brackets
    since_boot_s = int(after_name[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
