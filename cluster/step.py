"""Job step: allocation, spec -> [step] -> what srun asks for each rank, and its environment.  Standard library only.

srun takes options from variables that sbatch left, and which ones changed: SLURM_CPUS_PER_TASK is read up to 21.08 and
since 23.11, SRUN_CPUS_PER_TASK in 22.05 and 23.02, SLURM_TRES_PER_TASK since 23.11, where two that differ are fatal.
So the step's share is always given in full, and no such variable is left to speak beside it.
Sources: srun(1), "INPUT ENVIRONMENT VARIABLES", --exact, --mem; release notes of 22.05, 23.11; tried on 22.05.
"""

import logging
from collections.abc import Mapping

from cluster import slurm
from cluster.allocation import expand_task_list
from cluster.plan import LaunchPlan

log = logging.getLogger("run")

# Options that srun is given on its command line.
GIVEN = frozenset(
    (
        "SLURM_CPUS_PER_TASK",
        "SRUN_CPUS_PER_TASK",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_EXPORT_ENV",  # of `sbatch --export=NONE`: srun would drop PATH
    )
)
# What slurmstepd tells a task of its own CPUs, as in the shell of `salloc` where that is a step: srun would bind every
# rank to them.
TASKS_BINDING = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
TRES_PER_TASK = "SLURM_TRES_PER_TASK"


def cpus_per_task(plan: LaunchPlan, num_tasks_per_node: int | None, environ: Mapping[str, str]) -> int | None:
    """CPUs of each rank; None where the environment does not say what the job has.

    The job's own number counts, which a site's plugin may have raised.  Without one the ranks share all that the job
    has on a node, so that none is bound to a single CPU of many.

    num_tasks_per_node: None where nodes have different numbers.
    """
    asked = int(environ["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in environ else None
    if plan.is_elastic and asked is not None:  # such a job has one task on a node, with the CPUs of all ranks there
        asked = asked // plan.num_tasks_per_node if plan.cpus_per_task is not None else None
    if asked is not None or plan.cpus_per_task is not None:
        return asked or plan.cpus_per_task
    if "SLURM_JOB_CPUS_PER_NODE" not in environ:
        return None
    cpus = expand_task_list(environ["SLURM_JOB_CPUS_PER_NODE"])
    even = (num_tasks_per_node,) * len(cpus) if num_tasks_per_node is not None else None
    tasks = even or expand_task_list(environ["SLURM_TASKS_PER_NODE"])
    return in_whole_cores(min(had // num for had, num in zip(cpus, tasks, strict=True)), environ)


def in_whole_cores(num_cpus: int, environ: Mapping[str, str]) -> int:
    """As many CPUs or some fewer, and at least one: Slurm gives no core to two tasks, and a step that needs more cores
    than the job has waits for ever.
    """
    if num_cpus <= 1:
        return 1
    threads = threads_per_core(environ)
    return max(num_cpus - num_cpus % threads, 1)


def threads_per_core(environ: Mapping[str, str]) -> int:
    """CPUs of a core, as the job counts them; two where Slurm does not answer."""
    if "SLURM_THREADS_PER_CORE" in environ:  # asked for, also by --hint=nomultithread
        return int(environ["SLURM_THREADS_PER_CORE"])
    command = ["sinfo", "--noheader", "--all", f"--nodes={environ['SLURM_JOB_NODELIST']}", "--format=%Z"]
    try:
        return max(map(int, slurm.run(command, environ).split()), default=2)
    except (slurm.SlurmError, ValueError) as error:
        log.warning("cores are taken to have two threads: %s", error)
        return 2


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """srun's environment without what would speak beside its command line; slurmstepd tells ranks their own values."""
    is_in_step = "SLURM_STEP_ID" in environ
    kept = {
        name: value
        for name, value in environ.items()
        if not (name in GIVEN or (is_in_step and name.startswith(TASKS_BINDING)))
    }
    if TRES_PER_TASK in kept:
        others = [item for item in kept.pop(TRES_PER_TASK).split(",") if not item.startswith(("cpu:", "cpu="))]
        kept |= {TRES_PER_TASK: ",".join(others)} if others else {}
    return kept
