"""Supervisor: plan -> [supervise] -> ranks; one per job, on its first node, as the batch step.

    python -m cluster.supervise RUN_DIR                      what cluster.submit starts
    python -m cluster.supervise SPEC [section.key=value ...]  in sbatch/ddp.sbatch, or inside salloc

It claims an attempt, starts the ranks, waits, records how they ended and gives the job its exit code.  It outlives
signals: Slurm tells the ranks, and what they saved decides.
"""

import argparse
import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import address, rank, slurm
from cluster.allocation import expand_nodelist, expand_task_list
from cluster.launch import LocalRanks, Ranks, Shape, SrunRanks, leave_terminal, rank_variables, srun_command
from cluster.plan import LaunchPlan, read_plan
from cluster.requeue import Evidence, Verdict, judge
from cluster.runs import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USAGE,
    RunFolder,
    SupersededError,
    UsageError,
    make_logger,
    read_lines,
    utc_now,
    write_json,
)
from cluster.signals import StopFlag

log = logging.getLogger("run")

POLL_S = 0.1


class SuperviseError(UsageError):
    """The environment does not hold what a supervisor needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job's supervisor and return the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.supervise", description="Start and watch a run's ranks.")
    parser.add_argument("target", type=Path, help="a run folder, or a spec on the raw sbatch route")
    parser.add_argument("overrides", nargs="*", help="section.key=value, with a spec only")
    parser.add_argument("--detach", action="store_true", help="go on in a session of its own")
    args = parser.parse_intermixed_args(argv)
    if args.detach:
        leave_terminal()
    stop = StopFlag()
    stop.install()
    make_logger("super")
    try:
        run, plan = find_plan(args.target, args.overrides, os.environ)
        return supervise(run, plan, stop, os.environ)
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
        return run, read_plan(run)
    from cluster.raw import prepare  # pydantic and YAML are loaded only where a source spec is read

    if "SLURM_JOB_ID" not in environ:
        raise SuperviseError(
            f"SLURM_JOB_ID is not set: {target} can be supervised inside a Slurm job only; "
            f"use python -m cluster.submit {shlex.quote(str(target))}"
        )
    return prepare(target, overrides, environ)


def supervise(run: RunFolder, plan: LaunchPlan, stop: StopFlag, environ: Mapping[str, str]) -> int:
    """One attempt from claim to verdict; returns the job's exit code."""
    if run.summary.exists():
        log.info("%s is finished; nothing to do", run.path)
        return EXIT_FINISHED
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())
    nodes, shape = read_shape(plan, environ)
    master_addr = find_master(plan, nodes, environ)  # before the claim: what is wrong here leaves no attempt behind
    attempt = run.claim_attempt({"job_id": job_id, "host": socket.gethostname(), "pid": os.getpid()})
    run.append_event(
        "attempt_started",
        attempt=attempt,
        job_id=job_id,
        nodes=list(nodes),
        world_size=shape.num_tasks,
        restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )
    log.info("attempt %d of %s: %d ranks on %s", attempt, run.path, shape.num_tasks, ",".join(nodes))
    token = f"{run.run_id}.{attempt}"
    ports = environ.get("MASTER_PORT") or ",".join(map(str, rank.draw_master_ports(f"{job_id}.{token}")))
    variables = dict(environ) | rank_variables(master_addr, ports, token, attempt)
    ranks = start_ranks(plan, shape, variables, run.attempt_log(attempt))
    wait(ranks, stop, forward=plan.cluster == "local")
    verdict = judge(gather(run, attempt, ranks))
    run.check_owner(attempt)
    record_end(run, verdict, attempt, job_id)
    return verdict.exit_code


