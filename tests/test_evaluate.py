"""Evaluation over real gloo groups of one, two and three processes."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from jobs.augment import Normalization
from jobs.data import DataSet
from jobs.evaluate import Evaluation, broadcast_buffers, evaluate
from jobs.model import build_model
from jobs.numerics import Numerics

NUM_TEST = 307  # ten micro-batches of 32, the last of 19: 4, 3 and 3 on three ranks
MICRO_BATCH = 32
WORLD_SIZES = (1, 2, 3)


def make_data(num_test: int = NUM_TEST) -> DataSet:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (num_test, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (num_test,), generator=generator)
    return DataSet(images[:1], labels[:1], images, labels, 10, torch.full((3,), 0.5), torch.full((3,), 0.25))


def make_model(rank: int = 0) -> nn.Module:
    """Equal weights everywhere; BatchNorm statistics of the rank's own samples."""
    torch.manual_seed(0)
    model = build_model("small", 10)
    torch.manual_seed(100 + rank)
    for _ in range(3):
        model(torch.randn(16, 3, 32, 32) * 2 + 0.3)
    return model


def always() -> bool:
    return True


def evaluate_here(
    model: nn.Module,
    data: DataSet,
    *,
    rank: int = 0,
    world_size: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    keep_going: Callable[[], bool] = always,
    with_mirrored: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Evaluation | None:
    return evaluate(
        model,
        data,
        rank=rank,
        world_size=world_size,
        numerics=Numerics(torch.device("cpu"), precision),
        keep_going=keep_going,
        with_mirrored=with_mirrored,
        micro_batch=MICRO_BATCH,
        group=group,
    )


class Questions:
    """A keep_going that counts, says no at the given question, and makes all ranks of a group agree."""

    def __init__(self, group: dist.ProcessGroup, no_at: int | None = None) -> None:
        self.group, self.no_at, self.count = group, no_at, 0

    def __call__(self) -> bool:
        self.count += 1
        votes = torch.tensor(int(self.count == self.no_at))
        dist.all_reduce(votes, group=self.group)
        return int(votes) == 0


def run_rank(rank: int, folder: Path) -> None:
    """One of three processes: evaluates in the groups it belongs to and writes down what it got."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    model = make_model(rank)
    broadcast_buffers(model)
    record: dict[str, Any] = {}
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))  # all three make it, members or not
        if isinstance(group, dist.ProcessGroup) and rank < world_size:
            record[str(world_size)] = evaluate_in(group, model, rank, world_size)
    (folder / f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def evaluate_in(group: dist.ProcessGroup, model: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    def ask(questions: Questions, precision: Literal["fp32", "bf16"]) -> Evaluation | None:
        return evaluate_here(
            model,
            make_data(),
            rank=rank,
            world_size=world_size,
            precision=precision,
            keep_going=questions,
            group=group,
        )

    full, stopped = Questions(group), Questions(group, no_at=2)
    fp32, bf16, nothing = ask(full, "fp32"), ask(Questions(group), "bf16"), ask(stopped, "fp32")
    assert fp32 is not None
    assert bf16 is not None
    return {"fp32": asdict(fp32), "bf16": asdict(bf16), "questions": full.count, "stopped": [nothing, stopped.count]}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks wrote down, by world size."""
    folder = tmp_path_factory.mktemp("evaluate")
    spawn(run_rank, args=(folder,), nprocs=3)  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_accuracy_and_loss_are_bit_equal_on_one_two_and_three_ranks(records: list[dict[str, Any]]) -> None:
    alone = records[0]["1"]
    for world_size in WORLD_SIZES:
        for record in records[:world_size]:
            assert record[str(world_size)]["fp32"] == alone["fp32"]
            assert record[str(world_size)]["bf16"] == alone["bf16"]
    assert alone["fp32"]["num_images"] == NUM_TEST


def test_each_rank_asks_equally_often_whether_to_go_on(records: list[dict[str, Any]]) -> None:
    questions = {size: {record[str(size)]["questions"] for record in records[:size]} for size in WORLD_SIZES}
    assert questions == {1: {10}, 2: {5}, 3: {4}}


def test_all_ranks_stop_at_the_question_that_is_answered_no(records: list[dict[str, Any]]) -> None:
    for size in WORLD_SIZES:
        assert [record[str(size)]["stopped"] for record in records[:size]] == [[None, 2]] * size


def test_result_equals_a_plain_loop_over_the_test_set() -> None:
    model, data = make_model().eval(), make_data()
    with torch.no_grad():
        logits = model(Normalization(data.mean, data.std, channels_last=False)(data.test_images))
    result = evaluate_here(model, data)
    assert result is not None
    assert result.accuracy == int((logits.argmax(dim=1) == data.test_labels).sum()) / NUM_TEST
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(logits, data.test_labels)), rel=1e-5)


def test_mode_and_buffers_are_left_as_they_were() -> None:
    model = make_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    evaluate_here(model, make_data(40))
    assert model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert evaluate_here(model.eval(), make_data(40), keep_going=lambda: False) is None
    assert not model.training


def test_rank_without_a_micro_batch_asks_as_often_as_the_others() -> None:
    asked: list[int] = []

    def stop_at_the_second_question() -> bool:
        asked.append(len(asked))
        return len(asked) < 2

    data = make_data(130)  # five micro-batches: 2, 1, 1 and 1
    result = evaluate_here(make_model(), data, rank=3, world_size=4, keep_going=stop_at_the_second_question)
    assert result is None
    assert asked == [0, 1]


def test_mirror_images_are_averaged_with_the_images_where_asked() -> None:
    model, data = make_model(), make_data()
    with torch.no_grad():
        images = Normalization(data.mean, data.std, channels_last=False)(data.test_images)
        logits = (model.eval()(images) + model(images.flip(3))) / 2
    plain, mirrored = evaluate_here(model, data), evaluate_here(model, data, with_mirrored=True)
    assert plain is not None
    assert mirrored is not None
    assert mirrored.accuracy == int((logits.argmax(dim=1) == data.test_labels).sum()) / NUM_TEST
    assert mirrored.loss == pytest.approx(float(nn.functional.cross_entropy(logits, data.test_labels)), rel=1e-5)
    assert mirrored.loss != plain.loss


def test_a_diverged_model_has_loss_nan_and_no_error() -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    result = evaluate_here(model, make_data(40))
    assert result is not None
    assert result.loss != result.loss
