"""Agreement over real gloo groups of two and three processes."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cluster.signals import StopFlag
from jobs.control import Control, Tally

NUM_RANKS = 3
WORLD_SIZES = (2, 3)


def run_rank(rank: int, folder: Path) -> None:
    """One of three processes: agrees in the groups that it belongs to and writes down what it learnt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    record: dict[str, Any] = {}
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)), backend="gloo")  # all three make it, members or not
        if isinstance(group, dist.ProcessGroup) and rank < world_size:
            record[str(world_size)] = agree(group, rank, world_size)
    (folder / f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def agree(group: dist.ProcessGroup, rank: int, world_size: int) -> dict[str, Any]:
    """What one rank learns."""
    stop = StopFlag()
    stop.install()
    control = Control(group, stop)
    learnt = {"nothing posted": dataclasses.asdict(control.take())}
    learnt["loss"] = dataclasses.asdict(exchange(control, loss_sum=0.1 * (rank + 1)))
    learnt["save"] = dataclasses.asdict(exchange(control, save=rank == 0))
    learnt["give up"] = dataclasses.asdict(exchange(control, give_up=rank == 0))
    tensor = torch.full((3,), float(rank), dtype=torch.bfloat16)
    control.broadcast_tensor(tensor)
    told = {"from": "rank 0"} if rank == 0 else None
    boundaries = stops_of(control, rank, signalled=world_size - 1)
    return {**learnt, "object": control.broadcast_object(told), "tensor": tensor.tolist(), "stops": boundaries}


def exchange(control: Control, *, save: bool = False, give_up: bool = False, loss_sum: float = 0.0) -> Tally:
    control.post(save=save, give_up=give_up, loss_sum=loss_sum)
    return control.take()


def stops_of(control: Control, rank: int, signalled: int) -> list[str]:
    """What six boundaries say of a stop; the last rank gets TERM before the third, and USR2 before the fifth."""
    stops = []
    for boundary in range(6):
        stops.append(control.take().stop_signal)
        if rank == signalled and boundary in (2, 4):
            os.kill(os.getpid(), signal.SIGTERM if boundary == 2 else signal.SIGUSR2)
        control.post()
    stops.append(control.take().stop_signal)
    return stops


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks wrote down, by world size."""
    folder = tmp_path_factory.mktemp("control")
    spawn(run_rank, args=(folder,), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def learnt_by_all(records: list[dict[str, Any]], world_size: int, what: str) -> list[Any]:
    return [record[str(world_size)][what] for record in records[:world_size]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_ranks_signal_is_learnt_by_all_at_the_same_boundary(records: list[dict[str, Any]], world_size: int) -> None:
    stops = ["", "", "", "SIGTERM", "SIGTERM", "SIGUSR2", "SIGUSR2"]
    assert learnt_by_all(records, world_size, "stops") == [stops] * world_size


@pytest.mark.parametrize(("world_size", "loss_sum"), [(2, 0.1 + 0.2), (3, 0.6)])
def test_losses_are_summed_over_ranks(records: list[dict[str, Any]], world_size: int, loss_sum: float) -> None:
    tallies = learnt_by_all(records, world_size, "loss")
    assert tallies == [tallies[0]] * world_size
    assert tallies[0] == {
        "stop_signal": "",
        "save": False,
        "give_up": False,
        "loss_sum": pytest.approx(loss_sum, rel=1e-15),
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_0s_clock_makes_all_ranks_save(records: list[dict[str, Any]], world_size: int) -> None:
    expected = {"stop_signal": "", "save": True, "give_up": False, "loss_sum": 0.0}
    assert learnt_by_all(records, world_size, "save") == [expected] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_0_that_can_save_no_more_ends_all(records: list[dict[str, Any]], world_size: int) -> None:
    expected = {"stop_signal": "", "save": False, "give_up": True, "loss_sum": 0.0}
    assert learnt_by_all(records, world_size, "give up") == [expected] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_is_learnt_where_nothing_was_posted(records: list[dict[str, Any]], world_size: int) -> None:
    expected = dataclasses.asdict(Tally())
    assert learnt_by_all(records, world_size, "nothing posted") == [expected] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_0s_values_are_given_to_all(records: list[dict[str, Any]], world_size: int) -> None:
    assert learnt_by_all(records, world_size, "object") == [{"from": "rank 0"}] * world_size
    assert learnt_by_all(records, world_size, "tensor") == [[0.0, 0.0, 0.0]] * world_size
