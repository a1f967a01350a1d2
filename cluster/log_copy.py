"""Log copy: the attempts' logs -> [log_copy] -> whoever reads them, as they grow.  Standard library only."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.runs import RunFolder

LEVELS = "DIWEC"  # debug to critical, as LineHandler writes them
HEAD = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+Z (r\d{5,}|\S+) ([DIWEC]) ")

Keep = Callable[[bytes], bool]


def keep_by(maybe_rank: int | None, maybe_level: str | None) -> Keep:
    """Which lines are wanted."""
    label = None if maybe_rank is None else f"r{maybe_rank:05d}".encode()
    levels = (LEVELS if maybe_level is None else LEVELS[LEVELS.index(maybe_level) :]).encode()

    def keep(line: bytes) -> bool:
        head = HEAD.match(line)
        if head is None:
            return label is None
        return label in (None, head[1]) and head[2] in levels

    return keep


@dataclass
class LogCopy:
    """Copies the logs of a run's attempts as they grow, whole lines only and byte by byte as they are."""

    run: RunFolder
    write: Callable[[bytes], object]
    keep: Keep = field(default_factory=lambda: keep_by(None, None))
    only: int | None = None  # this attempt, of all
    after: int = 0  # attempts up to this one are left out
    has_banners: bool = True
    num_seen: int = 0  # lines, of which num_lines were kept
    num_lines: int = 0
    _offsets: dict[int, int] = field(default_factory=dict)  # attempt -> bytes that were copied
    _ended: set[int] = field(default_factory=set)  # attempts whose end was told

    def copy(self, *, is_last: bool) -> None:
        """Copy what is new.  is_last: no more will come, so a line that was cut short is copied too."""
        latest = self.run.latest_attempt()
        for attempt in range(self.after + 1, latest + 1):
            is_done = attempt in self._ended and attempt < latest
            if self.only in (None, attempt) and not is_done:
                self._copy_attempt(attempt, is_last=is_last or attempt < latest)

    def _copy_attempt(self, attempt: int, *, is_last: bool) -> None:
        if attempt not in self._offsets:
            self._offsets[attempt] = 0
            self._say(begin_of(self.run, attempt))
        verdict = self.run.read_json(self.run.verdict(attempt))  # before the lines: none comes after it
        for line in self._new_lines(attempt, is_last=is_last):
            self.num_seen += 1
            if self.keep(line):
                self.num_lines += 1
                self.write(line if line.endswith(b"\n") else line + b"\n")
        if verdict and attempt not in self._ended:
            self._ended.add(attempt)
            self._say(end_of(verdict))

    def _new_lines(self, attempt: int, *, is_last: bool) -> Iterator[bytes]:
        path = self.run.attempt_log(attempt)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets[attempt])
            for line in file:
                if not line.endswith(b"\n") and not is_last:
                    return
                self._offsets[attempt] += len(line)
                yield line

    def _say(self, text: str) -> None:
        if self.has_banners:
            self.write(f"--- {text} ---\n".encode())


def begin_of(run: RunFolder, attempt: int) -> str:
    """What an attempt's banner says: who, where and when."""
    events = [event for event in run.read_events() if event.get("event") == "attempt_started"]
    started: Mapping[str, Any] = next((event for event in events if event.get("attempt") == attempt), {})
    claim = run.read_attempt(attempt)
    where = f" on {', '.join(started['nodes'])}, {started['world_size']} ranks" if started else ""
    return f"attempt {attempt}: job {claim.get('job_id', '?')}{where}, {claim.get('time', '')}"


def end_of(verdict: Mapping[str, Any]) -> str:
    """What the line behind an attempt says."""
    next_step = f"; next: {verdict['action']}" if verdict.get("action") not in (None, "leave", "stop") else ""
    return f"attempt {verdict['attempt']} {verdict['outcome']}: {verdict['reason']}{next_step}"
