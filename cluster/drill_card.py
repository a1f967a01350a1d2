"""Report card: runs of a drill -> [drill_card] -> what each fault did to the run, beside the undisturbed one.

Standard library only.  Everything is read from the run folders.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.runs import FORMAT_VERSION, MEASURED, RunFolder, read_lines, seconds_between

WIDTH = 80
# "2026-01-02T03:04:05.678Z r00003 W now breaks on purpose: kill", written by jobs.faults
FAULT_LINE = re.compile(r"^(\S+Z) r\d+ W now breaks on purpose: (\w+)$", re.MULTILINE)
ROW = "{:<24} {:<8} {:<9} {:>4} {:>7}  {:<20}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run came to; equal for equal runs."""

    weights_sha256: str
    samples_sha256: str
    metrics: tuple[tuple[tuple[str, Any], ...], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the card."""

    fault: str
    title: str
    how: str  # real, simulated or not tried
    note: str = ""  # what was done instead, or went wrong
    survived: bool = False  # it finished by itself
    bit_equal: bool = False  # weights, samples and every line of metrics
    steps_lost: int | None = None  # done twice
    max_steps_lost: int = 0
    seconds_to_recover: float | None = None  # from the fault to the next new step
    run_dir: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the promise was kept under this fault."""
        is_lossless = self.steps_lost is not None and self.steps_lost <= self.max_steps_lost
        return self.how != "not tried" and self.survived and self.bit_equal and is_lossless


@dataclass(frozen=True, slots=True)
class Card:
    """A whole drill."""

    spec: str
    where: str  # such as "4 ranks on 4 nodes"
    seconds: float
    undisturbed: str  # run folder
    results: tuple[Result, ...]

    @property
    def holds(self) -> bool:
        """Whether every fault was survived as promised."""
        return all(result.holds for result in self.results)


def outcome_of(run: RunFolder) -> Outcome:
    """What a finished run came to."""
    summary = run.read_json(run.summary)
    lines = (
        tuple(sorted((key, value) for key, value in line.items() if key not in MEASURED))
        for line in read_lines(run.metrics)
    )
    return Outcome(summary["weights_sha256"], summary["samples_sha256"], tuple(lines))


def slowest_step_s(run: RunFolder, batch: int) -> float:
    """Seconds of the slowest step of a finished run that logged each; batch: images per step."""
    return max(batch / float(line["images_per_s"]) for line in read_lines(run.metrics))


def steps_lost(run: RunFolder, *, maybe_step: int | None) -> int:
    """Steps that were done twice.

    maybe_step: steps done when the first attempt broke, where the drill knows; the run's own account may be a little
    behind, since it does not hear of the last steps before a kill.
    """
    resumed = [event for event in run.read_events() if event["event"] == "resumed"]
    if maybe_step is None or not resumed:
        return sum(int(event["lost_steps"]) for event in resumed)
    first = max(int(resumed[0]["lost_steps"]), maybe_step - int(resumed[0]["from_step"]))
    return first + sum(int(event["lost_steps"]) for event in resumed[1:])


def maybe_seconds_to_recover(run: RunFolder) -> float | None:
    """Seconds from the fault to the first step after it, or to the next save where the ranks were not started again."""
    maybe_moment = maybe_moment_of_fault(run)
    if maybe_moment is None:
        return None
    later = [event for event in run.read_events() if event["time"] >= maybe_moment]
    first_steps = [event for event in later if event["event"] == "first_step"]
    saves = [event for event in later if event["event"] == "checkpoint_saved"]
    back = first_steps or saves
    return round(seconds_between(maybe_moment, back[0]["time"]), 1) if back else None


def maybe_moment_of_fault(run: RunFolder) -> str | None:
    """When the run broke, or heard that it must stop."""
    log = run.attempt_log(1)
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [moment for moment, what in FAULT_LINE.findall(text) if what != "pause"]
    ends = ("stop_requested", "attempt_failed")
    return next(iter(found + [event["time"] for event in run.read_events() if event["event"] in ends]), None)


def card_text(card: Card) -> str:
    """The card for people, at most WIDTH columns."""
    lines = [*wrapped(f"{card.spec}: {card.where}, {card.seconds:.0f} s"), ""]
    lines += [ROW.format("fault", "survived", "bit-equal", "lost", "back in", "run").rstrip()]
    lines += [row(result) for result in card.results]
    lines += ["", *wrapped(f"undisturbed: {card.undisturbed}")]
    notes = [result for result in card.results if result.note]
    lines += [line for result in notes for line in wrapped(f"{result.title}: {prefix(result)}{result.note}")]
    failed = [result.title for result in card.results if not result.holds]
    total = len(card.results)
    end = f"{total - len(failed)} of {total} hold" + (f"; not: {', '.join(failed)}" if failed else "")
    return "\n".join([*lines, "", *wrapped(end)])


def row(result: Result) -> str:
    """One line of the table."""
    if result.how == "not tried":
        return ROW.format(result.title, "not tried", "", "", "", "").rstrip()
    lost = "-" if result.steps_lost is None else str(result.steps_lost)
    seconds = "-" if result.seconds_to_recover is None else f"{result.seconds_to_recover:.1f} s"
    run_id = "" if result.run_dir is None else result.run_dir.rpartition("/")[2]
    cells = (yes(result.survived), yes(result.bit_equal), lost, seconds, run_id)
    return ROW.format(result.title, *cells).rstrip()


def yes(fact: bool) -> str:
    """A fact as a word; what is not so stands out."""
    return "yes" if fact else "NO"


def prefix(result: Result) -> str:
    """How a note begins."""
    return "" if result.how == "real" else f"{result.how}: "


def wrapped(text: str) -> list[str]:
    """Text in lines of at most WIDTH columns; a path that is longer stays whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def card_json(card: Card) -> dict[str, Any]:
    """The card for programs."""
    results: Sequence[dict[str, Any]] = [{**asdict(result), "holds": result.holds} for result in card.results]
    return {"format_version": FORMAT_VERSION, **asdict(card), "results": results, "holds": card.holds}
