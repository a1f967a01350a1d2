"""A run that comes back on other worlds: 4, then 2, then 3 ranks, against the one that had 4 all the time.

Same batches in the same order, and BatchNorm sees the same samples together; only the order of sums differs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cluster.runs import RunFolder, read_lines
from cluster.signals import StopFlag
from cluster.spec import JobSpec, load_spec
from jobs.control import Control
from jobs.data import epoch_order, global_batch_ids, open_staged, steps_per_epoch
from jobs.digest import NO_SAMPLES, next_samples_digest
from jobs.session import Session, build
from tests.small_run import claim, join_group_at, make_run, place
from tests.training import SPEC

pytestmark = pytest.mark.long  # 200 steps twice

NUM_STEPS = 200
LAST_STEPS = {4: 70, 2: 140, 3: NUM_STEPS}  # where each world of the run that changes ends
TOLERANCE = 1e-3  # of the loss, relative; set before it was measured


def make_elastic_spec(folder: Path, data: Path, runs: Path) -> JobSpec:
    """Two to four nodes, epochs of 11 steps with a short last batch."""
    text = SPEC.format(where="nodes: 2-4\ntime_limit: 10", data=data, runs=runs)
    path = folder / "elastic.yaml"
    path.write_text(text)
    return load_spec(
        path,
        ["train.epochs=100", "train.eval_every_epochs=100", f"train.max_steps={NUM_STEPS}", "train.precision=fp32"],
        cwd=folder,
    )


def train_rank(rank: int, world_size: int, run_dir: Path, data: Path, last_step: int, attempt: int) -> None:
    """One rank of one attempt, from the newest checkpoint to a step."""
    spec = make_elastic_spec(run_dir, data, run_dir)
    group = join_group_at(run_dir / f"store_{attempt}", rank, world_size)
    control = Control(group, StopFlag())
    staged = open_staged(spec.dataset)
    run = RunFolder(run_dir)
    session = Session(spec, place(rank, world_size), staged, torch.device("cpu"), control, run, attempt)
    loop = build(session, {"SLURM_JOB_ID": "7"})
    while loop.state.step < last_step:
        loop.step()
    loop.settle()
    if loop.state.pending_line:
        loop.evaluate()
    loop.save()
    loop.saver.finish()
    loop.recorder.stop_beating()
    if rank == 0:
        state = loop.state.as_dict() | {"micro_batches": loop.length.micro_batches}
        (run_dir / f"state_{attempt}.json").write_text(json.dumps(state))
    dist.barrier()
    dist.destroy_process_group()


def train(folder: Path, data: Path, name: str, worlds: Sequence[tuple[int, int]]) -> tuple[RunFolder, dict[str, Any]]:
    """A run on one world after another, (ranks, last step) each; returns it and its last state."""
    run = make_run(make_elastic_spec(folder, data, folder), name)
    for world_size, last_step in worlds:
        attempt = claim(run)
        spawn(train_rank, args=(world_size, run.path, data, last_step, attempt), nprocs=world_size)  # type: ignore[no-untyped-call]
    return run, json.loads((run.path / f"state_{attempt}.json").read_text())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, staged_data: Path) -> tuple[RunFolder, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("straight"), staged_data, "straight", [(4, NUM_STEPS)])


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory, staged_data: Path) -> tuple[RunFolder, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("changing"), staged_data, "changing", list(LAST_STEPS.items()))


def losses_of(run: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run.metrics)}


def test_all_worlds_train_on_the_same_samples_each_epoch_exactly_once(
    straight: tuple[RunFolder, dict[str, Any]], changing: tuple[RunFolder, dict[str, Any]], staged_data: Path
) -> None:
    spec = make_elastic_spec(straight[0].path, staged_data, straight[0].path)
    num_samples = len(open_staged(spec.dataset).train_labels)
    digest, num_steps = NO_SAMPLES, 0
    per_epoch = steps_per_epoch(num_samples, 60)
    while num_steps < NUM_STEPS:
        order = epoch_order(spec.train.seed, num_steps // per_epoch, num_samples)
        assert sorted(order.tolist()) == list(range(num_samples))
        for step in range(min(per_epoch, NUM_STEPS - num_steps)):
            digest = next_samples_digest(digest, global_batch_ids(order, step, 60))
            num_steps += 1
    assert changing[1]["samples_sha256"] == straight[1]["samples_sha256"] == digest.hex()


def test_loss_of_every_step_stays_within_a_thousandth(
    straight: tuple[RunFolder, dict[str, Any]], changing: tuple[RunFolder, dict[str, Any]]
) -> None:
    expected, found = losses_of(straight[0]), losses_of(changing[0])
    assert list(found) == list(expected) == list(range(1, NUM_STEPS + 1))
    worst = max(abs(found[step] - expected[step]) / expected[step] for step in expected)
    print(f"\nlargest relative difference of the loss over {NUM_STEPS} steps: {worst:.2e}")
    assert worst < TOLERANCE


def test_run_keeps_its_micro_batches_and_is_no_longer_called_bit_exact(
    straight: tuple[RunFolder, dict[str, Any]], changing: tuple[RunFolder, dict[str, Any]]
) -> None:
    assert (straight[1]["micro_batches"], changing[1]["micro_batches"]) == (4, 4)
    changed = [event["world_size"] for event in changing[0].read_events() if event["event"] == "environment_changed"]
    assert changed == [[4, 2], [2, 3]]
