"""Names that a spec may not use for itself: sbatch flags and variables that a key or this program owns.

Used by the job spec for its mappings `sbatch` and `env`.  Standard library only.
Sources: sbatch(1), Slurm 22.05 to 25.05; getopt_long(3); torchrun's "Environment Variables".
"""

import re

from cluster.secret_names import is_secret

# Long options of sbatch that a key of the spec writes.  Values are dotted keys.
KEY_OF_FLAG = {
    "account": "account",
    "comment": "comment",
    "constraint": "constraint",
    "container": "container.image",
    "container-image": "container.image",
    "container-mounts": "container.mounts",
    "cpus-per-gpu": "cpus_per_task",
    "cpus-per-task": "cpus_per_task",
    "exclude": "exclude",
    "exclusive": "exclusive",
    "export": "env",
    "export-file": "env",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-socket": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "job-name": "name",
    "mail-type": "mail_type",
    "mail-user": "mail_user",
    "mem": "memory_per_node",
    "mem-per-cpu": "memory_per_cpu",
    "mem-per-gpu": "memory_per_gpu",
    "nodefile": "nodelist",
    "nodelist": "nodelist",
    "nodes": "nodes",
    "ntasks": "tasks_per_node",
    "ntasks-per-core": "tasks_per_node",
    "ntasks-per-gpu": "tasks_per_node",
    "ntasks-per-node": "tasks_per_node",
    "ntasks-per-socket": "tasks_per_node",
    "partition": "partition",
    "qos": "qos",
    "reservation": "reservation",
    "tasks": "tasks_per_node",  # these two are sbatch's other names for ntasks and ntasks-per-node
    "tasks-per-node": "tasks_per_node",
    "tres-per-task": "gpus_per_node",
    "signal": "signal_lead_s",
    "time": "time_limit",
    "time-min": "time_limit",
}

# Long options of sbatch that this program sets itself, or that would break its promise.
REASON_AGAINST_FLAG = {
    "array": "one submission is one run; submit once per run",
    "chdir": "the job's folder is set at submission",
    "clusters": "the run is looked after on the cluster it was submitted to",
    "error": "the log is kept in the run folder",
    "get-user-env": "the environment is the one at submission; use the keys env and setup",
    "het-group": "heterogeneous jobs are not supported",
    "help": "it would print instead of submitting",
    "input": "the job reads nothing",
    "no-kill": "Slurm must end the job when a node fails, so that it comes back",
    "no-requeue": "use the key requeue.mode",
    "open-mode": "logs are always appended to",
    "output": "the log is kept in the run folder",
    "parsable": "sbatch's answer is read by the program",
    "quiet": "sbatch's answer is read by the program",
    "requeue": "use the key requeue.mode",
    "test-only": "use --dry-run",
    "uid": "the run folder is the submitter's own",
    "gid": "the run folder is the submitter's own",
    "usage": "it would print instead of submitting",
    "verbose": "sbatch's answer is read by the program",
    "version": "it would print instead of submitting",
    "wait": "use --wait of cluster.submit",
    "wrap": "the command is the program's own",
}
OWNED_FLAGS = sorted(KEY_OF_FLAG.keys() | REASON_AGAINST_FLAG.keys())

LONG_OF_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "I": "immediate", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit",
    "Q": "quiet", "S": "core-spec", "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task",
    "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks",
    "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip

SECRET_REFUSED = (
    "its name looks like that of a secret, and the spec is written to the run folder; leave it out and export it in "
    "the shell that submits: the environment goes along with the job"
)
FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables that the program works out for every rank; a value from the spec would be wrong on all ranks but one.
REASON_AGAINST_VARIABLE = {
    "CUDA_VISIBLE_DEVICES": "Slurm chooses the GPUs of a task",
    "GROUP_RANK": "it is worked out for every rank",
    "LOCAL_RANK": "it is worked out for every rank",
    "LOCAL_WORLD_SIZE": "it is worked out for every rank",
    "MKL_NUM_THREADS": "use the key train.threads_per_rank",
    "OMP_NUM_THREADS": "use the key train.threads_per_rank",
    "RANK": "it is worked out for every rank",
    "WORLD_SIZE": "it is worked out for every rank",
}
REASON_AGAINST_PREFIX = {
    "CLUSTER_": "names that begin so are the program's own",
    "SALLOC_": "it would change what Slurm is asked for",
    "SBATCH_": "it would change what Slurm is asked for",
    "SLURM_": "Slurm sets it",
    "SLURMD_": "Slurm sets it",
    "SRUN_": "it would change how ranks are started",
    "SUBMITIT_": "submitit sets it",
    "TORCHELASTIC_": "torchrun sets it",
}


def check_flag(name: str) -> str:
    """Pass the long name of a free sbatch flag.

    Raises ValueError: a key or the program owns the flag, or it isn't written as a long name.
    """
    plain = LONG_OF_SHORT.get(name) or name.strip("-").replace("_", "-")
    owned = _owned_flag(plain)
    if owned in KEY_OF_FLAG:
        raise ValueError(f"sbatch's --{owned} is written by the key {KEY_OF_FLAG[owned]}; use that")
    if owned in REASON_AGAINST_FLAG:
        raise ValueError(f"sbatch's --{owned} is not yours to set: {REASON_AGAINST_FLAG[owned]}")
    if name != plain and FLAG.fullmatch(plain):
        raise ValueError(f"{name!r} is no long name of an sbatch flag without leading dashes; write {plain}")
    if not FLAG.fullmatch(name):
        raise ValueError(f"{name!r} is no long name of an sbatch flag, such as licenses")
    return name


def _owned_flag(name: str) -> str:
    """The owned flag that sbatch takes a name for; the name itself when there is none.

    getopt takes a beginning, such as part, for the whole; no free flag is the beginning of an owned one.
    """
    if not name or name in OWNED_FLAGS:
        return name
    return next((owned for owned in OWNED_FLAGS if owned.startswith(name)), name)


def check_variable(name: str) -> str:
    """Pass the name of a variable that the spec may set.

    Raises ValueError: no name for a shell, or one that is set for every rank.
    """
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a variable; use letters, digits and _")
    reason = REASON_AGAINST_VARIABLE.get(name) or next(
        (reason for prefix, reason in REASON_AGAINST_PREFIX.items() if name.startswith(prefix)), None
    )
    if reason:
        raise ValueError(f"may not be set: {reason}")
    if is_secret(name):
        raise ValueError(SECRET_REFUSED)
    return name
