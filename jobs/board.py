"""Board: one rank's place -> [board] -> the store, where rank 0 reads where all are; and back: the order to leave.

A thread with a connection of its own: a call that blocks on the ranks' shared one would block it.  When the store's
process is stopped its own calls block as well, which must not stop the thread that looks at the clock.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from jobs.stacks import Stacks, own_stacks

POLL_S = 1.0
ANSWER_S = 5.0  # how long rank 0 waits for the others' stacks
LAST_S = 0.5
LEAVE_S = 30.0  # how long the others wait until rank 0 has written them

ENTRY, STACKS, ASKED, LEAVE = "watch/entry", "watch/stacks", "watch/asked", "watch/leave"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a rank said last, and when that was by this rank's clock."""

    said: Mapping[str, Any]
    at_s: float


class Board(threading.Thread):
    """One rank's end; its calls may block for ever, the caller's never do."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        say: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float],
        prepare: Callable[[], object],
        obey: Callable[[], object],
    ) -> None:
        """Nothing is said before start().

        say: where this rank is; each answer differs from the last.  clock: seconds, for Heard.at_s.
        prepare: called when rank 0 has asked for stacks.  obey: called once this rank has to leave.
        """
        super().__init__(name="board", daemon=True)
        self.heard: dict[int, Heard] = {}  # on rank 0 of all ranks, elsewhere of rank 0
        self._store, self._rank, self._world_size = store, rank, world_size
        self._say, self._clock, self._prepare, self._obey = say, clock, prepare, obey
        self._reason = ""  # why rank 0 asks for stacks
        self._stacks: dict[int, Stacks] = {}
        self._answered, self._leave, self._told = threading.Event(), threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._is_over = False

    def run(self) -> None:
        """Tell and listen once a second, until the store is gone: then its process is, and the loop notices itself."""
        with contextlib.suppress(RuntimeError):  # torch's DistError
            store = own_connection(self._store)
            while not self._is_over:
                self._tell_and_listen(store)
                if self._rank == 0:
                    self._serve(store)
                elif store.check([ASKED]):
                    self._answer(store)
                    return
                self._wake.wait(POLL_S)
                self._wake.clear()

    def end(self) -> None:
        """Talk no more, within POLL_S."""
        self._is_over = True
        self._wake.set()

    def say_now(self) -> None:
        """Tell at once where this rank is."""
        self._wake.set()

    def ask_for_stacks(self, reason: str) -> dict[int, Stacks]:
        """The stacks of all ranks that answer within ANSWER_S; on rank 0."""
        self._reason = reason
        self._wake.set()
        self._answered.wait(ANSWER_S + POLL_S)
        return dict(self._stacks)

    def let_all_leave(self) -> None:
        """Tell those that were asked that they may go; on rank 0, which may serve the store and so leaves last."""
        self._leave.set()
        self._wake.set()
        if self._told.wait(POLL_S):
            time.sleep(LAST_S)

    def _tell_and_listen(self, store: Store) -> None:
        store.set(f"{ENTRY}/{self._rank}", json.dumps(self._say()))
        ranks = range(self._world_size) if self._rank == 0 else (0,)
        known = [rank for rank in ranks if rank in self.heard or store.check([f"{ENTRY}/{rank}"])]
        entries = store.multi_get([f"{ENTRY}/{rank}" for rank in known]) if known else []
        for rank, entry in zip(known, entries, strict=True):
            said = json.loads(entry)
            if rank not in self.heard or said != self.heard[rank].said:
                self.heard[rank] = Heard(said, self._clock())

    def _serve(self, store: Store) -> None:
        """Rank 0: do what its watch has asked for."""
        if self._reason and not self._answered.is_set():
            store.set(ASKED, self._reason)
            self._collect(store)
            self._answered.set()
        if self._leave.is_set():
            store.set(LEAVE, "now")
            self._told.set()

    def _collect(self, store: Store) -> None:
        end_s = time.monotonic() + ANSWER_S
        waiting = set(self.heard) - {0}
        while waiting and time.monotonic() < end_s:
            for rank in [rank for rank in waiting if store.check([f"{STACKS}/{rank}"])]:
                self._stacks[rank] = json.loads(store.get(f"{STACKS}/{rank}"))
                waiting.remove(rank)
            time.sleep(POLL_S / 10)

    def _answer(self, store: Store) -> None:
        """Give this rank's stacks, and leave once rank 0 has them, or is gone."""
        self._prepare()
        with contextlib.suppress(RuntimeError):
            store.set(f"{STACKS}/{self._rank}", json.dumps(own_stacks()))
            store.wait([LEAVE], timedelta(seconds=LEAVE_S))
        self._obey()


def own_connection(store: Store) -> Store:
    """Another connection to the same keys; the same one where torch cannot make another."""
    if hasattr(store, "clone"):  # not before torch 2.8
        return store.clone()
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return store
