"""Pace: how long each rank's own passes take -> [pace] -> which rank is slow.  No collective: the board carries it.

In synchronous training every rank's step lasts as long as the slowest one's, so step times tell nothing.  What differs
is the time from the start of a step to the moment when a rank's last gradient is ready: it holds the rank's own work,
and nothing of the wait in the all-reduce.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn

from jobs.board import Heard

WINDOW_S = 10.0  # long enough for a save, or a slow read, to count little
NUM_WINDOWS = 3  # in a row, before a rank is called slow
SLOW_FACTOR = 1.5  # of the median of the other ranks


class Span(Protocol):
    """Time between two moments."""

    def seconds(self) -> float:
        """How long it was; call it once the work in between is known to be done."""


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Both moments by this process's clock."""

    began_s: float
    ended_s: float

    def seconds(self) -> float:
        """The difference."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Both moments in the device's own queue; a slow host shows as well, since the queue is empty meanwhile."""

    began: torch.cuda.Event
    ended: torch.cuda.Event

    def seconds(self) -> float:
        """The difference; both events have come."""
        return float(self.began.elapsed_time(self.ended)) / 1000


class OwnClock:
    """Measures a rank's own passes: from begin() to its last gradient."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Set a hook on the gradient that comes last: that of the parameter which the forward pass uses first."""
        self._is_on_device = device.type == "cuda"
        self._began = self._ended = self._now()
        next(model.parameters()).register_hook(self._note)  # type: ignore[no-untyped-call]

    def _now(self) -> "float | torch.cuda.Event":
        if not self._is_on_device:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _note(self, _gradient: Tensor) -> None:
        self._ended = self._now()

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def span(self) -> Span:
        """From begin() to the last gradient so far."""
        began, ended = self._began, self._ended
        if isinstance(began, float) and isinstance(ended, float):
            return HostSpan(began, ended)
        assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
        return DeviceSpan(began, ended)


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank has done since it started."""

    seconds: float = 0.0  # of its own passes
    pieces: int = 0  # micro-batches; ranks may have different numbers of them

    def plus(self, seconds: float, pieces: int) -> "Work":
        """With one more step."""
        return Work(self.seconds + seconds, self.pieces + pieces)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank for which the others wait, step after step."""

    rank: int
    host: str
    factor: float  # its time for a micro-batch / the median of the others'


class Pace:
    """Rank 0's judgement; one thread looks, another asks."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.maybe_slowest: int | None = None  # rank, in the window that is open
        self._began: dict[int, Work] = {}  # at the start of the window
        self._began_s = 0.0
        self._in_row: dict[int, int] = {}  # windows in which a rank was slow, without a break
        self._told: set[int] = set()
        self._news: list[SlowRank] = []

    def look(self, heard: Mapping[int, Heard], now_s: float) -> None:
        """Take in what the ranks say.  now_s: by a clock that stands still while this process is suspended."""
        done = {rank: Work(one.said["own_s"], one.said["pieces"]) for rank, one in heard.items()}
        costs = self._costs(done)
        if costs:
            self.maybe_slowest = max(costs, key=lambda rank: costs[rank])
        if now_s - self._began_s < WINDOW_S:
            return
        if len(costs) > 1:
            self._judge(costs, {rank: str(one.said["host"]) for rank, one in heard.items()})
        self._began, self._began_s = done, now_s

    def _costs(self, done: Mapping[int, Work]) -> dict[int, float]:
        """Seconds of a micro-batch in this window, of those ranks that have done any."""
        new = {rank: (work, self._began.get(rank, Work())) for rank, work in done.items()}
        return {
            rank: (now.seconds - before.seconds) / (now.pieces - before.pieces)
            for rank, (now, before) in new.items()
            if now.pieces > before.pieces
        }

    def _judge(self, costs: Mapping[int, float], hosts: Mapping[int, str]) -> None:
        """Count the windows in which a rank was slow; one that is slow for long is told once."""
        for rank, cost in costs.items():
            usual = median(other for number, other in costs.items() if number != rank)
            factor = cost / usual if usual > 0 else 1.0
            self._in_row[rank] = self._in_row.get(rank, 0) + 1 if factor >= SLOW_FACTOR else 0
            if self._in_row[rank] >= NUM_WINDOWS and rank not in self._told:
                self._told.add(rank)
                self._news.append(SlowRank(rank, hosts[rank], round(factor, 2)))

    def maybe_news(self) -> SlowRank | None:
        """A rank that has been found slow since the last call."""
        return self._news.pop(0) if self._news else None
