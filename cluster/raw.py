"""Raw sbatch route: a source spec and a running allocation -> [raw] -> the run folder that submit would have made.

Loaded by the supervisor only where there is a source spec to read: it brings in pydantic and YAML.
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import index, slurm
from cluster.allocation import expand_nodelist, expand_task_list
from cluster.clusters import cluster_name
from cluster.identity import find_own, is_own, maybe_shown, own_job_id, run_job
from cluster.job import insist
from cluster.keep import record_live
from cluster.plan import LaunchPlan, make_plan, python_at, read_plan, write_plan
from cluster.runs import RunError, RunFolder, write_atomic
from cluster.signals import STOP_SIGNALS
from cluster.spec import JobSpec, SpecError, changed_keys, dump_spec, faults_allowed, load_spec
from cluster.spec_units import slurm_time

log = logging.getLogger("run")


def prepare(spec_path: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[RunFolder, LaunchPlan]:
    """Make the run folder named by the job id, or find the one that this job made before it was requeued.

    From here on a batch job's log is the run folder's.

    Raises RunError: the spec is wrong, or the allocation does not say what it is.
    """
    job_id = own_job_id(environ)
    run = maybe_known_run(job_id, environ) or make_run(spec_path, overrides, job_id, environ)
    plan = read_plan(run)
    run.take_umask()
    if environ.get("ENVIRONMENT") == "BATCH":  # set by Slurm for batch steps; in salloc there is a terminal to speak to
        redirect_output(run.batch_log(job_id))
    if plan.preamble:
        run_preamble(plan, environ)
    return run, plan


def maybe_known_run(job_id: str, environ: Mapping[str, str]) -> RunFolder | None:
    """The run of a requeued job, so that a spec edited since cannot change it."""
    if not is_requeued(environ):
        return None
    for name in (job_id, environ["SLURM_JOB_ID"]):  # older releases named array members by their number
        with contextlib.suppress(RunError):
            run = index.find_run(name, environ)
            if is_run_of(run, name, environ):
                return run
    return None


def is_run_of(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> bool:
    """Whether a run was begun by the job that this process is in, as against another one of its id."""
    told = [event for event in run.read_events() if event["event"] == "submitted" and event["job_id"] == job_id]
    if not told or not index.is_of(cluster_name(environ), told[-1]):
        return False
    shown = insist(lambda: maybe_shown(job_id, environ))
    return shown is not None and is_own(shown, run_job(run, job_id))


def is_requeued(environ: Mapping[str, str]) -> bool:
    """Whether this job has run before."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def make_run(spec_path: Path, overrides: Sequence[str], job_id: str, environ: Mapping[str, str]) -> RunFolder:
    """Freeze the spec as the allocation has it; a run folder that this job has made already stays as it is.

    Raises RunError: the spec is wrong, or this job (a salloc) has begun a run of this name with another spec.
    """
    try:
        asked = load_spec(spec_path, overrides, cwd=Path.cwd(), allow_faults=faults_allowed(environ))
    except SpecError as error:
        raise RunError(str(error)) from None
    run = folder_for(asked.run_root / asked.name, job_id, environ)
    spec = as_allocated(asked, environ)
    if run.plan.exists():
        differing = changed_keys(load_spec(run.spec, cwd=run.path, allow_faults=True), spec)
        if differing and not is_requeued(environ):
            raise RunError(
                f"{run.path} holds a run of this job with another spec ({', '.join(differing)}): give this one another "
                f"name, or go on with that one by python -m cluster.supervise {run.path}"
            )
        return run
    try:
        run.make(spec.run_folder_mode)
    except OSError as error:
        raise RunError(f"run_root: {run.path} cannot be written: {error.strerror}") from None
    write_atomic(run.spec, dump_spec(spec))
    record_live(spec, run, environ)
    cluster = cluster_name(environ)
    record = dict(find_own(run, environ).record)
    run.append_event("submitted", attempt=0, job_id=job_id, route="sbatch", cluster=cluster, job=record)
    plan = make_plan(spec, run, python=python_at(sys.executable))
    # requeue.submit_from: login is for cluster.submit; here nobody has put successors in beforehand.
    write_plan(replace(plan, submit_from="job"), run)
    index.register(run, job_id, environ, "sbatch", cluster)
    if environ.get("ENVIRONMENT") == "BATCH":
        warn_of_late_directives(job_id, environ)
    return run


