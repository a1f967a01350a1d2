"""Where all ranks compute: told through a real store by several processes' worth of threads; the GPUs are made up."""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.spec import DatasetSpec, JobSpec
from jobs.device import DeviceError
from jobs.numerics import has_bf16_units
from jobs.places import Place, gpu_name, maybe_shared, meet, own_place, table, warnings
from tests.small_run import place as rank_env

SPEC = JobSpec(name="places", time_limit="60", run_root=Path("/runs"), dataset=DatasetSpec(root=Path("/data")))
A, B = "GPU-ffc79498-8ff3-c2dc-3b0d-fafd804516ae", "GPU-11111111-8ff3-c2dc-3b0d-fafd804516ae"
FOUR = (
    Place(0, "n1", 0, "cuda:0", "GPU-a", 2, 4),
    Place(1, "n1", 1, "cuda:1", "GPU-b", 2, 4),
    Place(2, "node-12", 0, "cuda:0", "GPU-c", 2, 4),
    Place(3, "node-12", 1, "cuda:1", "GPU-d", 2, 4),
)
SHARED = (
    "one GPU for several ranks: ranks 2, 3 on node-12 (GPU-c); see the table in rank 0's log: ask for one GPU per rank "
    "(gpus_per_node), and leave CUDA_VISIBLE_DEVICES to Slurm"
)


def test_table_has_a_line_for_each_rank() -> None:
    assert list(table(FOUR)) == [
        "rank  host     local rank  device  GPU",
        "0     n1       0           cuda:0  GPU-a",
        "1     n1       1           cuda:1  GPU-b",
        "2     node-12  0           cuda:0  GPU-c",
        "3     node-12  1           cuda:1  GPU-d",
    ]
    assert list(table([Place(0, "n1", 0, "cpu", "", 0, 1)]))[1] == "0     n1    0           cpu     -"


def test_two_ranks_on_one_gpu_are_named() -> None:
    assert maybe_shared(FOUR) == ""
    assert maybe_shared([*FOUR[:3], replace(FOUR[3], device="cuda:0", gpu="GPU-c")]) == SHARED
    assert maybe_shared([replace(place, gpu="", device="cpu") for place in FOUR]) == ""


@pytest.mark.parametrize(
    ("uuid", "index", "visible", "name"),
    [
        (A, 0, "0,1", A),
        (A.removeprefix("GPU-"), 1, "0,1", A),  # as torch prints it
        (A, 1, f"{B},{A}", A),
        (A, 0, "", A),
        (A, 0, "MIG-3fd1", "MIG-3fd1"),
        (A, 1, "MIG-3fd1, MIG-77aa", "MIG-77aa"),
        (A, 0, f"MIG-{A}/1/0", f"MIG-{A}/1/0"),
    ],
)
def test_slices_of_one_gpu_are_told_apart_by_their_entries(uuid: str, index: int, visible: str, name: str) -> None:
    """torch may give both slices the UUID of the whole GPU."""
    assert gpu_name(uuid, index, visible) == name


def test_place_on_the_cpu_is_this_process() -> None:
    place = own_place(rank_env(1, 2), torch.device("cpu"), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, num_visible=0)
    assert place == Place(
        1,
        socket.gethostname(),
        1,
        "cpu",
        "",
        0,
        len(os.sched_getaffinity(0)),
        has_bf16_units(torch.device("cpu"), Path("/proc/cpuinfo").read_text()),
    )


def test_place_on_a_gpu_has_the_uuid_that_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here: torch's answer is that of an A100, torch 2.9."""
    told = {torch.device("cuda", 1): SimpleNamespace(uuid="ffc79498-8ff3-c2dc-3b0d-fafd804516ae")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", told.__getitem__)
    place = own_place(rank_env(1, 2), torch.device("cuda", 1), {"CUDA_VISIBLE_DEVICES": "4,7"}, num_visible=2)
    assert (place.device, place.gpu, place.num_visible) == ("cuda:1", A, 2)


def test_single_visible_gpu_and_idle_ones_and_missing_cpus_are_warned_of() -> None:
    spec = SPEC.model_copy(update={"cpus_per_task": 8})
    assert list(warnings(FOUR, SPEC)) == []
    assert list(warnings([replace(place, num_visible=1) for place in FOUR], SPEC)) == [
        "each rank on n1 sees a single GPU, so NCCL cannot use the direct way between them: use gpus_per_node alone, "
        "without gpus-per-task and gpu-bind"
    ]
    assert list(warnings([replace(FOUR[0], num_visible=1)], SPEC)) == []
    assert list(warnings([FOUR[0], FOUR[2]], SPEC)) == ["n1 has 2 GPUs and fewer ranks (1): the others stay idle"]
    assert list(warnings(FOUR, spec)) == ["rank 0 on n1 may use 4 CPUs, and cpus_per_task is 8"]


def meet_all(places: Sequence[Place]) -> list[str]:
    """All ranks meet at a real store, each with a connection of its own; returns what each one raised."""
    world_size, raised = len(places), [""] * len(places)
    timeout = timedelta(seconds=60)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)

    def attend(place: Place) -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout, wait_for_workers=False)
        try:
            meet(place, SPEC, rank_env(place.rank, world_size), store, timeout_s=60.0)
        except DeviceError as error:
            raised[place.rank] = str(error)

    threads = [threading.Thread(target=attend, args=(place,)) for place in reversed(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def test_ranks_tell_rank_0_where_they_are_and_go_on(log: pytest.LogCaptureFixture) -> None:
    assert meet_all(FOUR) == ["", "", "", ""]
    assert log.messages == list(table(FOUR))


def test_two_ranks_on_one_gpu_end_all_of_them_with_the_table_printed(log: pytest.LogCaptureFixture) -> None:
    places = [*FOUR[:3], replace(FOUR[3], device="cuda:0", gpu="GPU-c")]
    assert meet_all(places) == [SHARED] * 4
    assert log.messages == list(table(places))
