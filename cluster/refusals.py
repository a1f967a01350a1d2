"""sbatch's refusals: its words, the flags it was given -> [refusals] -> submit.  Which keys of the spec to look at.

Standard library only.  Words of Slurm 22.05 and 24.11.
"""

import re
from collections.abc import Iterator, Mapping

from cluster.spec_names import KEY_OF_FLAG

# What sbatch says -> its flags that it may be about.
FLAGS_OF_WORDS = (
    (r"Invalid account or account/partition combination", ("account", "partition")),
    (r"[Ii]nvalid partition|partition not available|default partition", ("partition",)),
    (r"Invalid qos", ("qos", "account")),
    (r"accounting/QOS policy", ("qos", "account", "nodes", "time", "gpus-per-node", "mem")),
    (r"Invalid node name", ("nodelist", "exclude")),
    (r"Invalid feature", ("constraint",)),
    (r"reservation", ("reservation",)),
    (r"time limit is invalid|Invalid --time", ("time", "partition")),
    (r"generic resource", ("gres", "gpus-per-node")),
    (r"Memory specification", ("mem", "mem-per-cpu", "mem-per-gpu")),
    (r"Node count specification", ("nodes", "partition")),
    (r"More processors requested", ("ntasks-per-node", "cpus-per-task")),
    (r"node configuration is not available", ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem")),
    (r"Invalid license", ("licenses",)),
    (r"dependency", ("dependency",)),
)


def keys_to_look_at(words: str, flags: Mapping[str, object]) -> str:
    """The spec's keys that a refusal may be about, with what sbatch was given for them; empty when none is known."""
    named = dict.fromkeys([*_flags_of(words), *re.findall(r"Invalid --([a-z-]+)", words)])
    return ", ".join(f"{KEY_OF_FLAG.get(flag, f'sbatch.{flag}')}: {flags[flag]}" for flag in named if flag in flags)


def _flags_of(words: str) -> Iterator[str]:
    for pattern, flags in FLAGS_OF_WORDS:
        if re.search(pattern, words):
            yield from flags
