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

from cluster.figures import figures
from cluster.index import find_run, is_run, rebuild, runs_below
from cluster.queue import ANSWER_S
from cluster.run_state import BAD
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_UNREACHED, EXIT_USAGE, UsageError
from cluster.status_text import show, show_detail
from cluster.terminal import can_move, end_quietly_at_a_closed_pipe
from cluster.view import Sight, look_at, look_at_all

NEWEST = 20  # runs that are shown beside the live ones
WATCH_S = 10.0  # between two looks; each asks squeue once


def main(argv: Sequence[str] | None = None) -> int:
    """Show runs and return the exit code."""
    args = parse_arguments(argv)
    end_quietly_at_a_closed_pipe()
    try:
        return watch(args, os.environ) if args.watch else answer(args, os.environ)[0]
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


def answer(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[int, bool]:
    """Look once and show; returns the exit code, and whether there is nothing more to see.

    Raises UsageError: there is no such run.
    """
    folder = Path(args.run) if args.run else None
    if folder is not None and folder.is_dir() and not is_run(folder) and runs_below(folder):
        rebuild(folder, environ)
        return answer_all(args, environ, folder.absolute())
    if args.run is None:
        return answer_all(args, environ)
    sight = look_at(find_run(args.run, environ), environ, args.patience)
    run, state = figures(sight.views[0]), sight.views[0].state
    if args.json:
        print(json.dumps({**run, "slurm_error": sight.slurm_error or None}, ensure_ascii=False))
    else:
        show_detail(run, sys.stdout, environ, datetime.now().astimezone())
        tell_what_is_missing(sight)
    if sight.is_short_of_slurm:
        return EXIT_UNREACHED, False
    return EXIT_FAILED if state.word in BAD or state.never_starts else EXIT_FINISHED, state.is_over


def answer_all(args: argparse.Namespace, environ: Mapping[str, str], below: Path | None = None) -> tuple[int, bool]:
    """The same for all runs of the index, or those below a folder."""
    newest = None if args.all or below else NEWEST
    sight = look_at_all(environ, newest=newest, timeout_s=args.patience)
    shown = [view for view in sight.views if below is None or below in view.facts.run.path.parents]
    runs = [figures(view) for view in shown]
    if args.json:
        print(json.dumps({"runs": runs, "slurm_error": sight.slurm_error or None}, ensure_ascii=False))
    elif runs:
        show(runs, sys.stdout, environ, datetime.now().astimezone())
    else:
        print("no runs yet; those of a run_root: python -m cluster.status FOLDER")
    if not args.json:
        tell_what_is_missing(sight)
    return EXIT_UNREACHED if sight.is_short_of_slurm else EXIT_FINISHED, False


def tell_what_is_missing(sight: Sight) -> None:
    """Say whose word is not in it."""
    sys.stdout.flush()
    for line in sight.unreadable:
        print(line, file=sys.stderr)
    if sight.slurm_error:
        print(f"Slurm was not reached, and this is what the run folders say: {sight.slurm_error}", file=sys.stderr)


def watch(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Show again and again; of one run, until it has ended.  After an error Slurm is asked half as often."""
    pause_s = WATCH_S
    while True:
        if can_move(sys.stdout, environ):
            print("\033[H\033[2J", end="")  # home, and clear
        exit_code, is_over = answer(args, environ)
        sys.stdout.flush()
        if is_over:
            return exit_code
        pause_s = min(120.0, pause_s * 2) if exit_code == EXIT_UNREACHED else WATCH_S
        time.sleep(pause_s)


if __name__ == "__main__":
    sys.exit(main())
