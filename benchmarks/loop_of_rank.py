"""The loop as jobs.train wires it, in processes that a benchmark owns, on images of noise."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv
from cluster.runs import RunFolder
from cluster.signals import StopFlag
from cluster.spec import JobSpec, load_spec
from jobs.control import Control
from jobs.data import DataSet
from jobs.deadlines import Deadlines
from jobs.device import use_device
from jobs.failure import Whereabouts
from jobs.loop import Loop
from jobs.session import Session, build
from jobs.watchdog import Watch

NUM_TEST = 16
CPU = torch.device("cpu")


def read_spec_text(text: str, folder: Path) -> JobSpec:
    """A spec that is written into a folder and read from there."""
    path = folder / "spec.yaml"
    path.write_text(text)
    return load_spec(path, cwd=folder)


def join_ranks(rank: int, num_ranks: int, folder: Path) -> None:
    """Make the default group, over gloo; the ranks meet at a file."""
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), num_ranks), rank=rank, world_size=num_ranks)


def noise(num_train: int) -> DataSet:
    """Images of noise in ten classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_train, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels, scale = torch.arange(num_train) % 10, torch.full((3,), 0.5)
    return DataSet(images, labels, images[:NUM_TEST], labels[:NUM_TEST], 10, scale, scale)


def make_loop(spec: JobSpec, run: RunFolder, rank: int, num_ranks: int, *, num_train: int = 4096) -> Loop:
    """One rank's loop, with heartbeat and watch; the ranks have joined."""
    use_device(CPU, spec)
    if rank == 0:
        run.make()
        run.claim_attempt({})
    dist.barrier()
    group, stop = dist.new_group(backend="gloo"), StopFlag()
    assert isinstance(group, dist.ProcessGroup)
    port = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None]
    ports = [port[0].port if port[0] is not None else 0]
    dist.broadcast_object_list(ports, src=0)
    store = port[0] or TCPStore("127.0.0.1", ports[0], is_master=False)
    env = RankEnv(rank, rank, num_ranks, num_ranks, 0, 1, "127.0.0.1", (ports[0],), "bench.1", False, "single")
    watch = Watch(Deadlines.of(spec))
    watch.start(store, spec, env, Whereabouts(attempt=1, maybe_run_dir=run.path, environ={}), stop, {})
    return build(Session(spec, env, noise(num_train), CPU, Control(group, stop), run, 1, watch), {})


def end_loop(loop: Loop) -> None:
    """End its threads, together with the other ranks, and the process group."""
    dist.barrier()
    loop.recorder.stop_beating()
    loop.watch.end()
    dist.barrier()
