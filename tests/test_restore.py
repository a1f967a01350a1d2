"""Resumption: what rank 0 reads, what all ranks get, and runs that change their number of ranks."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cluster.runs import RunError, RunFolder, SupersededError, read_lines
from cluster.signals import StopFlag
from cluster.spec import JobSpec, dump_spec, load_spec
from jobs.control import Control
from jobs.digest import weights_sha256
from jobs.loop import Loop
from tests.small_run import (
    CountingControl,
    claim,
    join_group_at,
    lone_group,
    make_run,
    make_spec,
    metrics_of,
    place,
    start_attempt,
    undisturbed,
)

WORLD_SIZE = 4

group = pytest.fixture(scope="module")(lone_group)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return make_spec(tmp_path_factory.mktemp("restore"), every_steps=2, keep_last=9, bucket_cap_mb=0.05)


@pytest.fixture(scope="module")
def straight(spec: JobSpec, group: dist.ProcessGroup) -> Loop:
    """The run that nothing disturbs, on one rank."""
    return undisturbed(spec, group, "straight")


def resume(spec: JobSpec, run: RunFolder, group: dist.ProcessGroup) -> Loop:
    """The next attempt, before its first step."""
    return start_attempt(spec, run, Control(group, StopFlag()), claim(run))


def finished(loop: Loop) -> dict[str, Any]:
    """Go on to the end; all that must equal the undisturbed run."""
    assert loop.run()
    loop.recorder.stop_beating()
    return {"metrics": metrics_of(loop.recorder.run), "samples": loop.state.samples_sha256, "step": loop.state.step}


def run_rank(rank: int, spec_path: Path, folder: Path) -> None:
    """One of four processes: a straight run, and one whose last rank gets a signal in step 4, resumed."""
    spec = load_spec(spec_path, cwd=folder)
    group = join_group_at(folder / "store", rank, WORLD_SIZE)
    straight = attempt_of_four(spec, "four_straight", 1, Control(group, StopFlag()), rank)
    control = CountingControl(group, stop_at=6 if rank == WORLD_SIZE - 1 else -1)
    stopped = attempt_of_four(spec, "four_stopped", 1, control, rank)
    if rank == 0:
        shutil.copytree(stopped.recorder.run.path, folder / "copy")
    resumed = attempt_of_four(spec, "four_stopped", 2, Control(group, StopFlag()), rank)
    weights = [weights_sha256(dict(loop.learner.model.named_parameters())) for loop in (straight, resumed)]
    record = {"stopped": [stopped.state.step, stopped.stop_signal], "weights": weights}
    torch.save(record, folder / f"rank_{rank}.pt")
    dist.barrier(group=group)
    dist.destroy_process_group()


def attempt_of_four(spec: JobSpec, name: str, attempt: int, control: Control, rank: int) -> Loop:
    """Run one attempt to where it finishes or stops, on every rank."""
    run = RunFolder(spec.run_root / spec.name / name)
    if rank == 0:
        (make_run(spec, name) if attempt == 1 else run).claim_attempt({})
    control.wait_for_all()
    loop = start_attempt(spec, run, control, attempt, place(rank, WORLD_SIZE))
    loop.run()
    control.wait_for_all()
    loop.recorder.stop_beating()
    return loop


@dataclass(frozen=True)
class FourRanks:
    """What four processes left."""

    records: list[dict[str, Any]]
    straight: RunFolder
    resumed: RunFolder
    stopped: RunFolder  # a copy of the run as it was before it was resumed


@pytest.fixture(scope="module")
def four(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> FourRanks:
    folder = tmp_path_factory.mktemp("four")
    (folder / "spec.yaml").write_text(dump_spec(spec))
    spawn(run_rank, args=(folder / "spec.yaml", folder), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
    runs = spec.run_root / spec.name
    records = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    return FourRanks(
        records, RunFolder(runs / "four_straight"), RunFolder(runs / "four_stopped"), RunFolder(folder / "copy")
    )


def test_one_ranks_signal_stops_all_at_the_same_step(four: FourRanks) -> None:
    assert [record["stopped"] for record in four.records] == [[4, "SIGUSR2"]] * WORLD_SIZE


def test_resumed_run_of_four_ranks_equals_the_straight_one_bit_for_bit(four: FourRanks) -> None:
    """The last batch of an epoch has two samples: two of the four ranks have none."""
    assert len({digest for record in four.records for digest in record["weights"]}) == 1
    assert metrics_of(four.resumed) == metrics_of(four.straight)


def test_run_of_four_ranks_goes_on_with_one_and_reads_the_same_samples(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop, four: FourRanks
) -> None:
    loop = resume(spec, four.stopped, group)
    assert loop.state.step == 4
    outcome = finished(loop)
    assert outcome["samples"] == straight.state.samples_sha256
    assert [line["step"] for line in outcome["metrics"]] == list(range(1, 9))
    changes = [event for event in four.stopped.read_events() if event["event"] == "environment_changed"]
    assert [event["world_size"] for event in changes] == [[4, 1]]


def test_damaged_checkpoint_costs_steps_and_nothing_else(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    run = undisturbed(spec, group, "damaged").recorder.run
    for step in (8, 6):
        (run.checkpoints / f"step_{step:08d}.pt").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, logger="run"):
        loop = resume(spec, run, group)
    assert (loop.state.step, len(caplog.messages)) == (4, 2)
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3, 4]
    told = [event for event in run.read_events() if event["event"] in ("checkpoint_quarantined", "resumed")]
    assert [(event.get("name"), event.get("lost_steps")) for event in told] == [
        ("step_00000008.a0002.pt", None),
        ("step_00000006.a0002.pt", None),
        (None, 4),
    ]
    assert finished(loop)["metrics"] == metrics_of(straight.recorder.run)


def test_run_without_a_good_checkpoint_starts_again_and_says_so(
    spec: JobSpec, group: dist.ProcessGroup, straight: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    run = undisturbed(spec, group, "all_bad").recorder.run
    for path in run.checkpoints.glob("*.pt"):
        path.unlink()
    with caplog.at_level(logging.ERROR, logger="run"):
        loop = resume(spec, run, group)
    assert (loop.state.step, caplog.messages) == (0, ["no good checkpoint is left: the run starts again from step 0"])
    assert finished(loop)["metrics"] == metrics_of(straight.recorder.run)


def test_other_global_batch_is_refused(spec: JobSpec, group: dist.ProcessGroup) -> None:
    run = undisturbed(spec, group, "other_batch").recorder.run
    other = spec.model_copy(update={"train": spec.train.model_copy(update={"global_batch_size": 5})})
    with pytest.raises(RunError) as caught:
        resume(other, run, group)
    assert str(caught.value) == (
        "the run was made with a global batch of 4, and this start has 5: start it with as many ranks as before, "
        "or use train.global_batch_size from the beginning"
    )


def test_superseded_attempt_touches_nothing(spec: JobSpec, group: dist.ProcessGroup) -> None:
    run = undisturbed(spec, group, "superseded").recorder.run
    (run.checkpoints / "step_00000009.pt").write_bytes(b"the successor is about to write its manifest")
    late = claim(run)
    claim(run)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(SupersededError):
        start_attempt(spec, run, Control(group, StopFlag()), late)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_momentum_survives(spec: JobSpec, group: dist.ProcessGroup, straight: Loop) -> None:
    run = straight.recorder.run
    loop = resume(spec, run, group)
    buffers = [list(learner.updater.momentum_buffers()) for learner in (straight.learner, loop.learner)]
    assert all(torch.equal(kept, now) for kept, now in zip(*buffers, strict=True))
    loop.recorder.stop_beating()
