"""Hang: what the watch found -> [hang] -> stacks in the run folder, a record that names the rank at fault."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from cluster.runs import EXIT_FAILED, RunFolder, utc_now, write_atomic
from jobs.failure import Whereabouts, maybe_superseded, record
from jobs.stacks import Accused

log = logging.getLogger("run")

WRITE_S = 10.0  # the storage may be what hangs


class HangError(RuntimeError):
    """Nothing has moved for longer than it may."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why ranks are ended."""

    reason: str  # one line
    accused: Accused
    stacks: str  # the text of all that are known
    is_of_all: bool  # whether rank 0 speaks for all ranks, or this rank for itself
    exit_code: int


def publish(finding: Finding, where: Whereabouts) -> int:
    """Write down a finding, for WRITE_S at most; returns the exit code that this rank has to leave with."""
    codes = [finding.exit_code]
    writer = threading.Thread(target=lambda: codes.append(write(finding, where)), daemon=True)
    writer.start()
    writer.join(WRITE_S)
    return codes[-1]


def write(finding: Finding, where: Whereabouts) -> int:
    """Stacks, record and log; nothing is written when a later attempt owns the run folder."""
    superseded = maybe_superseded(HangError(finding.reason), where)
    if superseded is not None:
        log.error("%s", superseded)
        return EXIT_FAILED
    accused = finding.accused
    who = "" if accused.maybe_rank is None else f"rank {accused.maybe_rank} on {accused.host}: "
    log.error("%s; %s%s", finding.reason, who, accused.why)
    if where.maybe_run_dir is None or where.attempt == 0:
        log.error("%s", finding.stacks)
        return finding.exit_code
    run = RunFolder(where.maybe_run_dir)
    path = run.stacks_of(where.attempt, None if finding.is_of_all else where.rank)
    try:
        write_stacks(path, finding)
        place = f"stacks: {path.relative_to(run.path)}"
    except OSError as unwritten:
        log.error("%s", finding.stacks)
        place = f"stacks: in the log, since {unwritten}"
    try:
        error = HangError(f"{accused.why}; {finding.reason}; {place}")
        record(error, "hang", finding.exit_code, where, maybe_accused=accused)
    except OSError as unwritten:
        log.error("no record of this hang could be written: %s", unwritten)
    return finding.exit_code


def write_stacks(path: Path, finding: Finding) -> None:
    """One text file: when, why, and the stacks."""
    path.parent.mkdir(exist_ok=True)  # runs made by an earlier release have no such folder
    write_atomic(path, f"{utc_now()} {finding.reason}\n\n{finding.stacks}")
