"""Prune: runs -> [prune] -> what could be removed of them, and with --yes its removal.  Standard library only.

    python -m cluster.prune [RUN ...] [--older-than 30d] [--state finished ...] [--yes] [--json]

RUN is a run folder, run id, job id, or a name, which means all runs of that name; without one, all runs of the index.
Checkpoints, stacks, submitit's files and the code of ended runs go, with --logs the logs too; the final model, the best
checkpoint, summary, spec, events and metrics stay, and what a stopped or failed run can go on from.  --checkpoints all
takes every checkpoint.  A run that somebody runs, or that may be run by somebody, is left alone.
Exit codes: 0 answered; 1 a RUN that was named was left alone; 2 usage or no such run; 4 Slurm was not reached.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import slurm
from cluster.disk import Removal, find_removal, last_change_s, remove, shown_size
from cluster.index import find_run, read_index
from cluster.owner import LOCAL_ROUTES, last_submission, maybe_process, other_cluster
from cluster.run_state import is_over_by_folder
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_UNREACHED, EXIT_USAGE, RunFolder, UsageError

STATES = ("finished", "stopped", "failed", "cancelled")
ENDED = ("finished", "cancelled")
FRESH_S = 600.0  # a heartbeat is rewritten every few seconds; a storage may be away for a while
SUBMISSION_S = 3600.0  # a submission makes the folder, and enters itself when Slurm has answered
SECONDS_IN = {"h": 3600, "d": 86_400, "w": 604_800}
HEAD = f"{'run':<20} {'state':<9} {'checkpts':>9} {'stacks':>8} {'submitit':>8} {'code':>8} {'logs':>9}"


class PruneError(UsageError):
    """What was asked for is not clear."""


@dataclass(frozen=True, slots=True)
class Looked:
    """One run, and what can be done about it."""

    run: RunFolder
    state: str  # one of STATES; alive, unknown or unreadable where nothing may be removed
    reason: str = ""  # why not
    removal: Removal = field(default_factory=Removal)


def main(argv: Sequence[str] | None = None) -> int:
    """Show what could be removed, or remove it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.prune", description="Free the disk of ended runs.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a folder, id or job id; a name: all its runs")
    parser.add_argument(
        "--older-than", type=seconds, metavar="30d", help="runs nothing was heard of for so long: h, d, w"
    )
    parser.add_argument("--state", action="append", choices=STATES, help="runs in this state; may be repeated")
    parser.add_argument("--checkpoints", choices=("spare", "all"), default="spare", help="all: also best and newest")
    parser.add_argument("--logs", action="store_true", help="the logs too")
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is changed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        return prune(args, os.environ)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def remove_one(one: Looked, args: argparse.Namespace, environ: Mapping[str, str]) -> Looked:
    """Look at a run once more, since others may have taken their time, and remove; returns what was done."""
    if one.state not in STATES:
        return one
    (now,) = look([one.run], args, environ)
    if now.state in STATES:
        remove(now.run, now.removal)
    return now


def seconds(text: str) -> float:
    """Seconds in 12h, 30d or 2w."""
    match = re.fullmatch(r"(\d{1,5})([hdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; use a number with h, d or w, such as 30d")
    return int(match[1]) * SECONDS_IN[match[2]]


