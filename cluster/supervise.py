"""Supervisor: plan -> [supervise] -> ranks; one per job, on its first node, as the batch step.

    python -m cluster.supervise RUN_DIR                      what cluster.submit starts
    python -m cluster.supervise SPEC [section.key=value ...]  in sbatch/ddp.sbatch, or inside salloc

It claims an attempt, starts the ranks, waits, records how they ended and gives the job its exit code.  It outlives
signals: Slurm tells the ranks, and what they saved decides.
"""

import argparse
import logging
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster import slurm
from cluster.allocation import refuse_distribution, refuse_heterogeneous_job
from cluster.attempt_start import SuperviseError, kill_wait, read_shape, start_attempt
from cluster.chain import Chain, find_chain
from cluster.code import packages_folder
from cluster.comment import Comment, find_comment
from cluster.conditions import conditions_of, has_trained
from cluster.exclude import Blame
from cluster.grace import Grace
from cluster.history import Verdicts, gather
from cluster.job import Job, find_job
from cluster.launch import Ranks, leave_terminal
from cluster.limits import lift_limits
from cluster.owner import note_submission
from cluster.plan import LaunchPlan, read_plan
from cluster.predecessor import maybe_exit_code_by_predecessor
from cluster.requeue import Decision, Past, back_off_s, is_over, settle, unasked, wish, without_queue
from cluster.runs import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RunFolder,
    SupersededError,
    UsageError,
    make_logger,
    manifest_steps,
)
from cluster.signals import StopFlag, held_back
from cluster.verdict import Verdict, judge, judge_start

log = logging.getLogger("run")

POLL_S = 0.1
LOOK_S = 5.0  # between two looks into the run folder while ranks run
RESTART_PATIENCE_S = 30.0  # for Slurm to say that the job still runs, before the ranks start again in it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job's supervisor and return the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.supervise", description="Start and watch a run's ranks.")
    parser.add_argument("target", type=Path, help="a run folder, or a spec on the raw sbatch route")
    parser.add_argument("overrides", nargs="*", help="section.key=value, with a spec only")
    parser.add_argument("--after", metavar="JOB_ID", help="the job that this one succeeds in the same run folder")
    parser.add_argument("--detach", action="store_true", help="go on in a session of its own")
    args = parser.parse_intermixed_args(argv)
    if args.detach:
        leave_terminal()
    stop = StopFlag()
    stop.install()
    make_logger("super", os.environ)
    try:
        run, plan = find_plan(args.target, args.overrides, os.environ)
        return supervise(run, plan, stop, os.environ, maybe_predecessor=args.after)
    except UsageError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except (slurm.SlurmError, SupersededError, OSError) as error:
        log.error("%s", error)
        return EXIT_FAILED


