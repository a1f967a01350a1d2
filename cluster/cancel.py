"""Cancel: a run -> [cancel] -> it ends, and stays ended.  Standard library only.

    python -m cluster.cancel RUN [--json]

RUN is a run folder, run id, run name (its newest) or job id.  The mark cancelled.json comes first: no job of the run
starts ranks any more, and --resume refuses.  Then the job is cancelled; its ranks save if Slurm's KillWait is enough.
Exit codes: 0 cancelled, now or before; 1 the run is finished; 2 usage, no such run, or its job is of another cluster;
4 Slurm was not reached.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from cluster import orders, slurm
from cluster.identity import run_job
from cluster.index import find_run
from cluster.owner import (
    Answer,
    Owner,
    last_submission,
    maybe_owner,
    nobody,
    refuse_elsewhere,
    refuse_unwritable,
    tell,
    unanswered,
)
from cluster.runs import EXIT_UNREACHED, EXIT_USAGE, FORMAT_VERSION, RunFolder, UsageError, sync_folder, utc_now


def main(argv: Sequence[str] | None = None) -> int:
    """Cancel one run and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.cancel", description="End a run for good.")
    parser.add_argument("run", help="its folder, id, name or job id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        run = find_run(args.run, os.environ)
        return tell(run, cancel(run, os.environ), as_json=args.json)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def cancel(run: RunFolder, environ: Mapping[str, str]) -> Answer:
    """Leave the mark and end whoever runs the run; a run that nobody runs stays ended by the mark alone.

    Raises UsageError: it cannot be ended from here, or not by this user; no mark is left then.
    """
    if run.summary.exists():
        return nobody(run, "cancel")
    refuse_elsewhere(run, environ)
    refuse_unwritable(run)
    is_first = leave_mark(run)
    try:
        owner = maybe_owner(run, environ)
        if owner is not None:
            return end(run, owner, environ)
    except slurm.SlurmError as error:
        job_id = str(last_submission(run).get("job_id", ""))
        text = f"{unanswered(error)}; the mark {run.cancel_mark.name} stands, and the run stays ended once "
        return Answer("marked", f"{text}its job is gone: scancel {job_id}", EXIT_UNREACHED, job_id)
    text = "nobody runs it; it stays ended" if is_first else "was cancelled before"
    return Answer("marked", f"{run.path}: {text}", 0)


def leave_mark(run: RunFolder) -> bool:
    """Make cancelled.json by exclusive creation; returns whether it is new."""
    try:
        with run.cancel_mark.open("x") as file:
            json.dump({"format_version": FORMAT_VERSION, "time": utc_now()}, file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    sync_folder(run.path)
    return True


def end(run: RunFolder, owner: Owner, environ: Mapping[str, str]) -> Answer:
    """Cancel the job, or end the process.

    Raises SlurmError: Slurm refused or did not answer.
    """
    if owner.maybe_pid is None:
        jobs = [run_job(run, job_id) for job_id in (*owner.behind[::-1], owner.job_id)]  # the last first: none starts
        orders.cancel(jobs, environ)
        return Answer("cancelled", f"job {owner.job_id} was cancelled; run folder: {run.path}", 0, owner.job_id)
    with contextlib.suppress(ProcessLookupError):  # it has ended since we looked
        os.kill(owner.maybe_pid, signal.SIGTERM)
    return Answer("cancelled", f"process {owner.maybe_pid} was ended; run folder: {run.path}", 0, owner.job_id)


if __name__ == "__main__":
    sys.exit(main())
