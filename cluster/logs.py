"""Logs: a run -> [logs] -> the lines of its ranks, attempt after attempt.  Standard library only.

    python -m cluster.logs RUN [--rank N] [--level W] [--attempt N] [-f]

RUN is a run folder, run id, run name (its newest) or job id.  Lines without a rank's head (of libraries, or of a
process that was killed) are left out by --rank, and kept by --level.  -f follows over restarts, requeues and successors
to the end of the run, and then ends as `cluster.submit --wait` does: 0 finished, 1 failed, 75 stopped and saved.
Exit codes without -f: 0 shown; 1 there is no line; 2 usage, no such run or attempt.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence

from cluster.early_end import early_end
from cluster.facts import submissions_in
from cluster.follow import RunWatch, exit_code_of
from cluster.index import find_run
from cluster.log_copy import LEVELS, LogCopy, keep_by
from cluster.runs import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RunError,
    RunFolder,
    UsageError,
)
from cluster.terminal import end_quietly_at_a_closed_pipe

LOOK_S = 0.5
ENDS = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped and is saved", EXIT_FAILED: "failed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a run's logs and return the exit code."""
    end_quietly_at_a_closed_pipe()
    return answer(argv, os.environ)


def answer(argv: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    """Print what a command line asks for; returns the exit code."""
    args = parse_arguments(argv)
    try:
        run = find_run(args.run, environ)
        copy = LogCopy(run, sys.stdout.buffer.write, keep_by(args.rank, args.level), only=args.attempt)
        return follow(run, copy, environ) if args.follow else show(run, copy)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cluster.logs", description="Print the log of a run's ranks.")
    parser.add_argument("run", help="its folder, id, name or job id")
    parser.add_argument("--rank", type=int, metavar="N", help="lines of this rank only")
    parser.add_argument("--level", choices=LEVELS, help="lines of this level and above: D, I, W, E, C")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt only")
    parser.add_argument("-f", "--follow", action="store_true", help="go on to the end of the run")
    args = parser.parse_args(argv)
    if args.follow and args.attempt is not None:
        parser.error("-f follows all attempts: leave --attempt out")
    return args


def show(run: RunFolder, copy: LogCopy) -> int:
    """Print what there is.

    Raises RunError: the attempt that is asked for was never made.
    """
    latest = run.latest_attempt()
    if copy.only is not None and not 1 <= copy.only <= latest:
        raise RunError(f"--attempt {copy.only}: {run.path} has attempts 1 to {latest}" if latest else nothing(run))
    copy.copy(is_last=True)
    if copy.num_lines:
        return EXIT_FINISHED
    if copy.num_seen:
        print(none_kept(copy), file=sys.stderr)
    elif latest == 0 or not any(run.attempt_log(attempt).exists() for attempt in range(1, latest + 1)):
        print(nothing(run), file=sys.stderr)
        show_batch_logs(run)
    return EXIT_FAILED


def none_kept(copy: LogCopy) -> str:
    """Why there is nothing to show of a log that is there."""
    return f"none of {copy.num_seen:,} lines is of the rank or the level that was asked for"


def nothing(run: RunFolder) -> str:
    """Why there is no log."""
    submissions = submissions_in(run)
    if submissions and submissions[-1].route == "direct":
        return f"{run.path} was started without a supervisor: its ranks write where their command was started"
    if run.latest_attempt():
        return f"the ranks of {run.path} have written nothing yet"
    early = early_end(run)
    return f"no rank of {run.path} was started yet{f': {early}' if early else ''}"


def show_batch_logs(run: RunFolder) -> None:
    """Print the jobs' own logs in place of the ranks'."""
    for path in sorted(run.logs.glob("batch_*.log"), key=lambda path: path.stat().st_mtime):
        sys.stdout.buffer.write(f"--- {path.name} ---\n".encode())
        with path.open("rb") as file:
            for line in file:
                sys.stdout.buffer.write(line)


def follow(run: RunFolder, copy: LogCopy, environ: Mapping[str, str]) -> int:
    """Print what there is and what comes, until the run has ended; returns an exit code that says how."""
    watched = RunWatch(run, environ)
    while not watched.is_over():
        copy.copy(is_last=False)
        sys.stdout.buffer.flush()
        time.sleep(LOOK_S)
    copy.copy(is_last=True)
    code = exit_code_of(run)
    if copy.num_lines:
        print(f"the run has {ENDS[code]}", file=sys.stderr)
    elif copy.num_seen:
        print(none_kept(copy), file=sys.stderr)
    else:
        print(nothing(run), file=sys.stderr)
        show_batch_logs(run)
    return code


if __name__ == "__main__":
    sys.exit(main())
