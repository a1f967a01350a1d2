"""Status: runs -> [status] -> where they are.  Standard library, and rich where it draws.

    python -m cluster.status [RUN | FOLDER] [--all] [--watch] [--json]

RUN is a run folder, run id, run name (its newest) or job id; FOLDER a run_root, whose runs are entered in the index
first.  Without either: the user's live runs and the newest others.  squeue is asked once; when it does not answer
within --patience seconds the run folders alone are shown, and a line says so.
Exit codes: 0 answered; 1 RUN has failed, was cancelled, or never starts; 2 usage or no such run; 4 Slurm was not
reached, and a state that is shown depends on it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.figures import figures
from cluster.follow import RunWatch
from cluster.follow import watch as attend
from cluster.index import find_run, is_run, rebuild, runs_below
from cluster.progress import shown_on
from cluster.queue import ANSWER_S
from cluster.runs import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_UNREACHED, EXIT_USAGE, UsageError
from cluster.status_text import show, show_detail, table
from cluster.terminal import can_move, end_quietly_at_a_closed_pipe
from cluster.view import Sight, exit_code_of, look_at, look_at_all

NEWEST = 20  # runs that are shown beside the live ones
WATCH_S = 30.0  # between two looks; each asks squeue once


def main(argv: Sequence[str] | None = None) -> int:
    """Show runs and return the exit code."""
    end_quietly_at_a_closed_pipe()
    return act(argv, os.environ)


def act(argv: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    """Show what a command line asks for; returns the exit code."""
    args = parse_arguments(argv)
    try:
        return (watch if args.watch else answer)(args, environ)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cluster.status", description="Show where runs are.")
    parser.add_argument("run", nargs="?", help="a run's folder, id, name or job id; or a run_root")
    parser.add_argument("--all", action="store_true", help=f"all runs, not only live ones and the newest {NEWEST}")
    parser.add_argument("--watch", action="store_true", help="again and again; of one run, until it ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--patience", type=float, default=ANSWER_S, metavar="S", help=f"seconds for squeue (default: {ANSWER_S:g})"
    )
    args = parser.parse_args(argv)
    if args.watch and args.json:
        parser.error("--watch is for people; call --json again and again")
    return args


def answer(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Look once and show; returns the exit code.

    Raises UsageError: there is no such run.
    """
    if args.run is None or root_of(args.run) is not None:
        return answer_all(args, environ)
    sight = look_at(find_run(args.run, environ), environ, args.patience)
    run = figures(sight.views[0])
    if args.json:
        print(json.dumps({**run, "slurm_error": sight.slurm_error or None}, ensure_ascii=False))
    else:
        show_detail(run, sys.stdout, environ, datetime.now().astimezone())
        tell_what_is_missing(sight)
    return exit_code_of(sight)


def answer_all(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The same for all runs of the index, or those below a folder."""
    sight, runs = look_around(args, environ)
    if args.json:
        print(json.dumps({"runs": runs, "slurm_error": sight.slurm_error or None}, ensure_ascii=False))
        return exit_code_of_all(sight)
    if runs:
        show(runs, sys.stdout, environ, datetime.now().astimezone())
    else:
        print("no runs yet; to find those of a run_root: python -m cluster.status FOLDER")
    tell_what_is_missing(sight)
    return exit_code_of_all(sight)


def look_around(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Sight, list[dict[str, Any]]]:
    """What was seen of all runs that are wanted, and their figures."""
    maybe_root = root_of(args.run)
    if maybe_root is not None:
        rebuild(maybe_root, environ)
    newest = None if args.all or maybe_root else NEWEST
    sight = look_at_all(environ, newest=newest, maybe_root=maybe_root, timeout_s=args.patience)
    return sight, [figures(view) for view in sight.views]


def root_of(maybe_text: str | None) -> Path | None:
    """The folder that a word of the command line names, if that holds runs and is none itself."""
    folder = Path(maybe_text).absolute() if maybe_text else None
    return folder if folder and folder.is_dir() and not is_run(folder) and runs_below(folder) else None


def exit_code_of_all(sight: Sight) -> int:
    """The exit code for a list of runs: that some of them have failed is no bad answer."""
    return EXIT_UNREACHED if sight.is_short_of_slurm else EXIT_FINISHED


def tell_what_is_missing(sight: Sight) -> None:
    """Say whose word is not in it."""
    sys.stdout.flush()
    for line in sight.unreadable:
        print(line, file=sys.stderr)
    if sight.slurm_error:
        print(f"Slurm was not reached, and this is what the run folders say: {sight.slurm_error}", file=sys.stderr)


def watch(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Show again and again; of one run its progress until it has ended, and then everything about it."""
    if args.run is not None and root_of(args.run) is None:
        run = find_run(args.run, environ)
        with shown_on(sys.stdout, environ) as shown:
            attend(run, RunWatch(run, environ), shown, None, previous_attempt=0)
        return answer(args, environ)
    if not can_move(sys.stdout, environ):
        while True:
            exit_code = answer(args, environ)
            sys.stdout.flush()
            time.sleep(pause_s(exit_code))
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            sight, runs = look_around(args, environ)
            live.update(table(runs, datetime.now().astimezone(), sight.slurm_error), refresh=True)
            time.sleep(pause_s(EXIT_UNREACHED if sight.slurm_error else EXIT_FINISHED))


def pause_s(exit_code: int) -> float:
    """Seconds until the next look: more where Slurm has trouble already."""
    return (3 if exit_code == EXIT_UNREACHED else 1) * WATCH_S


if __name__ == "__main__":
    sys.exit(main())
