"""Stop: a run -> [stop] -> it saves, leaves, and can go on later.  Standard library only.

    python -m cluster.stop RUN [--requeue] [--json]

RUN is a run folder, run id, run name (its newest) or job id.  The mark stop.json comes first: whatever the job does
from then on, it does not come back by itself.  With --requeue it does, from the end of the queue.
Exit codes: 0 asked to stop; 1 nothing to stop; 2 usage, no such run, or its job is of another cluster; 4 Slurm was not
reached.
Source: scancel(1), Slurm 22.05: a signal goes to all job steps, but not to the batch shell.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from cluster import orders, slurm
from cluster.early_signals import STOP_SIGNAL
from cluster.identity import RunJob, maybe_own_state, run_job
from cluster.index import find_run
from cluster.owner import Answer, Owner, maybe_owner, nobody, refuse_elsewhere, refuse_unwritable, tell, unanswered
from cluster.runs import EXIT_UNREACHED, EXIT_USAGE, RunFolder, UsageError, sync_folder, utc_now, write_json

RANKS_S = 60.0  # how long a job that has just begun may take to start its ranks
LOOK_S = 1.0


class StopError(UsageError):
    """The run cannot be stopped as asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Stop one run and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.stop", description="Save a run, and end its job.")
    parser.add_argument("run", help="its folder, id, name or job id")
    parser.add_argument("--requeue", action="store_true", help="let it go on from the end of the queue")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        run = find_run(args.run, os.environ)
        return tell(run, stop(run, os.environ, requeue=args.requeue), as_json=args.json)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def stop(run: RunFolder, environ: Mapping[str, str], *, requeue: bool) -> Answer:
    """Leave the mark and ask whoever runs the run to save and leave; where nobody does, no mark stays behind.

    requeue: the job is to go on from the end of the queue.

    Raises StopError: there is no queue.  Raises UsageError: it cannot be stopped from here, or not by this user.
    """
    refuse_elsewhere(run, environ)
    refuse_unwritable(run)
    try:
        owner = maybe_owner(run, environ)
    except slurm.SlurmError as error:
        return Answer("none", f"nothing was changed: {unanswered(error)}", EXIT_UNREACHED)
    if owner is None or run.summary.exists():
        return nobody(run, "stop")
    if owner.maybe_pid is not None and requeue:
        raise StopError(f"--requeue: {run.path} runs on this machine, which has no queue; leave it out")
    if owner.state == "PENDING" and requeue:
        text = f"job {owner.job_id} waits in the queue already; it was left alone"
        return Answer("left", text, 0, owner.job_id)
    write_json(run.stop_mark, {"time": utc_now(), "requeue": requeue})
    try:
        return ask(run, owner, environ)
    except slurm.SlurmError as error:
        text = f"Slurm did not pass the request on: {error}; the mark {run.stop_mark.name} stands: a job of this run "
        return Answer("marked", f"{text}that ends or starts from now on obeys it", EXIT_UNREACHED, owner.job_id)


def ask(run: RunFolder, owner: Owner, environ: Mapping[str, str]) -> Answer:
    """Ask the owner to stop; the mark is there already.

    Raises SlurmError: Slurm refused or did not answer.
    """
    to_go_on = f"to go on: python -m cluster.submit --resume {run.path}"
    if run.read_json(run.stop_mark).get("requeue"):
        to_go_on = "then the job goes back into the queue"
    if owner.maybe_pid is not None:
        return ask_process(run, owner, to_go_on)
    job_id, job = owner.job_id, run_job(run, owner.job_id)
    if owner.behind and not run.read_json(run.stop_mark).get("requeue"):
        behind = [run_job(run, waiting) for waiting in owner.behind[::-1]]  # the last first: none is to start
        orders.cancel(behind, environ, only_pending=True)
    if owner.state == "PENDING" and left_the_queue(job, environ):
        return Answer("dequeued", f"job {job_id} was taken out of the queue; {to_go_on}", 0, job_id)
    if owner.state in ("RUNNING", "PENDING") and signal_ranks(job, environ):
        return Answer("signalled", f"job {job_id} was asked to save and leave; {to_go_on}", 0, job_id)
    # No signal reaches the ranks of a suspended job, and scancel waits for them in vain (22.05).
    when = "is suspended, and leaves as soon as it goes on" if owner.state == "SUSPENDED" else "leaves by itself"
    return Answer("marked", f"job {job_id} {when}, by the mark {run.stop_mark.name}; {to_go_on}", 0, job_id)


def ask_process(run: RunFolder, owner: Owner, to_go_on: str) -> Answer:
    """SIGTERM to a process of this machine."""
    assert owner.maybe_pid is not None
    try:
        os.kill(owner.maybe_pid, signal.SIGTERM)
    except ProcessLookupError:  # it has ended since we looked
        run.stop_mark.unlink(missing_ok=True)
        sync_folder(run.path)
        return nobody(run, "stop")
    return Answer("signalled", f"process {owner.maybe_pid} was asked to save and leave; {to_go_on}", 0, owner.job_id)


def left_the_queue(job: RunJob, environ: Mapping[str, str]) -> bool:
    """Take a job out of the queue, unless Slurm has started it meanwhile; returns whether it is out."""
    orders.cancel([job], environ, only_pending=True)
    return slurm.has_ended(maybe_own_state(job, environ))


def signal_ranks(job: RunJob, environ: Mapping[str, str]) -> bool:
    """Signal the ranks as Slurm does before a time limit; returns False when the job leaves without.

    A signal reaches only the ranks that are there, so this waits for those of a job that has just begun.
    """
    end = time.monotonic() + RANKS_S
    while not has_ranks(job.job_id, environ) and time.monotonic() < end:
        state = maybe_own_state(job, environ)
        if state is None or state.state != "RUNNING":
            return False
        time.sleep(LOOK_S)
    orders.signal_ranks(job, STOP_SIGNAL, environ)
    return True


def has_ranks(job_id: str, environ: Mapping[str, str]) -> bool:
    """Whether a job has a step beside the batch shell."""
    with contextlib.suppress(slurm.SlurmError):  # a job that has ended: asked for next
        steps = slurm.run(["squeue", "--noheader", "--steps", f"--job={job_id}", "--format=%i"], environ)
        return re.search(r"\.\d+$", steps, re.MULTILINE) is not None
    return False


if __name__ == "__main__":
    sys.exit(main())
