"""DDP over four real gloo processes with several buckets: the order of sums must not depend on when DDP was made."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from cluster.spec import TrainSpec
from jobs.digest import weights_sha256
from jobs.model import build_model
from jobs.numerics import Numerics
from jobs.optim import Updater
from jobs.parallel import CompilerError, check_compiler, settle_buckets, wrap

WORLD_SIZE = 4
TRAIN = TrainSpec(model="small", device="cpu", bucket_cap_mb=0.05)
CPU = torch.device("cpu")
NUMERICS = Numerics(CPU, "bf16")


class Training:
    """Model, optimizer and DDP of one attempt, made from the weights and momentum of another."""

    def __init__(self, model: nn.Module, momentum: dict[str, Any] | None, *, settled: bool) -> None:
        self.model = copy.deepcopy(model)
        self.updater = Updater(self.model, TRAIN)
        if momentum is not None:
            self.updater.load_state_dict(copy.deepcopy(momentum))
        self.ddp = wrap(self.model, CPU, TRAIN)
        if settled:
            settle_buckets(self.ddp, NUMERICS)

    def steps(self, numbers: range) -> None:
        """Train on batches that are functions of rank and step."""
        for number in numbers:
            torch.manual_seed(1000 * number + dist.get_rank())
            images = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
            with NUMERICS.autocast():
                logits = self.ddp(images)
            logits.float().square().sum().backward()
            self.updater.update(lambda peak: peak)

    def again(self, *, settled: bool) -> "Training":
        """The attempt that resumes this one."""
        return Training(self.model, self.updater.state_dict(), settled=settled)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def run_rank(rank: int, folder: Path) -> None:
    """One of four processes; rank 0 writes down the digests."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)  # other weights on every rank, until DDP makes them rank 0's
    model = NUMERICS.place(build_model("small", 10))
    before = tensors_of(model)
    record: dict[str, Any] = {"untouched": is_untouched(Training(model, None, settled=True).ddp, model)}
    for settled in (True, False):
        straight, first = Training(model, None, settled=settled), Training(model, None, settled=settled)
        straight.steps(range(8))
        first.steps(range(4))
        second = first.again(settled=settled)
        second.steps(range(4, 8))
        digests = [weights_sha256(dict(training.model.named_parameters())) for training in (straight, second)]
        record["settled" if settled else "plain"] = digests
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.save(record, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def is_untouched(ddp: nn.parallel.DistributedDataParallel, model: nn.Module) -> dict[str, bool]:
    """What settle_buckets left of a model, compared with the one that was wrapped."""
    own = dict(model.named_buffers())
    return {
        "buffers": all(torch.equal(buffer, own[name]) for name, buffer in ddp.module.named_buffers()),
        "gradients": all(parameter.grad is None for parameter in ddp.parameters()),
        "training": ddp.training,
    }


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What each of four ranks wrote down."""
    folder = tmp_path_factory.mktemp("parallel")
    spawn(run_rank, args=(folder,), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
    yield [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def test_resumed_run_equals_the_straight_one_bit_for_bit_once_buckets_are_settled(
    records: list[dict[str, Any]],
) -> None:
    digests = {digest for record in records for digest in record["settled"]}
    assert len(digests) == 1


def test_resumed_run_of_plain_ddp_differs_so_that_settling_is_needed(records: list[dict[str, Any]]) -> None:
    straight, resumed = records[0]["plain"]
    assert straight != resumed


def test_settling_leaves_buffers_gradients_and_mode_as_they_were(records: list[dict[str, Any]]) -> None:
    assert [record["untouched"] for record in records] == [{"buffers": True, "gradients": True, "training": True}] * 4


def test_compiled_model_needs_a_compiler_and_says_so_before_anything_is_built(tmp_path: Path) -> None:
    compiled = TRAIN.model_copy(update={"compile": True})
    check_compiler(TRAIN, {"PATH": str(tmp_path)})
    with pytest.raises(CompilerError) as caught:
        check_compiler(compiled, {"PATH": str(tmp_path)})
    assert str(caught.value) == (
        "train.compile needs a C++ compiler, and none of g++, clang++, c++ is in PATH here: load or install one "
        "(setup: in the spec), or set train.compile=false"
    )
    compiler = tmp_path / "nvc++"
    compiler.touch(mode=0o755)
    check_compiler(compiled, {"PATH": str(tmp_path), "CXX": "nvc++"})
