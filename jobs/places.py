"""Places: rank, device -> [places] -> a table of all ranks on rank 0, and an error where two of them share a GPU.

Told through the store, before the first collective: with two ranks on one GPU NCCL fails in words of its own, or hangs.
Sources: torch.cuda.get_device_properties, torch 2.6 to 2.14; CUDA, "CUDA_VISIBLE_DEVICES".
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv
from cluster.spec import JobSpec
from jobs.device import DeviceError
from jobs.numerics import has_bf16_units

log = logging.getLogger("run")

PLACE_KEY, ANSWER_KEY, READERS_KEY = "place", "places", "places/read"
READ_S = 5.0  # for all ranks to read the answer
HEAD = ("rank", "host", "local rank", "device", "GPU")
FITS, FITS_BF16 = "fits", "fits, and all have bf16"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank computes."""

    rank: int
    host: str
    local_rank: int
    device: str  # as torch names it: cuda:1, cpu
    gpu: str  # its UUID; of a slice of a GPU (MIG) the slice's; empty on the CPU
    num_visible: int  # GPUs that the rank sees
    num_cpus: int  # CPUs that the rank may use
    has_bf16: bool = False  # units for bf16


def own_place(env: RankEnv, device: torch.device, environ: Mapping[str, str], *, num_visible: int) -> Place:
    """This rank's place."""
    uuid = ""
    if device.type == "cuda":
        uuid = gpu_name(
            str(torch.cuda.get_device_properties(device).uuid),
            device.index or 0,
            environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
    num_cpus = len(os.sched_getaffinity(0))
    has_bf16 = has_bf16_units(device, Path("/proc/cpuinfo").read_text())
    return Place(env.rank, socket.gethostname(), env.local_rank, str(device), uuid, num_visible, num_cpus, has_bf16)


def gpu_name(uuid: str, index: int, visible: str) -> str:
    """What tells a GPU from all others; entries of CUDA_VISIBLE_DEVICES are compared as text and never as numbers.

    uuid: torch's, which for a slice of a GPU may be the whole GPU's.  index: the device's, among those visible.
    """
    entries = [entry.strip() for entry in visible.split(",")]
    if index < len(entries) and entries[index].startswith("MIG-"):
        return entries[index]
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def meet(place: Place, spec: JobSpec, env: RankEnv, store: Store, *, timeout_s: float) -> bool:
    """Tell rank 0 where this rank is; rank 0 says it in its log, and all leave where two ranks share a GPU.

    timeout_s: for all ranks to come.
    Returns whether all ranks have units for bf16.

    Raises DeviceError: two ranks have the same GPU.
    """
    store.set(f"{PLACE_KEY}/{env.rank}", json.dumps(asdict(place)))
    if env.rank == 0:
        keys = [f"{PLACE_KEY}/{rank}" for rank in range(env.world_size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        places = [Place(**json.loads(text)) for text in store.multi_get(keys)]
        store.set(ANSWER_KEY, maybe_shared(places) or (FITS_BF16 if all(place.has_bf16 for place in places) else FITS))
        for line in table(places):
            log.info("%s", line)
        for line in warnings(places, spec):
            log.warning("%s", line)
    store.wait([ANSWER_KEY], timedelta(seconds=timeout_s))
    answer = store.get(ANSWER_KEY).decode()
    if answer not in (FITS, FITS_BF16):
        wait_for_readers(store, env)
        raise DeviceError(answer)
    return answer == FITS_BF16


def wait_for_readers(store: Store, env: RankEnv) -> None:
    """Let all ranks read the answer before rank 0, which serves the store, leaves."""
    num_read, end_s = store.add(READERS_KEY, 1), time.monotonic() + READ_S
    while env.rank == 0 and num_read < env.world_size and time.monotonic() < end_s:
        time.sleep(0.05)
        num_read = store.add(READERS_KEY, 0)


def table(places: Sequence[Place]) -> Iterator[str]:
    """One line for each rank, in columns, under a head."""
    rows = [HEAD, *((str(p.rank), p.host, str(p.local_rank), p.device, p.gpu or "-") for p in places)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def maybe_shared(places: Iterable[Place]) -> str:
    """Which ranks share a GPU, in words; empty when none do."""
    ranks: dict[str, list[Place]] = {}
    for place in places:
        if place.gpu:
            ranks.setdefault(place.gpu, []).append(place)
    shared = [
        f"ranks {', '.join(str(p.rank) for p in on)} on {on[0].host} ({gpu})" for gpu, on in ranks.items() if on[1:]
    ]
    if not shared:
        return ""
    return (
        f"one GPU for several ranks: {'; '.join(shared)}; see the table in rank 0's log: ask for one GPU per rank "
        "(gpus_per_node), and leave CUDA_VISIBLE_DEVICES to Slurm"
    )


def warnings(places: Sequence[Place], spec: JobSpec) -> Iterator[str]:
    """What is not as it should be, and still works."""
    num_ranks: dict[str, int] = {}
    for place in places:
        num_ranks[place.host] = num_ranks.get(place.host, 0) + 1
    first = next((p for p in places if p.gpu and p.num_visible == 1 and num_ranks[p.host] > 1), None)
    if first is not None:
        yield (
            f"each rank on {first.host} sees a single GPU, so NCCL cannot use the direct way between them: use "
            "gpus_per_node alone, without gpus-per-task and gpu-bind"
        )
    idle = next((p for p in places if p.gpu and p.num_visible > num_ranks[p.host]), None)
    if idle is not None:
        yield f"{idle.host} has {idle.num_visible} GPUs and fewer ranks ({num_ranks[idle.host]}): the others stay idle"
    short = [p for p in places if p.num_cpus < (spec.cpus_per_task or 1)]
    if short:
        yield (
            f"rank {short[0].rank} on {short[0].host} may use {short[0].num_cpus} CPUs, and cpus_per_task is "
            f"{spec.cpus_per_task}"
        )
