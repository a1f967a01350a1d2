"""Device: spec, rank -> [device] -> where this rank computes, and how reproducibly."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.rank import RankEnv
from cluster.runs import UsageError
from cluster.spec import JobSpec


class DeviceError(UsageError):
    """The spec asks for a device that this rank does not have."""


def choose_device(spec: JobSpec, env: RankEnv, environ: Mapping[str, str], *, num_visible: int) -> torch.device:
    """This rank's device; the CPU only where the spec allows it.

    num_visible: GPUs that CUDA shows this process.
    environ: CUDA_VISIBLE_DEVICES is only quoted in errors; its entries are opaque and never chosen here.

    Raises DeviceError: GPUs were asked for and none can be used.
    """
    train = spec.train
    if train.device == "cpu":
        return torch.device("cpu")
    wants_gpu = train.device == "cuda" or spec.num_gpus_per_node > 0
    if not wants_gpu and num_visible < env.local_world_size:
        return torch.device("cpu")
    if num_visible >= env.local_world_size:  # all GPUs of the node are visible to each of its ranks
        return torch.device("cuda", env.local_rank)
    if num_visible == 1:  # each rank is bound to a GPU of its own, which is number 0 to it
        return torch.device("cuda", 0)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    raise DeviceError(
        f"rank {env.rank} sees {num_visible} GPUs (CUDA_VISIBLE_DEVICES={visible!r}), but its node has "
        f"{env.local_world_size} ranks and the spec asks for GPUs: expected one for each rank; "
        "set train.device=cpu to train without, or ask Slurm for the GPUs"
    )


def use_device(device: torch.device, spec: JobSpec) -> None:
    """Make torch compute on this device with the spec's threads and, if asked, the same bits every time."""
    torch.set_num_threads(spec.train.threads_per_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if spec.train.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = spec.train.tf32  # torch's own default is True, for convolutions alone
    torch.backends.cudnn.benchmark = not spec.train.deterministic  # it chooses by the clock
    if spec.train.deterministic:
        torch.use_deterministic_algorithms(True)
        # Else torch fills all memory that it allocates, for programs that read what they did not write: 2 % of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def memory_mib(device: torch.device) -> float:
    """MiB of the device's memory that this process has used at most; on the CPU, what it holds of the host's now."""
    if device.type == "cuda":
        num_bytes = torch.cuda.max_memory_reserved(device)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # proc(5): resident
        num_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return round(num_bytes / 2**20, 1)


def environment_of(device: torch.device, spec: JobSpec, env: RankEnv) -> dict[str, Any]:
    """What bits depend on besides spec and precision; kept in every manifest and compared at each start."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "world_size": env.world_size,
        "threads_per_rank": spec.train.threads_per_rank,
        "torch": torch.__version__,
        "device": kind,
    }
