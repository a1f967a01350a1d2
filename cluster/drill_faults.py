"""Faults of a drill: a run under way -> [drill_faults] -> it is preempted, killed, damaged, starved.

Most happen inside a rank, by the spec's `faults`.  What only Slurm or the storage can do is done by the drill once one
rank holds the run still.
"""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster import orders, rank, slurm
from cluster.drill_run import DrillRun, NotTriedError, flip_bit, truncate
from cluster.drill_spec import FAULT_STEP, KILL_STEP, SAVE_EVERY_STEPS, SAVE_STEP, SHORT_TIME_LIMIT, TIME_LIMIT
from cluster.identity import run_job
from cluster.launch import local_variables, rank_variables
from cluster.plan import read_plan
from cluster.runs import UsageError

PREEMPTION_S = 60.0  # until Slurm acts on a job that preempts; its schedulers run every 30 s or so
TIME_LIMIT_S = 300.0  # the ranks are silent until the warning: SHORT_TIME_LIMIT, and Slurm may be late
STRAGGLER_S = 120.0  # for a start of one process, refused or not
LAST = -1  # in place of a rank's number: the last one


@dataclass(frozen=True, slots=True)
class Cause:
    """How a fault was caused."""

    how: str = "real"  # or simulated
    note: str = ""


REAL = Cause()
Act = Callable[[DrillRun], Cause]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    key: str  # for --only
    title: str  # at most 24 columns
    do: str  # in a rank, by the spec's faults
    at_step: int = FAULT_STEP
    rank: int = LAST
    maybe_act: Act | None = None  # what the drill does once a rank has done `do`
    maybe_lost_at: int | None = None  # steps done when the first attempt is cut off
    max_lost: int = 0  # steps that may be done twice
    time_limit: str = TIME_LIMIT

    def in_spec(self, world_size: int) -> dict[str, Any]:
        """The entry for the spec's faults."""
        return {"at_step": self.at_step, "rank": self.rank % world_size, "do": self.do}


def preempt(drilled: DrillRun) -> Cause:
    """Let Slurm preempt the job by one of a higher partition, if its nodes run nothing else."""
    if drilled.route == "local":
        drilled.take_down()
        return Cause("simulated", "asked to stop: this machine preempts nothing")
    try:
        partition = higher_partition(drilled)
        if preempt_by(partition, drilled):
            return Cause(note=f"by a job in partition {partition}")
        reason = f"partition {partition} did not preempt it within {PREEMPTION_S:.0f} s"
    except (slurm.SlurmError, NotTriedError) as error:
        reason = str(error)
    return Cause("simulated", f"by {requeue_or_terminate(drilled)}, since {reason}")


def requeue_or_terminate(drilled: DrillRun) -> str:
    """Give the ranks a preemption's TERM by other means; returns the command that did.

    Raises NotTriedError: Slurm lets this user do neither.
    """
    job = run_job(drilled.run, drilled.job_id)
    with contextlib.suppress(slurm.SlurmError):  # a site may not let its users requeue, or the job was put in without
        orders.requeue(job, drilled.environ)
        return "scontrol requeue"
    try:
        orders.signal_ranks(job, "TERM", drilled.environ)
    except slurm.SlurmError as error:
        raise NotTriedError(str(error)) from None
    return "scancel --signal=TERM"


def place_of(drilled: DrillRun) -> tuple[str, str, str]:
    """Partition, host list and number of nodes of the running job.

    Raises SlurmError: it does not run, or no answer.
    """
    told = slurm.run(["squeue", "-h", "-j", drilled.job_id, "-o", "%P|%N|%D"], drilled.environ).strip().split("|")
    if len(told) != 3 or not told[1]:
        raise slurm.SlurmError(f"squeue names no nodes of job {drilled.job_id}")
    return told[0], told[1], told[2]


def higher_partition(drilled: DrillRun) -> str:
    """A partition that preempts the job's, where that does nobody else harm.

    Raises NotTriedError: there is none, or other jobs may be hit.  Raises SlurmError: no answer.
    """
    config = slurm.run(["scontrol", "show", "config"], drilled.environ)
    if not re.search(r"^PreemptType\s*=\s*preempt/partition_prio", config, re.MULTILINE):
        raise NotTriedError("no partition preempts another here")
    if re.search(r"^PrivateData\s*=.*\bjobs\b", config, re.MULTILINE):
        raise NotTriedError("other users' jobs cannot be seen here, and might be hit")
    own, nodes, _ = place_of(drilled)
    there = slurm.run(["squeue", "-h", "-w", nodes, "-t", "running", "-o", "%i"], drilled.environ).split()
    if there != [drilled.job_id]:
        raise NotTriedError(f"other jobs run on {nodes}, and would be hit")
    tiers = partition_tiers(slurm.run(["scontrol", "show", "partition", "--oneliner"], drilled.environ))
    higher = sorted((tier, name) for name, tier in tiers.items() if tier > tiers.get(own, 0))
    if not higher:
        raise NotTriedError(f"no partition is above {own}")
    return higher[0][1]


def partition_tiers(answer: str) -> dict[str, int]:
    """Name -> PriorityTier of each partition that is up, from `scontrol show partition --oneliner`."""
    found = re.findall(r"^PartitionName=(\S+) .*?\bPriorityTier=(\d+) .*?\bState=UP\b", answer, re.MULTILINE)
    return {name: int(tier) for name, tier in found}


