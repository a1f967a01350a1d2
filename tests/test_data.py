"""Which samples a step reads, and what a staged file must be."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.spec import DatasetSpec
from jobs.data import DataError, epoch_order, global_batch_ids, open_staged, share_of, steps_per_epoch
from jobs.stage import stage

STAGE_ANEW = "stage it anew: python -m jobs.stage SPEC --force"


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetSpec:
    spec = DatasetSpec(kind="synthetic", root=tmp_path, num_train=50, num_test=20)
    stage(spec)
    return spec


def problem_of(dataset: DatasetSpec, changes: dict[str, Any]) -> str:
    """The error for a staged file in which some entries are changed, without the path in front."""
    staged = torch.load(dataset.staged_path, weights_only=True)
    torch.save({**staged, **changes}, dataset.staged_path)
    with pytest.raises(DataError) as caught:
        open_staged(dataset)
    return str(caught.value).removeprefix(f"{dataset.staged_path}: ")


@pytest.mark.parametrize("num_samples", [1, 10, 1000])
def test_epoch_order_reads_each_sample_once(num_samples: int) -> None:
    order = epoch_order(3, 1, num_samples)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(num_samples))


def test_epoch_order_is_a_function_of_seed_and_epoch_without_collisions() -> None:
    pairs = [(seed, epoch) for seed in range(5) for epoch in range(5)] + [(11, 1), (1, 11)]
    orders = {tuple(epoch_order(seed, epoch, 100).tolist()) for seed, epoch in pairs}
    assert len(orders) == len(pairs)
    assert torch.equal(epoch_order(4, 2, 100), epoch_order(4, 2, 100))


def test_epoch_order_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(0, 0, 100)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("num_samples", "global_batch", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3])])
def test_last_global_batch_is_short(num_samples: int, global_batch: int, sizes: list[int]) -> None:
    order = epoch_order(0, 0, num_samples)
    num_steps = steps_per_epoch(num_samples, global_batch)
    batches = [global_batch_ids(order, step, global_batch) for step in range(num_steps)]
    assert [len(batch) for batch in batches] == sizes
    assert torch.equal(torch.cat(batches), order)


@pytest.mark.parametrize("step", [-1, 3])
def test_step_outside_the_epoch_is_refused(step: int) -> None:
    with pytest.raises(AssertionError):
        global_batch_ids(torch.arange(10), step, 4)


@pytest.mark.parametrize(
    ("num_ids", "world_size", "sizes"), [(10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (2, 4, [1, 1, 0, 0]), (5, 1, [5])]
)
def test_shares_are_contiguous_and_the_larger_come_first(num_ids: int, world_size: int, sizes: list[int]) -> None:
    ids = torch.arange(100, 100 + num_ids)
    shares = [share_of(ids, rank, world_size) for rank in range(world_size)]
    assert [len(share) for share in shares] == sizes
    assert torch.equal(torch.cat(shares), ids)


def test_staged_data_set_opens_with_its_shapes_and_types(dataset: DatasetSpec) -> None:
    data = open_staged(dataset)
    tensors = (data.train_images, data.train_labels, data.test_images, data.test_labels, data.mean, data.std)
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == [
        (torch.uint8, (50, 3, 32, 32)),
        (torch.int64, (50,)),
        (torch.uint8, (20, 3, 32, 32)),
        (torch.int64, (20,)),
        (torch.float32, (3,)),
        (torch.float32, (3,)),
    ]
    assert data.num_classes == 10


def test_missing_file_says_how_to_stage(tmp_path: Path) -> None:
    dataset = DatasetSpec(kind="cifar10", root=tmp_path)
    with pytest.raises(DataError) as caught:
        open_staged(dataset)
    assert str(caught.value) == f"{dataset.staged_path} does not exist: stage it first: python -m jobs.stage SPEC"


@pytest.mark.parametrize("kept_bytes", [0, 1, 1000, -1])
def test_truncated_file_is_an_error_that_says_what_to_do(dataset: DatasetSpec, kept_bytes: int) -> None:
    path = dataset.staged_path
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DataError) as caught:
        open_staged(dataset)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be read as a staged data set (")
    assert message.endswith(f"): {STAGE_ANEW}")
    assert "\n" not in message


def test_file_that_is_no_dict_is_refused(dataset: DatasetSpec) -> None:
    torch.save([1], dataset.staged_path)
    with pytest.raises(DataError) as caught:
        open_staged(dataset)
    assert str(caught.value) == f"{dataset.staged_path} holds a list, not a staged data set: {STAGE_ANEW}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format_version": 2}, "format_version is 2, this code reads 1"),
        ({"kind": "cifar10"}, "it holds 'cifar10', the spec says 'synthetic'"),
        ({"classes": []}, "classes is [], expected a list of names"),
        (
            {"train_images": torch.zeros(50, 3, 28, 28, dtype=torch.uint8)},
            "train_images is uint8 (50, 3, 28, 28), expected uint8 (N, 3, 32, 32)",
        ),
        ({"test_images": None}, "test_images is a NoneType, expected uint8 (N, 3, 32, 32)"),
        ({"train_labels": torch.zeros(49, dtype=torch.int64)}, "train_labels is int64 (49,), expected int64 (50,)"),
        ({"test_labels": torch.full((20,), 10)}, "test_labels span 10 to 10, expected 0 to 9"),
        ({"mean": torch.zeros(3, dtype=torch.float64)}, "mean is float64 (3,), expected float32 (3,)"),
        ({"std": torch.zeros(3)}, "std is [0.0, 0.0, 0.0], expected positive numbers"),
    ],
)
def test_odd_content_is_named(dataset: DatasetSpec, changes: dict[str, Any], problem: str) -> None:
    assert problem_of(dataset, changes) == f"{problem}: {STAGE_ANEW}"


def test_synthetic_of_other_sizes_is_refused(dataset: DatasetSpec) -> None:
    images, labels = torch.zeros(51, 3, 32, 32, dtype=torch.uint8), torch.zeros(51, dtype=torch.int64)
    problem = problem_of(dataset, {"train_images": images, "train_labels": labels})
    assert problem == f"it holds 51 train images, the spec says 50: {STAGE_ANEW}"


def test_unpublished_mirror_opens_only_while_the_spec_accepts_it(dataset: DatasetSpec) -> None:
    staged = torch.load(dataset.staged_path, weights_only=True)
    refused = DatasetSpec(kind="cifar10", root=dataset.root)
    accepted = DatasetSpec(kind="cifar10", root=dataset.root, accept_unpublished_md5=True)
    torch.save({**staged, "kind": "cifar10"}, refused.staged_path)
    assert len(open_staged(accepted).train_labels) == 50
    problem = "it lacks the published MD5 sums; set dataset.accept_unpublished_md5: true to use it, or"
    assert problem_of(refused, {}) == f"{problem}: {STAGE_ANEW}"
