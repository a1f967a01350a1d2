"""Limits: a login node's `ulimit` -> [limits] -> what of it the ranks do without.  Standard library only.

Slurm hands the soft limits of the shell that submits on to the job (slurm.conf's PropagateResourceLimits), and a login
node has some that would end a training: `ulimit -t 600` kills every rank after ten minutes of processor time.  The hard
limits are the node's own (22.05), so a soft one of these kinds is lifted to them.  Others stay as they are: a memlock
or nofile that its user has raised is wanted, and a `ulimit` in setup: sets the hard one, too, and so counts.
Source: sbatch(1), --propagate; setrlimit(2).
"""

import logging
import resource

log = logging.getLogger("run")

# Those that end or starve a long training; name as bash has it -> what it bounds.
LIFTED = {
    "ulimit -t": (resource.RLIMIT_CPU, "processor seconds of a process"),
    "ulimit -v": (resource.RLIMIT_AS, "bytes of address space"),
    "ulimit -d": (resource.RLIMIT_DATA, "bytes of data"),
    "ulimit -m": (resource.RLIMIT_RSS, "bytes in memory"),
    "ulimit -f": (resource.RLIMIT_FSIZE, "bytes of a file"),
}


def lift_limits() -> None:
    """Raise the soft limits of this process, and so of its children, to the hard ones; tell of hard ones that stay."""
    for name, (kind, what) in LIFTED.items():
        soft, hard = resource.getrlimit(kind)
        if soft != hard:
            resource.setrlimit(kind, (hard, hard))
            log.info("%s: %d %s, as where the job was submitted: lifted for the ranks", name, soft, what)
        if hard != resource.RLIM_INFINITY:
            log.warning("%s: at most %d %s on this node, for the ranks too", name, hard, what)
