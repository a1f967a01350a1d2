"""One step: how long a run is, and what seeds its random numbers."""

import dataclasses
from typing import Any

import pytest

from cluster.spec import JobSpec
from jobs.step import Length, step_seed
from tests.small_run import make_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return make_spec(tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, (4, 4, 3, 8, 3)),
        ({"max_steps": None}, (4, 4, 3, 9, 3)),
        ({"max_steps": 100}, (4, 4, 3, 9, 3)),
        ({"warmup_epochs": 0.5}, (4, 4, 3, 8, 2)),
        ({"global_batch_size": None, "batch_size_per_rank": 2}, (8, 4, 2, 6, 2)),
        ({"global_batch_size": 10}, (10, 4, 1, 3, 1)),
        ({"global_batch_size": 10, "micro_batch_size": 3}, (10, 4, 1, 3, 1)),
        ({"global_batch_size": 10, "micro_batch_size": 10}, (10, 1, 1, 3, 1)),
    ],
)
def test_length_ends_with_epochs_or_max_steps(
    spec: JobSpec, train: dict[str, Any], expected: tuple[int, int, int, int, int]
) -> None:
    changed = spec.model_copy(update={"train": spec.train.model_copy(update=train)})
    assert dataclasses.astuple(Length.of(changed, num_samples=10, world_size=4)) == expected


@pytest.mark.parametrize(("nodes", "world_size", "expected"), [("2-4", 2, 8), ("2-4", 8, 8), (1, 3, 3)])
def test_run_is_cut_for_the_largest_world_that_it_asks_for(
    spec: JobSpec, nodes: int | str, world_size: int, expected: int
) -> None:
    asked = spec.model_copy(update={"nodes": nodes, "tasks_per_node": 2})
    assert Length.of(asked, num_samples=10, world_size=world_size).micro_batches == expected


def test_step_seed_differs_by_each_of_its_arguments() -> None:
    seeds = [step_seed(0, 0, 0), step_seed(1, 0, 0), step_seed(0, 1, 0), step_seed(0, 0, 1), step_seed(0, 10, 1)]
    seeds += [step_seed(0, 1, 10), step_seed(1, 1, 0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(0, 0, 0) == seeds[0]
