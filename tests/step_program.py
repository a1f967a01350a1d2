"""Starts a step as the supervisor would, whose tasks say their CPUs: python -m tests.step_program OUT TASKS CPUS WORD.

In a job of the sandbox.  TASKS are those of a node; CPUS the spec's, or `none`; WORD is `elastic` or `fixed`.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from cluster.attempt_start import read_shape
from cluster.launch import srun_command
from cluster.step import step_environment
from tests.test_launch import make_plan

if __name__ == "__main__":
    out, tasks, cpus, word = sys.argv[1:]
    plan = make_plan(
        "sh",
        "-c",
        "echo $SLURM_PROCID of $SLURM_NTASKS: $SLURM_CPUS_PER_TASK CPUs",
        world_size=int(tasks),
        cpus_per_task=None if cpus == "none" else int(cpus),
    )
    plan = dataclasses.replace(plan, cluster="slurm", is_elastic=word == "elastic")
    _, shape = read_shape(plan, os.environ)
    command = srun_command(plan, shape, Path(out), os.environ)
    sys.exit(subprocess.run(command, env=step_environment(os.environ), check=False).returncode)