def read_shape(plan: LaunchPlan, environ: Mapping[str, str]) -> tuple[tuple[str, ...], Shape]:
    """The job's nodes and how many ranks start on them.

    On Slurm the batch shell's own variables say it; the plan fills in the number of tasks only where the job was
    submitted without one.
    """
    if plan.cluster == "local":
        return (socket.gethostname(),), Shape(1, plan.world_size, plan.num_tasks_per_node)
    try:
        nodes = expand_nodelist(environ["SLURM_JOB_NODELIST"])
        if "SLURM_NTASKS" not in environ:
            return nodes, Shape(len(nodes), len(nodes) * plan.num_tasks_per_node, plan.num_tasks_per_node)
        tasks = expand_task_list(environ["SLURM_TASKS_PER_NODE"])
    except KeyError as error:
        raise SuperviseError(f"{error.args[0]} is not set: start the supervisor inside a Slurm job") from None
    even = tasks[0] if len(set(tasks)) == 1 else None
    return nodes, Shape(len(nodes), sum(tasks), even)


def find_master(plan: LaunchPlan, nodes: Sequence[str], environ: Mapping[str, str]) -> str:
    """The address where the ranks meet; the user's own choice stays."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    return "127.0.0.1" if plan.cluster == "local" else address.master_address(nodes, environ)


def start_ranks(plan: LaunchPlan, shape: Shape, environ: Mapping[str, str], log_path: Path) -> Ranks:
    """Start the ranks of one attempt.

    environ: the job's, with the place where the ranks meet.
    """
    variables = {**environ, "OMP_NUM_THREADS": str(plan.threads_per_rank)}
    if plan.cluster == "local":
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        if plan.maybe_visible_gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = plan.maybe_visible_gpus
        return LocalRanks.start(plan, variables, log_path)
    variables[rank.KILL_WAIT_VARIABLE] = str(kill_wait(environ))
    return SrunRanks.start(srun_command(plan, shape, log_path), variables)


def kill_wait(environ: Mapping[str, str]) -> float:
    """Seconds from TERM to KILL; Slurm's default when it does not answer."""
    try:
        return slurm.kill_wait_s(environ)
    except slurm.SlurmError as error:
        log.warning("KillWait is taken as 30 s, Slurm's default: %s", error)
        return 30.0


def wait(ranks: Ranks, stop: StopFlag, *, forward: bool) -> None:
    """Wait until all ranks are gone.

    forward: whether this process alone hears of a stop.  On Slurm the ranks get USR2 and TERM themselves, and only
    Ctrl-C in a terminal needs handing on.
    """
    told = False
    while not ranks.is_over():
        if not told and (stop.is_set() if forward else stop.name() == "SIGINT"):
            log.info("%s: the ranks are asked to save and leave", stop.name())
            ranks.ask_to_stop()
            told = True
        time.sleep(POLL_S)


def gather(run: RunFolder, attempt: int, ranks: Ranks) -> Evidence:
    """Collect what the attempt left behind."""
    records = []
    for path in sorted(run.failures.glob(f"a{attempt:04d}_r*.json")):
        with contextlib.suppress(json.JSONDecodeError):  # its rank was killed while it wrote
            records.append(json.loads(path.read_text()))
    stops: list[dict[str, Any]] = [
        event for event in read_lines(run.events) if event["event"] == "stopped" and event["attempt"] == attempt
    ]
    return Evidence(run.summary.exists(), stops[-1] if stops else None, records, ranks.end())


def record_end(run: RunFolder, verdict: Verdict, attempt: int, job_id: str) -> None:
    """Write the verdict, and the event where rank 0 could not."""
    write_json(
        run.verdict(attempt),
        {
            "time": utc_now(),
            "attempt": attempt,
            "job_id": job_id,
            "outcome": verdict.outcome,
            "cause": verdict.cause,
            "reason": verdict.reason,
            "rank": verdict.rank,
            "exit_code": verdict.exit_code,
            "action": verdict.action,
        },
    )
    if verdict.outcome == "failed":
        run.append_event(
            "attempt_failed",
            attempt=attempt,
            job_id=job_id,
            cause=verdict.cause,
            rank=verdict.rank,
            reason=verdict.reason,
        )
        log.error("attempt %d failed: %s", attempt, verdict.reason)
    else:
        log.info("attempt %d %s: %s", attempt, verdict.outcome, verdict.reason)


if __name__ == "__main__":
    sys.exit(main())
