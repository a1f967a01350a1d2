"""Rank derivation as launch scripts do it: expand the host list, list every task, and look the own one up."""

import re
from collections.abc import Iterator, Mapping


def expand(text: str) -> Iterator[str]:
    """Names of a host list; brackets are expanded from left to right, the last one fastest."""
    match = re.match(r"([^\[]*)\[([^\]]+)\](.*)", text)
    if match is None:
        yield text
        return
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield from expand(f"{match[1]}{number:0{len(low)}d}{match[3]}")


def naive_rank(environ: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Rank, local rank, the master's name and the number of ranks of a task of a job step."""
    entries = re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", environ["SLURM_STEP_NODELIST"])
    nodes = [name for entry in entries for name in expand(entry)]
    counts: list[int] = []
    for entry in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        tasks, _, repeats = entry.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(repeats or 1)
    tasks_of_all = [(node, local) for node, count in zip(nodes, counts, strict=True) for local in range(count)]
    rank = int(environ["SLURM_PROCID"])
    return rank, tasks_of_all[rank][1], nodes[0], len(tasks_of_all)
