"""Start of an attempt: plan, the job's variables -> [attempt_start] -> running ranks.  Standard library only.

Which nodes the job has, where its ranks meet, and with which variables they start.  What is wrong here is wrong with
the spec, the environment or this node; what may pass is tried for a minute.
"""

import logging
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import address, rank, slurm
from cluster.allocation import expand_nodelist, expand_task_list
from cluster.container import variables_inside
from cluster.job import ASK_AGAIN_S, Job, insist
from cluster.launch import LocalRanks, Ranks, Shape, SrunRanks, rank_variables, srun_command
from cluster.plan import LaunchPlan
from cluster.provenance import maybe_version_at_submission, prepare_code, tell_drift
from cluster.runs import RunFolder, UsageError
from cluster.start_watch import StartWatch, is_inside_step, start_limit_s

log = logging.getLogger("run")

PASSING_S = 60.0  # in which a name may begin to resolve, or a busy controller answer, before a start has failed


class SuperviseError(UsageError):
    """The environment does not hold what a supervisor needs."""


def read_shape(plan: LaunchPlan, environ: Mapping[str, str]) -> tuple[tuple[str, ...], Shape]:
    """The job's nodes and how many ranks start on them.

    On Slurm the batch shell's own variables say it; the plan fills in the number of tasks only where the job was
    submitted without one.
    """
    if plan.cluster == "local":
        return (socket.gethostname(),), Shape(1, plan.world_size, plan.num_tasks_per_node)
    try:
        nodes = expand_nodelist(environ["SLURM_JOB_NODELIST"])
        if plan.is_elastic or "SLURM_NTASKS" not in environ:
            return nodes, Shape(len(nodes), len(nodes) * plan.num_tasks_per_node, plan.num_tasks_per_node)
        tasks = expand_task_list(environ["SLURM_TASKS_PER_NODE"])
    except KeyError as error:
        raise SuperviseError(f"{error.args[0]} is not set: start the supervisor inside a Slurm job") from None
    even = tasks[0] if len(set(tasks)) == 1 else None
    return nodes, Shape(len(nodes), sum(tasks), even)


def start_attempt(
    run: RunFolder,
    plan: LaunchPlan,
    job: Job,
    attempt: int,
    nodes: Sequence[str],
    shape: Shape,
    environ: Mapping[str, str],
) -> Ranks:
    """Start the ranks of a claimed attempt.

    Raises UsageError: a name does not resolve, or Slurm's commands are not there.
    Raises SlurmError: it does not say where the nodes are.
    """
    if job.is_on_slurm:
        check_commands(environ)
    master_addr = find_master(plan, nodes, environ)
    prepare_code(run)
    tell_drift(run, attempt, job.job_id)
    token = f"{run.run_id}.{attempt}"
    ports = environ.get("MASTER_PORT") or ",".join(map(str, rank.draw_master_ports(f"{job.job_id}.{token}")))
    variables = dict(environ) | rank_variables(master_addr, ports, token, attempt)
    variables[rank.SPEC_VARIABLE] = run.spec.read_text()  # read once, whatever the number of ranks
    if not plan.image_variables and (version := maybe_version_at_submission(run)):
        variables[rank.PYTHON_VARIABLE] = version
    return start_ranks(plan, shape, variables, job, run.attempt_log(attempt))


def check_commands(environ: Mapping[str, str]) -> None:
    """Raises SuperviseError: a line of setup, such as `module purge`, has taken Slurm's commands off PATH."""
    path = environ.get("PATH", "")
    missing = [name for name in ("srun", "squeue", "scontrol") if shutil.which(name, path=path) is None]
    if missing:
        raise SuperviseError(
            f"{', '.join(missing)}: not on PATH after setup ({path or 'it is empty'}); "
            "load your site's module of Slurm there, or leave PATH as it was"
        )


def find_master(plan: LaunchPlan, nodes: Sequence[str], environ: Mapping[str, str]) -> str:
    """The address where the ranks meet; the user's own choice stays.

    Raises AddressError, SlurmError: there is none; what may pass has been tried for PASSING_S.
    """
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if plan.cluster == "local":
        return "127.0.0.1"
    end = time.monotonic() + PASSING_S
    while True:
        try:
            return insist(lambda: address.master_address(nodes, environ), patience_s=PASSING_S)
        except address.AddressError as error:
            if not error.may_pass or time.monotonic() > end:
                raise
            log.warning("looking again: %s", error)
            time.sleep(ASK_AGAIN_S)


def start_ranks(plan: LaunchPlan, shape: Shape, environ: Mapping[str, str], job: Job, log_path: Path) -> Ranks:
    """Start the ranks of one attempt.

    environ: the job's, with the place where the ranks meet.
    """
    variables = {**environ, "OMP_NUM_THREADS": str(plan.threads_per_rank)}
    if plan.cluster == "local":
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        if plan.maybe_visible_gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = plan.maybe_visible_gpus
    else:
        variables[rank.KILL_WAIT_VARIABLE] = str(kill_wait(environ))
    if plan.image_variables:
        variables = variables_inside(variables, plan.image_variables, plan.image_prefix)
    if plan.cluster == "local":
        return LocalRanks.start(plan, variables, log_path)
    watch = StartWatch(log_path, start_limit_s(environ[rank.SPEC_VARIABLE]), job.job_id, job.environ)
    srun, *words = srun_command(plan, shape, log_path, environ)
    shared = ["--overlap"] if is_inside_step(environ) else []
    return SrunRanks.start([srun, *shared, *words], variables, watch)


def kill_wait(environ: Mapping[str, str]) -> float:
    """Seconds from TERM to KILL; Slurm's default when it does not answer."""
    try:
        return slurm.kill_wait_s(environ)
    except slurm.SlurmError as error:
        log.warning("KillWait is taken as 30 s, Slurm's default: %s", error)
        return 30.0
