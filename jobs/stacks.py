"""Stacks: threads of a rank -> [stacks] -> what all ranks are doing, equal stacks merged; and whom that accuses."""

import faulthandler
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WATCHERS = ("watch", "board")  # threads that look on; left out
MAIN = "MainThread"
HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")

Stacks = Mapping[str, str]
"""Thread name -> its frames, the innermost first."""


def own_stacks() -> dict[str, str]:
    """The stacks of this process's Python threads, by faulthandler; needs no disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
    finally:
        os.close(descriptor)
    found: dict[str, str] = {}
    for block in text.split("\n\n"):
        head, _, frames = block.strip().partition("\n")
        match = HEAD.match(head)
        name = names.get(int(match[1], 16), "a thread that Python does not know") if match else ""
        if match and name not in WATCHERS:
            found[name] = frames
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a rank was when it was last heard of."""

    phase: str
    step: int
    host: str
    silent_s: float  # since its thread last spoke


@dataclass(frozen=True, slots=True)
class Accused:
    """The rank that the others seem to wait for."""

    maybe_rank: int | None  # None: all do the same
    host: str
    why: str


def accuse(world_size: int, seen: Mapping[int, Seen], stacks: Mapping[int, Stacks]) -> Accused:
    """Name the rank that is missing, else the one that is silent, else the odd one out by its place or its stack.

    seen: ranks that have come.  stacks: ranks that have answered.

    A rank that skipped a collective is ahead of the others, one that is stuck before it is behind: either way it is
    among the fewest that are at one place.  Where all are at one place, the stacks of the main threads decide.
    """
    for rank in range(world_size):
        if rank not in seen:
            return Accused(rank, "an unknown host", "never came")
    silent = [rank for rank in seen if rank not in stacks]
    if silent:
        rank = max(silent, key=lambda rank: (seen[rank].silent_s, -rank))
        return Accused(rank, seen[rank].host, describe_silence(seen[rank]))
    places = {rank: (seen[rank].step, seen[rank].phase) for rank in seen}
    odd = odd_one_out(places) or odd_one_out({rank: stacks[rank].get(MAIN, "") for rank in seen})
    if odd is None:
        return Accused(None, "", f"all ranks wait at the same place, step {seen[0].step}, phase {seen[0].phase}")
    others = next(rank for rank in sorted(seen) if rank not in odd)
    where = f"is at step {seen[odd[0]].step}, phase {seen[odd[0]].phase}"
    if places[odd[0]] == places[others]:
        return Accused(odd[0], seen[odd[0]].host, f"{where}, as the others are, but does something else")
    return Accused(odd[0], seen[odd[0]].host, f"{where}, while rank {others} is at step {seen[others].step}")


def odd_one_out(values: Mapping[int, object]) -> list[int] | None:
    """The ranks of the rarest value; of equally rare ones the smallest value's; None when all values are equal."""
    groups = grouped(values)
    if len(groups) == 1:
        return None
    return min(groups, key=lambda ranks: (len(ranks), str(values[ranks[0]])))


def grouped(values: Mapping[int, object]) -> list[list[int]]:
    """Ranks with equal values together, in the order of their first ranks."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return list(groups.values())


def describe_silence(seen: Seen) -> str:
    """What is known of a rank that does not answer."""
    return f"no answer for {seen.silent_s:.0f} s, last seen at step {seen.step}, phase {seen.phase}"


def merged(stacks: Mapping[int, Stacks]) -> str:
    """The text of all stacks, main threads first and each different stack once.  stacks: by rank."""
    names = sorted({name for own in stacks.values() for name in own}, key=lambda name: (name != MAIN, name))
    blocks = []
    for name in names:
        frames = {rank: own[name] for rank, own in stacks.items() if name in own}
        blocks += [f"{ranks_text(ranks)}, {name}:\n{frames[ranks[0]]}\n" for ranks in grouped(frames)]
    return "\n".join(blocks)


def missing(world_size: int, seen: Mapping[int, Seen], stacks: Mapping[int, Stacks]) -> str:
    """A line for each rank that gave no stacks."""
    told = {rank: describe_silence(seen[rank]) if rank in seen else "never came" for rank in range(world_size)}
    return "".join(f"rank {rank}: {text}\n" for rank, text in told.items() if rank not in stacks)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2,5`."""
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs_of(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(parts)}"


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