def preempt_by(partition: str, drilled: DrillRun) -> bool:
    """Take the job's nodes by a job of two seconds; returns whether the run was disturbed.

    Raises SlurmError: it was refused.
    """
    _, nodes, num_nodes = place_of(drilled)
    flags = read_plan(drilled.run).sbatch
    command = ["sbatch", "--parsable", f"--partition={partition}", f"--nodes={num_nodes}", f"--nodelist={nodes}"]
    command += ["--exclusive", "--time=1", "--output=/dev/null", "--job-name=drill-preempts", "--wrap=sleep 2"]
    command += [f"--{key}={flags[key]}" for key in ("account", "qos") if key in flags]
    job_id = slurm.run(command, drilled.environ).strip().split(";")[0]
    end = time.monotonic() + PREEMPTION_S
    while not drilled.is_disturbed() and time.monotonic() < end:
        time.sleep(0.2)
    if drilled.is_disturbed():
        return True
    with contextlib.suppress(slurm.SlurmError):  # it has just ended
        slurm.run(["scancel", job_id], drilled.environ)
    return False


def reach_time_limit(drilled: DrillRun) -> Cause:
    """Wait for Slurm's warning."""
    if drilled.route == "local":
        drilled.take_down()
        return Cause("simulated", "asked to stop: this machine has no queue to come back through")
    drilled.wait(drilled.is_disturbed, patience_s=max(drilled.patience_s, TIME_LIMIT_S))
    return REAL


def damage_by(how: Callable[..., None]) -> Act:
    """Damage the newest checkpoint while the run is down."""

    def act(drilled: DrillRun) -> Cause:
        drilled.take_down()
        how(drilled.newest_checkpoint())
        return REAL

    return act


def let_old_attempt_go_on(drilled: DrillRun) -> Cause:
    """Start a rank of the first attempt when a later one owns the run: what a node that was cut off may do."""
    drilled.take_down()
    claim = {"job_id": drilled.job_id, "host": socket.gethostname(), "pid": os.getpid()}
    latest = drilled.run.claim_attempt(claim)
    code = straggle(drilled, attempt=1)
    return Cause("simulated", f"a process of attempt 1, started here after attempt {latest} began, left with {code}")


def straggle(drilled: DrillRun, *, attempt: int) -> int:
    """Run one process as an attempt of a world of one; returns its exit code, -9 when it had to be killed."""
    ports = ",".join(map(str, rank.draw_master_ports(f"{drilled.run.run_id}.straggler")))
    told = rank_variables("127.0.0.1", ports, f"{drilled.run.run_id}.{attempt}", attempt)
    environ = {**drilled.environ, **told, **local_variables(0, 1, {**drilled.environ, **told})}
    plan = read_plan(drilled.run)
    place = plan.rank.index("--run-dir")
    command = [*plan.rank[:place], "train.device=cpu", *plan.rank[place:]]  # this machine may have no GPU
    script = "\n".join((*plan.preamble, f"exec {shlex.join(command)}"))
    with drilled.log.open("a") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", script],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return process.wait(timeout=STRAGGLER_S)
    except subprocess.TimeoutExpired:
        return -9
    finally:
        process.kill()
        process.wait()


CUT_OFF = 2 * SAVE_EVERY_STEPS  # lost at most where nobody was warned: back to the save before the last
FAULTS = (
    Fault("preempt", "preempted", "pause", maybe_act=preempt),
    Fault("time-limit", "time limit", "pause", maybe_act=reach_time_limit, time_limit=SHORT_TIME_LIMIT),
    Fault("kill", "rank killed by -9", "kill", at_step=KILL_STEP, maybe_lost_at=KILL_STEP, max_lost=CUT_OFF),
    Fault(
        "kill-save",
        "rank 0 killed in a save",
        "kill_save",
        at_step=SAVE_STEP,
        rank=0,
        maybe_lost_at=SAVE_STEP,
        max_lost=CUT_OFF,
    ),
    Fault("truncate", "checkpoint truncated", "pause", maybe_act=damage_by(truncate), max_lost=CUT_OFF),
    Fault("bit", "checkpoint bit flipped", "pause", maybe_act=damage_by(flip_bit), max_lost=CUT_OFF),
    Fault("disk", "disk full", "enospc", rank=0),
    Fault("stop", "one rank stopped", "stop", at_step=KILL_STEP, maybe_lost_at=KILL_STEP, max_lost=CUT_OFF),
    Fault("signal", "signal to one rank", "signal"),
    Fault("port", "port taken", "port", at_step=0, rank=0),
    Fault("old", "old attempt goes on", "pause", rank=0, maybe_act=let_old_attempt_go_on),  # a world of one
)


def choose(wanted: str | None) -> tuple[Fault, ...]:
    """The faults of --only, in the drill's order; all without it.

    Raises UsageError: one is unknown.
    """
    if wanted is None:
        return FAULTS
    keys = wanted.split(",")
    known = [fault.key for fault in FAULTS]
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise UsageError(f"--only: {', '.join(unknown)}: no fault; there are {', '.join(known)}")
    return tuple(fault for fault in FAULTS if fault.key in keys)
