"""Environment of a job: this process's -> [environment] -> what sbatch and a job of ours get.  Standard library only.

We may be started inside another job, by hand or as a supervisor that submits the next one.  What such a job left in the
environment would reach sbatch and srun as options, and ranks as their place in another world.
Sources: sbatch(1) and srun(1), "INPUT ENVIRONMENT VARIABLES", Slurm 22.05.
"""

import re
from collections.abc import Mapping

from cluster import rank

OUTER_JOB = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|PMI2?|PMIX|SUBMITIT|TORCHELASTIC)_")
OUTER_RANK = frozenset(
    (
        *rank.TORCHRUN_VARIABLES,
        "GROUP_RANK",
        rank.MASTER_ADDR_VARIABLE,
        rank.MASTER_PORTS_VARIABLE,
        rank.TOKEN_VARIABLE,
        rank.ATTEMPT_VARIABLE,
        rank.SPEC_VARIABLE,
        rank.KILL_WAIT_VARIABLE,
        rank.PYTHON_VARIABLE,
    )
)
KEPT = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"))  # which cluster to talk to, and as whom


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer job or launcher left in it; where Slurm is stays."""
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT or not (OUTER_JOB.match(name) or name in OUTER_RANK)
    }
