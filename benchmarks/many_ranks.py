"""What grows with the number of ranks on rank 0: connections, the agreement of a step, the board; see docs/scale.md.

    python -m benchmarks.many_ranks [--ranks 4 8 16 32] [--entries 1024]

The ranks are forks of one process, which has loaded torch once, and meet as those of a run do; they do not train.  The
last line is a round of rank 0's board, once a second, over that many entries.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import RankEnv, draw_master_ports
from cluster.signals import StopFlag
from jobs.board import Board
from jobs.control import Control
from jobs.pace import Pace
from jobs.rendezvous import connect

ROUNDS = 21
TIMEOUT_S = 300.0


def main() -> None:
    """Measure at each number of ranks and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--entries", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_ranks in args.ranks:
        token = f"many.{os.getpid()}.{num_ranks}"
        children = [fork_rank(rank, num_ranks, token) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes
    tell_board(args.entries)


def fork_rank(rank: int, num_ranks: int, token: str) -> int:
    """Start one rank; returns its process id."""
    if child := os.fork():
        return child
    try:
        meet(rank, num_ranks, token)
    finally:
        os._exit(0 if dist.is_initialized() else 1)


def meet(rank: int, num_ranks: int, token: str) -> None:
    """Meet as jobs.session does, agree some times, and say what that took."""
    began_s = time.perf_counter()
    env = RankEnv(rank, rank, num_ranks, num_ranks, 0, 1, "127.0.0.1", draw_master_ports(token), token, False, "single")
    store = connect(env, timeout_s=TIMEOUT_S)
    board = Board(store, rank, num_ranks, say=lambda: entry_of(rank), clock=time.monotonic, prepare=int, obey=int)
    board.start()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
    before = num_sockets()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    control = Control(group, StopFlag())
    control.agree_now()
    met_s, seconds = time.perf_counter() - began_s, []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        control.agree_now()
        seconds.append(time.perf_counter() - began)
    counts: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(counts, {"all": num_sockets(), "group": num_sockets() - before}, group=group)
    if rank == 0:
        print(
            f"{num_ranks} ranks: met in {met_s:.2f} s; sockets of rank 0 {counts[0]['all']}, of another "
            f"{max(count['all'] for count in counts[1:])}, of which a group of gloo's {counts[1]['group']}; "
            f"an agreement that is waited for {statistics.median(seconds) * 1e3:.2f} ms",
            flush=True,
        )
    control.wait_for_all()


def num_sockets() -> int:
    """Sockets of this process."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # of the listing itself
            continue
    return sum(link.startswith("socket:") for link in links)


def entry_of(rank: int) -> dict[str, object]:
    """What a rank tells the board, as the watch says it."""
    return {
        "phase": "training", "step": 123_456, "host": f"gpu-node-{rank // 8:05d}", "own_s": 1234.567890123,
        "pieces": 123_456, "beat": time.monotonic_ns(),
    }  # fmt: skip


def tell_board(num_entries: int) -> None:
    """Print what rank 0's board does each second for that many ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(store, 0, num_entries, say=lambda: entry_of(0), clock=time.monotonic, prepare=int, obey=int)
    pace, rounds_s, pace_s = Pace(), [], []
    for _ in range(ROUNDS):
        for rank in range(1, num_entries):
            store.set(f"watch/entry/{rank}", json.dumps(entry_of(rank)))
        began = time.perf_counter()
        board._tell_and_listen(store)
        rounds_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        pace.look(dict(board.heard), time.monotonic())
        pace_s.append(time.perf_counter() - began)
    size = len(json.dumps(entry_of(1)))
    print(
        f"board of {num_entries:,} ranks: {statistics.median(rounds_s) * 1e3:.1f} ms a second on rank 0, the first "
        f"time {rounds_s[0] * 1e3:.1f} ms; {statistics.median(pace_s) * 1e3:.2f} ms for the pace; {size} bytes each"
    )


if __name__ == "__main__":
    main()