def find_plan(target: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[RunFolder, LaunchPlan]:
    """The run folder and its plan; on the raw route both are made here, once per job id."""
    if target.is_dir():
        if overrides:
            raise SuperviseError(f"{' '.join(overrides)}: the spec of {target} is frozen; give values with a spec only")
        run = RunFolder(target.absolute())
        plan = read_plan(run)
        if plan.cluster == "slurm":
            refuse_shape(environ)
        if (own := packages_folder()) != (theirs := Path(plan.supervisor[1]).parents[1]):
            log.warning("started by hand: this supervisor is the one of %s, and the ranks run %s", own, theirs)
        return run, plan
    from cluster.raw import prepare  # pydantic and YAML are loaded only where a source spec is read

    if "SLURM_JOB_ID" not in environ:
        raise SuperviseError(
            f"SLURM_JOB_ID is not set: {target} can be supervised inside a Slurm job only; "
            f"use python -m cluster.submit {shlex.quote(str(target))}"
        )
    refuse_shape(environ)
    return prepare(target, overrides, environ)


def refuse_shape(environ: Mapping[str, str]) -> None:
    """Raises AllocationError: the job has several components, or its ranks would not fill one node after the other."""
    refuse_heterogeneous_job(environ)
    refuse_distribution(environ)


def supervise(
    run: RunFolder,
    plan: LaunchPlan,
    stop: StopFlag,
    environ: Mapping[str, str],
    *,
    maybe_predecessor: str | None = None,
) -> int:
    """One job's share of a run; returns the job's exit code.

    maybe_predecessor: the job that this one succeeds.
    """
    run.take_umask()
    job = find_job(plan, environ)
    if job.is_on_slurm:
        lift_limits()
        note_submission(run, job.own, environ)
    with find_chain(run, plan, job) as chain:
        maybe_code = maybe_exit_code_by_marks(run)
        if maybe_code is None and maybe_predecessor is not None:
            maybe_code = maybe_exit_code_by_predecessor(chain, maybe_predecessor)
        if maybe_code is not None:
            return maybe_code
        chain.begin()
        comment = find_comment(run, plan, job)
        comment.begin()
        return make_attempts(run, plan, stop, job, chain, comment, environ)


def make_attempts(
    run: RunFolder,
    plan: LaunchPlan,
    stop: StopFlag,
    job: Job,
    chain: Chain,
    comment: Comment,
    environ: Mapping[str, str],
) -> int:
    """Attempt after attempt in one allocation, as the policy says; returns the job's exit code."""
    verdicts = Verdicts(run)
    while True:
        maybe_code = maybe_exit_code_by_marks(run)
        if maybe_code is not None:
            return maybe_code
        verdicts.note_lost()
        comment.tell("")
        attempt, verdict = run_attempt(run, plan, stop, job, environ)
        history = verdicts.read(attempt - 1)
        history.append(Past(verdict.cause, max(manifest_steps(run.checkpoints), default=0)))
        blame = chain.blame(attempt, verdict)
        history = blame.absolve(history)
        decision = choose(history, run, plan, stop, job)
        run.check_owner(attempt, afresh=True)
        comment.tell(f"{verdict.outcome}: {verdict.reason}")
        verdicts.record(verdict, decision, history[-1], attempt, job.job_id)
        if decision.action == "restart":
            wait_before_restart(back_off_s(history), stop)
            if not stop.is_set():
                continue
            decision = choose(history, run, plan, stop, job)
        leave(run, verdict, decision, blame, chain, attempt)
        return verdict.exit_code


def leave(run: RunFolder, verdict: Verdict, decision: Decision, blame: Blame, chain: Chain, attempt: int) -> None:
    """Settle what becomes of the run when this job has ended."""
    if is_over(decision, verdict.cause, run.read_json(run.stop_mark) or None):
        chain.end(verdict.cause)
        return
    blame.tell(run, attempt, chain.job.job_id)
    # A requeue sends TERM to all processes of the job, the scontrol that comes next included (seen on 24.11).
    with held_back():
        if decision.action == "requeue":
            chain.go_on(verdict.cause, attempt)
        else:
            chain.leave_to_slurm()


def maybe_exit_code_by_marks(run: RunFolder) -> int | None:
    """What ends a job before it starts anything: the run is finished, or its user has ended or stopped it."""
    run.look_afresh()
    if run.summary.exists():
        log.info("%s is finished; nothing to do", run.path)
        return EXIT_FINISHED
    if run.cancel_mark.exists():
        log.info("%s was cancelled by its user", run.path)
        return EXIT_FAILED
    mark = run.read_json(run.stop_mark)
    if mark.get("requeue"):  # this is the job that came back
        run.stop_mark.unlink(missing_ok=True)
    elif mark:
        log.info("%s was stopped by its user; to go on: python -m cluster.submit --resume %s", run.path, run.path)
        return EXIT_STOPPED
    return None


def run_attempt(
    run: RunFolder, plan: LaunchPlan, stop: StopFlag, job: Job, environ: Mapping[str, str]
) -> tuple[int, Verdict]:
    """Claim an attempt, start its ranks and wait for their end; returns its number and how it ended."""
    nodes, shape = read_shape(plan, environ)
    conditions = conditions_of(run, plan)
    trained = job.is_on_slurm and has_trained(run, conditions)
    attempt = run.claim_attempt({"job_id": job.job_id, "host": socket.gethostname(), "pid": os.getpid()})
    run.note_event(
        "attempt_started",
        attempt=attempt,
        job_id=job.job_id,
        nodes=list(nodes),
        world_size=shape.num_tasks,
        restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
        conditions=conditions,
    )
    log.info("attempt %d of %s: %d ranks on %s", attempt, run.path, shape.num_tasks, ",".join(nodes))
    try:
        ranks = start_attempt(run, plan, job, attempt, nodes, shape, environ)
    except (UsageError, slurm.SlurmError) as error:
        return attempt, judge_start(error, nodes[0], has_trained=trained)
    grace = Grace(run, job, attempt, kill_wait_s=lambda: kill_wait(environ))
    wait(ranks, stop, forward=plan.cluster == "local", is_marked=lambda: is_marked(run), look=grace.look)
    return attempt, judge(replace(gather(run, plan, attempt, ranks, stop, job), has_trained=trained))


def choose(history: Sequence[Past], run: RunFolder, plan: LaunchPlan, stop: StopFlag, job: Job) -> Decision:
    """What to do now, by the policy and by what Slurm and the user say at this moment.

    Slurm is asked only where its answer matters.  Only a restart here goes without an answer: everything else waits for
    one, to the end of this process if need be.
    """
    wanted = wish(
        history,
        max_failures=plan.max_failures,
        overrides=plan.policy,
        maybe_mark=run.read_json(run.stop_mark) or None,
        stop_signal=stop.name(),
    )
    if wanted.action in ("leave", "stop") or not job.is_on_slurm:
        return without_queue(wanted)
    patience_s = RESTART_PATIENCE_S if wanted.action == "restart" else math.inf
    try:
        return settle(wanted, job.ask(patience_s=patience_s, is_urgent=stop.is_set))
    except slurm.SlurmError as error:
        return unasked(wanted, str(error), is_asked_to_stop=stop.is_set())


def wait_before_restart(seconds: float, stop: StopFlag) -> None:
    """Back off, unless somebody asks to stop."""
    if seconds:
        log.info("the ranks start again in %.0f s", seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop.is_set():
        time.sleep(POLL_S)


def wait(
    ranks: Ranks, stop: StopFlag, *, forward: bool, is_marked: Callable[[], bool], look: Callable[[], None]
) -> None:
    """Wait until all ranks are gone.

    forward: whether this process alone hears of a stop.  On Slurm the ranks get USR2 and TERM themselves, and only
    Ctrl-C in a terminal needs handing on.
    is_marked: whether the user has left a mark that ends the run; a signal that came with it may have been lost, as
    while the job was suspended.
    look: called as often.
    """
    told, look_s = False, time.monotonic() + LOOK_S
    while not ranks.is_over():
        why = stop.name() if (stop.is_set() if forward else stop.name() == "SIGINT") else ""
        if time.monotonic() > look_s:
            look_s = time.monotonic() + LOOK_S
            look()
            why = why or ("a mark of the user's" if is_marked() else "")
        if why and not told:
            log.info("%s: the ranks are asked to save and leave", why)
            ranks.ask_to_stop()
            told = True
        time.sleep(POLL_S)


def is_marked(run: RunFolder) -> bool:
    """Whether the user has asked for the end of the run."""
    return run.stop_mark.exists() or run.cancel_mark.exists()


if __name__ == "__main__":
    sys.exit(main())