def folder_for(folder: Path, job_id: str, environ: Mapping[str, str]) -> RunFolder:
    """The run folder of this job below that of a name: its id, with four digits more where another job has had it.

    What this job has made already is found again.
    """
    named = RunFolder(folder / job_id)
    there = [RunFolder(path) for path in (named.path, *folder.glob(f"{job_id}-????")) if (path / "plan.json").exists()]
    if not there:
        return named
    newest = max(there, key=lambda run: run.plan.stat().st_mtime_ns)
    if is_run_of(newest, job_id, environ):
        return newest
    log.warning("%s is a run of another job %s; this one gets a folder of its own", newest.path, job_id)
    return RunFolder(folder / f"{job_id}-{secrets.token_hex(2)}")


def warn_of_late_directives(job_id: str, environ: Mapping[str, str]) -> None:
    """Tell of flags in the user's script that sbatch did not read, as they stand below its first command."""
    try:
        script = slurm.run(["scontrol", "write", "batch_script", job_id, "-"], environ)
    except slurm.SlurmError as error:
        log.debug("the script is not looked at: %s", error)
        return
    if late := late_directives(script):
        log.warning("sbatch does not read what is below a script's first command; move up: %s", "; ".join(late))


def late_directives(script: str) -> tuple[str, ...]:
    """The #SBATCH lines of a script below its first command; sbatch(1) stops there without a word."""
    lines = [line.strip() for line in script.splitlines()]
    begins = next((number for number, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    return tuple(line for line in lines[begins:] if line.startswith("#SBATCH"))


def as_allocated(asked: JobSpec, environ: Mapping[str, str]) -> JobSpec:
    """The spec with the allocation's values in place of its own Slurm keys; a difference is one warning.

    A key that the spec leaves to the cluster cannot be contradicted.
    """
    had = allocated(environ)
    had_nodes = had["nodes"]
    wanted = {
        "nodes": had_nodes if asked.min_nodes <= had_nodes <= asked.max_nodes else asked.nodes,
        "tasks_per_node": asked.tasks_per_node,
        "gpus_per_node": asked.num_gpus_per_node,
        "cpus_per_task": asked.cpus_per_task,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time_limit": asked.slurm_time,
    }
    differing = {key: value for key, value in had.items() if wanted[key] not in (None, value)}
    if differing:
        listed = "; ".join(f"{key}: {wanted[key]} -> {value}" for key, value in differing.items())
        log.warning("the allocation wins over the spec: %s", listed)
    changes = differing | {"cluster": "slurm"}
    if "gpus_per_node" in differing:
        changes["gpus_per_node"] = str(had["gpus_per_node"]) if had["gpus_per_node"] else None
    return asked.model_copy(update=changes)


def allocated(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the batch shell's variables and squeue say of the allocation, by the spec's keys.

    Raises RunError: a variable that every allocation has is missing.
    """
    try:
        nodes = expand_nodelist(environ["SLURM_JOB_NODELIST"])
        tasks = expand_task_list(environ["SLURM_TASKS_PER_NODE"])
    except KeyError as error:
        raise RunError(f"{error.args[0]} is not set: start this inside a Slurm job") from None
    # SLURM_GPUS_ON_NODE is the batch shell's; in salloc's there is only what was asked for, such as a100:2.
    gpus = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "0").rpartition(":")[2]
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    had: dict[str, Any] = {
        "nodes": len(nodes),
        "gpus_per_node": int(gpus),
        "cpus_per_task": int(cpus) if cpus else None,  # None: srun must not ask for more than the job has
    }
    if "SLURM_NTASKS" in environ:
        had["tasks_per_node"] = max(tasks)
    names = {key: environ.get(f"SLURM_JOB_{key.upper()}") for key in ("partition", "account", "qos")}
    limit = maybe_time_limit(environ)
    return had | {key: value for key, value in names.items() if value} | ({"time_limit": limit} if limit else {})


def maybe_time_limit(environ: Mapping[str, str]) -> str | None:
    """The job's time limit as [D-]HH:MM:SS; None when it has none, or Slurm does not answer."""
    try:
        limit_s = slurm.maybe_time_limit_s(own_job_id(environ), environ)
    except slurm.SlurmError as error:
        log.warning("the time limit is not compared with the spec's: %s", error)
        return None
    return None if limit_s is None else slurm_time(limit_s)


def redirect_output(path: Path) -> None:
    """Send what this process and its children say to a file from here on."""
    print(f"the log goes on in {path}", flush=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run_preamble(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Start over in the run folder, under a shell that has run the spec's env and setup lines.

    Stop signals stay blocked until the next process has its handlers.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    script = "\n".join([*plan.opening, 'exec "$@"'])
    os.execve("/bin/bash", ["bash", "-c", script, "bash", *plan.supervisor], dict(environ))
