"""Fire drill: a spec -> [drill] -> its job, small, undisturbed and then once with each fault -> a report card.

    python -m cluster.drill SPEC [section.key=value ...] [--only FAULT,FAULT] [--json]

It runs where the spec's job would: on this cluster, a sandbox, or this machine (cluster: local).  The card goes to
standard output, progress to standard error; all run folders are kept.
Exit codes: 0 all hold; 1 not all do; 2 usage; 4 Slurm was not reached; 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from cluster.drill_card import (
    Card,
    Outcome,
    Result,
    card_json,
    card_text,
    maybe_seconds_to_recover,
    outcome_of,
    slowest_step_s,
    steps_lost,
)
from cluster.drill_faults import REAL, Cause, Fault, choose
from cluster.drill_run import DrillError, DrillRun, NotTriedError
from cluster.drill_spec import PAUSED_STEP_TIMEOUT_S, small_spec
from cluster.environment import clean_environment
from cluster.runs import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_UNREACHED,
    EXIT_USAGE,
    UsageError,
    new_run_id,
    write_json,
)
from cluster.spec import FAULTS_VARIABLE, JobSpec, dump_spec, load_spec

PATIENCE_S = 300.0
STEP_FACTOR = 10.0  # of the slowest step: one that lasts longer is hung
STEP_FLOOR_S = 10.0


@dataclass(frozen=True, slots=True)
class Drill:
    """What all runs of a drill share."""

    spec: JobSpec
    folder: Path  # of the specs, of what was said, and of the card
    environ: Mapping[str, str]
    patience_s: float


@dataclass(frozen=True, slots=True)
class Straight:
    """What the undisturbed run came to."""

    run_dir: str
    outcome: Outcome
    step_timeout_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Drill one spec and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.drill", description="Break a small run in every way.")
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--only", help="faults to try, with commas between")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds without a sign of life of the ranks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(argv)
    try:
        faults = choose(args.only)
        spec = load_spec(args.spec, args.overrides, cwd=Path.cwd())
        card = drill(prepare(spec, os.environ, args.patience), faults, str(args.spec))
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except DrillError as error:
        print(error, file=sys.stderr)
        return error.exit_code if error.exit_code in (EXIT_USAGE, EXIT_UNREACHED) else EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; the run that was under way is cancelled", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(card_json(card), indent=2) if args.json else card_text(card), flush=True)
    return EXIT_FINISHED if card.holds else EXIT_FAILED


def prepare(spec: JobSpec, environ: Mapping[str, str], patience_s: float) -> Drill:
    """Make the drill's folder, beside its runs.

    Raises DrillError: the storage refused.
    """
    folder = spec.run_root / f"{spec.name}-drill" / f"drill-{new_run_id(datetime.now(timezone.utc))}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DrillError(f"run_root: {folder} cannot be made: {error.strerror}", EXIT_USAGE) from None
    return Drill(spec, folder, {**clean_environment(environ), FAULTS_VARIABLE: "1"}, patience_s)


def drill(shared: Drill, faults: Sequence[Fault], spec_name: str) -> Card:
    """Run undisturbed, then with one fault after another.

    Raises DrillError: nothing can be submitted, or not even the undisturbed run finishes.
    """
    began_s = time.monotonic()
    straight = run_undisturbed(shared)
    results = tuple(try_fault(shared, fault, straight) for fault in faults)
    where = f"{shared.spec.world_size} ranks on {'Slurm' if shared.spec.cluster == 'slurm' else 'this machine'}"
    card = Card(spec_name, where, round(time.monotonic() - began_s, 1), straight.run_dir, results)
    write_json(shared.folder / "card.json", card_json(card))
    return card


def run_undisturbed(shared: Drill) -> Straight:
    """The run that all others must equal.

    Raises DrillError: it does not finish.
    """
    small = small_spec(shared.spec, ())
    with submitted(shared, "undisturbed", small) as drilled:
        run = drilled.run
        if not drilled.wait(run.summary.exists):
            raise DrillError(f"not even the undisturbed run finished: {drilled.reason()}; {run.path}", EXIT_FAILED)
    slowest_s = slowest_step_s(run, small.train.global_batch(small.world_size))
    return Straight(str(run.path), outcome_of(run), round(max(STEP_FLOOR_S, STEP_FACTOR * slowest_s), 1))


def try_fault(shared: Drill, fault: Fault, straight: Straight) -> Result:
    """One run with one fault, to its end."""
    # A rank that the drill holds still must not pass for a hung one, and one that hangs must be noticed soon.
    timeouts_s = {"pause": PAUSED_STEP_TIMEOUT_S, "stop": straight.step_timeout_s}
    small = small_spec(
        shared.spec,
        [fault.in_spec(shared.spec.world_size)],
        maybe_step_timeout_s=timeouts_s.get(fault.do),
        time_limit=fault.time_limit,
    )
    with submitted(shared, fault.key, small) as drilled:
        try:
            cause = disturb(drilled, fault)
        except NotTriedError as error:
            return Result(fault.key, fault.title, "not tried", str(error), run_dir=str(drilled.run.path))
        if not drilled.wait(drilled.run.summary.exists) and drilled.route == "local":
            cause = play_queue(drilled, cause)
        return judge(drilled, fault, cause, straight.outcome)


def disturb(drilled: DrillRun, fault: Fault) -> Cause:
    """Wait until the rank has broken, and do the drill's part.

    Raises NotTriedError: the fault did not happen, or cannot be caused.
    """
    if not drilled.wait(lambda: drilled.has_broken(fault.do)):
        raise NotTriedError(f"no rank came as far as to break: {drilled.reason()}")
    return fault.maybe_act(drilled) if fault.maybe_act is not None else REAL


def play_queue(drilled: DrillRun, cause: Cause) -> Cause:
    """Resume a local run that was stopped and saved: on a cluster the queue would bring it back."""
    if drilled.is_hung or drilled.last_verdict().get("outcome") != "stopped":
        return cause
    drilled.resume()
    drilled.wait(drilled.run.summary.exists)
    note = "resumed by the drill, since this machine has no queue"
    return Cause("simulated", f"{cause.note}; {note}" if cause.note else note)


def judge(drilled: DrillRun, fault: Fault, cause: Cause, outcome: Outcome) -> Result:
    """Compare a run with the undisturbed one."""
    run, survived = drilled.run, drilled.run.summary.exists()
    notes = [cause.note] if cause.note else []
    if not survived:
        notes.append(drilled.reason())
    lost = steps_lost(run, maybe_step=fault.maybe_lost_at) if survived else None
    if lost is not None and lost > fault.max_lost:
        notes.append(f"{lost} steps lost, at most {fault.max_lost} may be")
    return Result(
        fault.key,
        fault.title,
        cause.how,
        "; ".join(notes),
        survived=survived,
        bit_equal=survived and outcome_of(run) == outcome,
        steps_lost=lost,
        max_steps_lost=fault.max_lost,
        seconds_to_recover=maybe_seconds_to_recover(run) if survived else None,
        run_dir=str(run.path),
    )


@contextlib.contextmanager
def submitted(shared: Drill, key: str, small: JobSpec) -> Iterator[DrillRun]:
    """A run under way, which is ended when the block is left."""
    path = shared.folder / f"{key}.yaml"
    path.write_text(dump_spec(small))
    drilled = DrillRun.submit([str(path)], shared.folder / f"{key}.log", shared.environ, shared.patience_s)
    print(f"{key}: {drilled.run.path}", file=sys.stderr, flush=True)
    try:
        yield drilled
    finally:
        drilled.end()


if __name__ == "__main__":
    sys.exit(main())
