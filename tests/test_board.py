"""The board: two ranks at one store, each with a connection of its own."""

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from jobs.board import Board
from tests.training import wait_for

Start = Callable[..., Board]


@pytest.fixture(params=["plain", "with a prefix, as torchrun's"])
def store(request: pytest.FixtureRequest) -> Store:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return served if request.param == "plain" else PrefixStore("this start", served)


@pytest.fixture
def start(store: Store) -> Iterator[Start]:
    """Starts the board of a rank out of three."""
    started: list[Board] = []

    def begin(rank: int, told: "queue.Queue[str] | None" = None, step: int = 0) -> Board:
        told = told or queue.Queue()
        beats = iter(range(10**6))
        board = Board(
            store,
            rank,
            3,
            say=lambda: {"step": step, "beat": next(beats)},
            clock=lambda: float(rank),
            prepare=lambda: told.put("prepare"),
            obey=lambda: told.put("leave"),
        )
        started.append(board)
        board.start()
        return board

    yield begin
    for board in started:
        board.end()
        board.join()


def test_rank_0_hears_of_all_and_the_others_of_rank_0(start: Start) -> None:
    boards = [start(0, step=7), start(2, step=5)]
    wait_for("both to be heard", lambda: set(boards[0].heard) == {0, 2} and set(boards[1].heard) == {0})
    assert {rank: heard.said["step"] for rank, heard in boards[0].heard.items()} == {0: 7, 2: 5}
    assert boards[1].heard[0].at_s == 2.0, "by the hearer's clock"
    first = boards[0].heard[2].said["beat"]
    wait_for("the next beat", lambda: boards[0].heard[2].said["beat"] > first)


def test_ranks_that_are_asked_give_their_stacks_and_leave_when_told(start: Start) -> None:
    told: queue.Queue[str] = queue.Queue()
    chief = start(0)
    start(1, told)
    wait_for("both to be heard", lambda: set(chief.heard) == {0, 1})
    stacks = chief.ask_for_stacks("nothing has moved")
    assert list(stacks) == [1]
    assert " in test_ranks_that_are_asked_give_their_stacks_and_leave_when_told" in stacks[1]["MainThread"]
    assert (told.get(), told.empty()) == ("prepare", True)
    chief.let_all_leave()
    assert told.get() == "leave"


SERVE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
sys.stdout.write(f"{store.port}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def test_board_ends_by_itself_when_the_process_that_serves_the_store_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        client = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
        says: queue.Queue[str] = queue.Queue()

        def say() -> dict[str, str]:
            says.put("")
            return {}

        board = Board(client, 1, 2, say=say, clock=lambda: 0.0, prepare=lambda: None, obey=lambda: None)
        board.start()
        says.get()  # connected; a connection that is being made is tried again and again
        server.kill()
        wait_for("the thread to end", lambda: not board.is_alive())
