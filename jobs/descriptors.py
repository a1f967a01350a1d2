"""Open files: rank -> [descriptors] -> session.  A connection is one, and every rank has some to every other.

gloo connects all ranks of a group with each other, and rank 0 serves the store, to which each rank has two connections.
Most sites leave processes 1,024 open files, and let them ask for more: at about 250 ranks that is needed.
Sources: getrlimit(2); counted by benchmarks/many_ranks.py on torch 2.14.1.
"""

import resource
import socket

from cluster.runs import UsageError

STORE_CONNECTIONS = 2  # of each rank: its own, and its watch's
SPARE = 512  # for libraries, the data set, checkpoints and logs


class DescriptorError(UsageError):
    """A rank may not open as many files as its connections are."""


def num_connections(rank: int, world_size: int, backend: str) -> int:
    """Connections of one rank once all have met.

    backend: nccl or gloo.  Whatever trains, ranks agree to stop over a gloo group of its own.
    """
    groups = 2 if backend == "gloo" else 1
    served = STORE_CONNECTIONS * world_size if rank == 0 else 0
    return groups * world_size + served + STORE_CONNECTIONS


def make_room(rank: int, world_size: int, backend: str) -> None:
    """Raise this process's limit on open files as far as its connections need, before the first of them.

    Raises DescriptorError: it may not be raised so far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections(rank, world_size, backend)
    if is_below(hard, needed):
        raise DescriptorError(
            f"rank {rank} on {socket.gethostname()} has {needed:,} connections in a run of {world_size:,} ranks, and "
            f"may open {hard:,} files: have the hard limit raised (ulimit -Hn; LimitNOFILE= of slurmd), or use fewer "
            "ranks"
        )
    if is_below(soft, needed + SPARE):
        wanted = hard if is_below(hard, needed + SPARE) else needed + SPARE
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_below(limit: int, number: int) -> bool:
    """Whether a limit is lower than a number; it may be none at all."""
    return limit != resource.RLIM_INFINITY and limit < number