def prune(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Look at all runs that are meant, show them, and remove if asked.

    Raises PruneError: --yes without any choice of runs.
    """
    if args.yes and not (args.runs or args.state or args.older_than is not None):
        raise PruneError("--yes: say which runs: RUN, --older-than or --state")
    looked = [one for one in look(find_runs(args.runs, environ), args, environ) if is_chosen(one, args)]
    if args.yes:
        looked = [remove_one(one, args, environ) for one in looked]
    print(json.dumps(as_json(looked, is_done=args.yes)) if args.json else "\n".join(table(looked, is_done=args.yes)))
    if any(one.state == "unknown" for one in looked):
        return EXIT_UNREACHED
    is_refused = args.runs and any(one.state not in STATES for one in looked)
    return EXIT_FAILED if is_refused else EXIT_FINISHED


def find_runs(references: Sequence[str], environ: Mapping[str, str]) -> list[RunFolder]:
    """The runs that are meant, oldest first, each once; a name means all runs of it."""
    entries = [line for line in read_index(environ) if (Path(line["run_dir"]) / "spec.yaml").is_file()]
    folders: dict[str, None] = {}
    for reference in references:
        named = [line["run_dir"] for line in entries if line["name"] == reference]
        is_name = named and not (Path(reference) / "spec.yaml").is_file()
        folders |= dict.fromkeys(named if is_name else [str(find_run(reference, environ).path)])
    if not references:
        folders = dict.fromkeys(line["run_dir"] for line in entries)
    return [RunFolder(Path(folder)) for folder in folders]


def look(runs: Sequence[RunFolder], args: argparse.Namespace, environ: Mapping[str, str]) -> list[Looked]:
    """Each run with its state, and what could be removed; Slurm is asked once for all."""
    ids = sorted({job_id for run in runs for job_id in slurm_jobs(run)})
    try:
        states = slurm.job_states(ids, environ)
    except slurm.SlurmError as error:
        return [look_at(run, args, None, f"Slurm was not reached: {error}") for run in runs]
    alive = {job_id for job_id, state in states.items() if not slurm.has_ended(state)}
    return [maybe_elsewhere(run, environ) or look_at(run, args, alive, "") for run in runs]


def maybe_elsewhere(run: RunFolder, environ: Mapping[str, str]) -> Looked | None:
    """A run whose job may be alive on another cluster, which cannot be asked from here."""
    _, cluster = other_cluster(run, environ)
    if not cluster or run.summary.exists() or is_over_by_folder(run):
        return None
    return Looked(run, "alive", f"its job is of cluster {cluster}: ask there")


def look_at(run: RunFolder, args: argparse.Namespace, maybe_alive: set[str] | None, failure: str) -> Looked:
    """One run.  maybe_alive: jobs in Slurm's queue; None where Slurm has not answered, failure says how."""
    try:
        run.check_formats()
    except UsageError as error:
        return Looked(run, "unreadable", str(error))
    if reason := maybe_life(run, maybe_alive):
        return Looked(run, "alive", reason)
    if maybe_alive is None and slurm_jobs(run):
        return Looked(run, "unknown", failure)
    state = state_of(run)
    removal = find_removal(run, state, all_checkpoints=args.checkpoints == "all", logs=args.logs, verify=args.yes)
    return Looked(run, state, removal=removal)


def slurm_jobs(run: RunFolder) -> set[str]:
    """All jobs of a run that Slurm had."""
    submitted = [event for event in run.read_events() if event["event"] == "submitted"]
    return {str(event["job_id"]) for event in submitted if event.get("route") not in LOCAL_ROUTES and event["job_id"]}


def maybe_life(run: RunFolder, maybe_alive: set[str] | None) -> str | None:
    """What speaks for somebody running a run; None when nothing does."""
    now_s = time.time()
    if jobs := slurm_jobs(run) & (maybe_alive or set()):
        return f"job {min(jobs, key=lambda job_id: [int(part) for part in job_id.split('_')])} is in the queue, or runs"
    submission = last_submission(run)
    if not submission:
        return "it is being submitted" if now_s - last_change_s(run) < SUBMISSION_S else None
    if submission.get("route") in LOCAL_ROUTES and maybe_process(run, submission) is not None:
        return "its process is alive on this machine"
    if run.summary.exists():
        return None
    if run.heartbeat.exists() and now_s - run.heartbeat.stat().st_mtime < FRESH_S and not has_verdict(run):
        return f"its heartbeat is younger than {FRESH_S / 60:.0f} minutes"
    host = run.read_attempt(run.latest_attempt()).get("host", socket.gethostname())
    if submission.get("route") in LOCAL_ROUTES and host != socket.gethostname() and not has_verdict(run):
        return f"its last attempt was on {host} and left no end: ask there"
    return None


def has_verdict(run: RunFolder) -> bool:
    """Whether the last attempt's supervisor has said how it ended."""
    return run.verdict(run.latest_attempt()).exists()


def state_of(run: RunFolder) -> str:
    """What a run is that nobody runs."""
    if run.summary.exists():
        return "finished"
    if run.cancel_mark.exists():
        return "cancelled"
    last = run.read_json(run.verdict(run.latest_attempt()))
    return "stopped" if run.stop_mark.exists() or last.get("outcome") == "stopped" else "failed"


def is_chosen(one: Looked, args: argparse.Namespace) -> bool:
    """Whether the filters let a run through; those that are alive are shown only where they were named."""
    if one.state not in STATES:
        return bool(args.runs) or one.state == "unknown"
    is_old = args.older_than is None or time.time() - last_change_s(one.run) >= args.older_than
    return is_old and (args.state is None or one.state in args.state)


def table(looked: Sequence[Looked], *, is_done: bool) -> list[str]:
    """A row for each run, the sum, and why some were left alone."""
    if not looked:
        return ["no run is meant by this"]
    names = ("checkpoints", "stacks", "submitit", "code", "logs")
    lines = [HEAD]
    for one in looked:
        cells = [shown_size(one.removal.sizes.get(name, 0)) for name in names]
        lines.append("{:<20} {:<9} {:>9} {:>8} {:>8} {:>8} {:>9}".format(one.run.run_id, one.state, *cells))
    lines += [f"{one.run.run_id} was left alone: {one.reason}" for one in looked if one.reason]
    total = shown_size(sum(one.removal.num_bytes for one in looked))
    if any(one.state in ENDED for one in looked):
        lines.append("after it a finished or cancelled run cannot be extended or repeated (--rerun)")
    return [*lines, f"freed: {total}" if is_done else f"would free: {total}; with --yes it is done"]


def as_json(looked: Sequence[Looked], *, is_done: bool) -> dict[str, Any]:
    """The same for programs."""
    runs = [
        {
            "run_dir": str(one.run.path),
            "run_id": one.run.run_id,
            "state": one.state,
            "reason": one.reason or None,
            "bytes": dict(one.removal.sizes),
            "steps": list(one.removal.steps),
            "kept_steps": list(one.removal.kept_steps),
        }
        for one in looked
    ]
    return {"runs": runs, "bytes": sum(one.removal.num_bytes for one in looked), "removed": is_done}


if __name__ == "__main__":
    sys.exit(main())
