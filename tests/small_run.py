"""A run small enough to be repeated for every step of it: three steps an epoch, the last one short."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv
from cluster.runs import MEASURED, RunFolder, read_lines
from cluster.signals import STOP_SIGNALS, StopFlag
from cluster.spec import CheckpointSpec, DatasetSpec, JobSpec, TrainSpec, dump_spec
from jobs.control import Control
from jobs.data import DataSet
from jobs.loop import Loop
from jobs.session import Session, build

GLOBAL_BATCH = 4
NUM_TRAIN = 10


def make_spec(folder: Path, *, every_steps: int | None = None, keep_last: int = 2, **train: Any) -> JobSpec:  # noqa: ANN401
    """Two epochs and two steps of a third."""
    settings: dict[str, Any] = {"epochs": 3, "max_steps": 8, "eval_every_epochs": 2, "log_every_steps": 1}
    return JobSpec(
        name="small",
        cluster="local",
        run_root=folder / "runs",
        train=TrainSpec(model="small", global_batch_size=GLOBAL_BATCH, device="cpu", **(settings | train)),
        dataset=DatasetSpec(kind="synthetic", root=folder / "data"),
        checkpoint=CheckpointSpec(every_steps=every_steps, every_minutes=60.0, keep_last=keep_last),
    )


def make_data() -> DataSet:
    """Noise in three classes."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (NUM_TRAIN + 6, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(3, (NUM_TRAIN + 6,), generator=generator)
    scale = torch.full((3,), 0.5)
    return DataSet(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:], 3, scale, scale)


def make_run(spec: JobSpec, name: str = "run") -> RunFolder:
    """A run folder as submit leaves it."""
    run = RunFolder(spec.run_root / spec.name / name)
    run.make()
    run.spec.write_text(dump_spec(spec))
    run.append_event("submitted", attempt=0, job_id="7")
    return run


def place(rank: int, world_size: int) -> RankEnv:
    """One of the ranks on this machine."""
    return RankEnv(rank, rank, world_size, world_size, 0, 1, "127.0.0.1", (23111,), "small.1", False, "single")


def join_group(store: Store, rank: int = 0, world_size: int = 1) -> dist.ProcessGroup:
    """The default group for gradients; returns the group of the agreement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def lone_group() -> Iterator[dist.ProcessGroup]:
    """A fixture: the groups of a world of one."""
    yield join_group(HashStore())
    dist.destroy_process_group()


def join_group_at(path: Path, rank: int, world_size: int) -> dist.ProcessGroup:
    """The groups of several processes, which meet at a file."""
    return join_group(FileStore(str(path), world_size), rank, world_size)


def start_attempt(
    spec: JobSpec, run: RunFolder, control: Control, attempt: int, env: RankEnv | None = None, *, has_bf16: bool = True
) -> Loop:
    """One start of the ranks, ready for its first step.  attempt: claimed already.  has_bf16: as all ranks have."""
    device = torch.device("cpu")
    session = Session(spec, env or place(0, 1), make_data(), device, control, run, attempt, all_have_bf16=has_bf16)
    return build(session, {"SLURM_JOB_ID": "7"})


class Killed(BaseException):
    """The process is gone at this place."""


class CountingControl(Control):
    """Gets a signal, or kills its process, when it posts for the nth time, counted from 0."""

    def __init__(self, group: dist.ProcessGroup, *, stop_at: int = -1, kill_at: int = -1) -> None:
        self.stop = StopFlag()
        super().__init__(group, self.stop)
        self.num_posts, self.stop_at, self.kill_at = 0, stop_at, kill_at

    def post(self, *, save: bool = False, give_up: bool = False, loss_sum: float = 0.0) -> None:
        if self.num_posts == self.kill_at:
            raise Killed
        if self.num_posts == self.stop_at:
            self.stop.first_s[STOP_SIGNALS[0]] = 0.0
        self.num_posts += 1
        super().post(save=save, give_up=give_up, loss_sum=loss_sum)


def claim(run: RunFolder) -> int:
    """The next attempt, announced as the supervisor does it."""
    attempt = run.claim_attempt({"pid": 1, "host": "here"})
    run.append_event("attempt_started", attempt=attempt, job_id="7", world_size=1)
    return attempt


def undisturbed(spec: JobSpec, group: dist.ProcessGroup, name: str = "run") -> Loop:
    """A run that nobody stops, at its end."""
    run = make_run(spec, name)
    loop = start_attempt(spec, run, Control(group, StopFlag()), claim(run))
    assert loop.run()
    loop.recorder.stop_beating()
    return loop


def metrics_of(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl but for what differs between equal runs."""
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in read_lines(run.metrics)]
