"""Verdict and policy: the end of an attempt -> [requeue] -> what is done about it.  Standard library only; pure.

What a rank recorded, what srun said and how processes ended are put in order, first cause before consequence: when one
rank dies the others lose their connections, and those errors say nothing.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.launch import RanksEnd
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

# "srun: error: n2: task 1: Exited with exit code 1", "srun: error: n3: tasks 4-5: Killed"; Slurm 22.05 and 24.11
TASK_LINE = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$")
EXITED = re.compile(r"^Exited with exit code (\d+)$")

# What is done after each kind of end.  Every kind stops the job: coming back by itself is not built yet.
POLICY: Mapping[str, str] = {
    "finished": "none",
    "stopped": "stop",
    "usage": "stop",
    "exception": "stop",
    "connection": "stop",
    "killed": "stop",
    "unknown": "stop",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one attempt ended, why, and what is done."""

    outcome: str  # finished, stopped or failed
    cause: str  # a key of POLICY
    reason: str  # one line for the user
    exit_code: int  # of the job
    rank: int | None = None  # the rank that failed first, where one is known

    @property
    def action(self) -> str:
        """What is done about it."""
        return POLICY[self.cause]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an attempt left behind."""

    is_finished: bool  # summary.json is there
    maybe_stop: Mapping[str, Any] | None  # the attempt's event `stopped`
    failures: Sequence[Mapping[str, Any]]  # records of failing ranks
    end: RanksEnd


def judge(evidence: Evidence) -> Verdict:
    """Name the first cause of an attempt's end."""
    if evidence.is_finished:
        return Verdict("finished", "finished", "all steps done", EXIT_FINISHED)
    if evidence.maybe_stop is not None:  # all is saved: a rank that is killed while it leaves takes nothing away
        stop = evidence.maybe_stop
        return Verdict("stopped", "stopped", f"stopped by {stop['signal']}, saved at step {stop['step']}", EXIT_STOPPED)
    killed = maybe_first_killed(evidence.failures, evidence.end)
    if killed is not None:
        return killed
    record = maybe_first_record(evidence.failures, evidence.end)
    if record is not None:
        return from_record(record)
    return Verdict("failed", "unknown", unexplained(evidence.end), EXIT_FAILED)


def maybe_first_killed(failures: Sequence[Mapping[str, Any]], end: RanksEnd) -> Verdict | None:
    """The rank that a signal ended, when that came before any failure of the program.

    srun's first report says so by itself.  Otherwise a rank without a record was the first when the records tell of
    nothing but lost connections: srun and the supervisor end those that have noticed nothing only later.
    """
    reported = task_lines(end.launcher_lines)
    if reported and not EXITED.match(reported[0][1]):
        return killed_verdict(*reported[0])
    if any(record["kind"] != "connection" for record in failures) or (reported and not failures):
        return None
    recorded = {record["rank"] for record in failures}
    signalled = [(number, how) for number, how in reported if not EXITED.match(how) and how != "Terminated"]
    signalled += [
        (number, signal.Signals(-code).name)
        for number, code in end.exit_codes.items()
        if code < 0 and -code != signal.SIGTERM and number not in end.ended
    ]
    return next((killed_verdict(number, how) for number, how in signalled if number not in recorded), None)


def killed_verdict(number: int, how: str) -> Verdict:
    """A rank ended by a signal; how: in srun's words, such as Killed or Segmentation fault, or the signal's name."""
    return Verdict("failed", "killed", f"rank {number} was ended by a signal: {how}", EXIT_FAILED, number)


def task_lines(lines: Sequence[str]) -> list[tuple[int, str]]:
    """(first rank named, what happened) of each line in which srun reports the end of tasks, in its order."""
    found = (TASK_LINE.match(line) for line in lines)
    return [(int(re.split("[,-]", match["tasks"])[0]), match["how"]) for match in found if match]


def maybe_first_record(failures: Sequence[Mapping[str, Any]], end: RanksEnd) -> Mapping[str, Any] | None:
    """The record that explains the others: no connection error while there is another, then the earliest.

    srun's first report of an exit outranks the clocks of the nodes.
    """
    causes = [record for record in failures if record["kind"] != "connection"] or list(failures)
    reported = task_lines(end.launcher_lines)
    if reported:
        causes.sort(key=lambda record: (record["rank"] != reported[0][0], record["time"]))
    else:
        causes.sort(key=lambda record: record["time"])
    return causes[0] if causes else None


def from_record(record: Mapping[str, Any]) -> Verdict:
    """The verdict that a rank's own record gives."""
    reason = f"rank {record['rank']} on {record['host']}: {record['exception']}"
    return Verdict("failed", record["kind"], reason, record["exit_code"], record["rank"])


def unexplained(end: RanksEnd) -> str:
    """The best line there is when no rank said why."""
    spoken = [line for line in end.launcher_lines if line.startswith("srun: error:")]
    if spoken:
        return f"the ranks ended without a word; {spoken[0]}"
    codes = ", ".join(f"rank {number}: {code}" for number, code in end.exit_codes.items() if code)
    return f"the ranks ended without a word; {codes or f'srun ended with {end.launcher_code}'}"
