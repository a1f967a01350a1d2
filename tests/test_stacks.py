"""What all ranks are doing: own stacks, the merged text, and the rank that it accuses."""

import threading

import pytest

from jobs.stacks import Accused, Seen, accuse, merged, missing, own_stacks, ranks_text

REDUCE = {"MainThread": '  File "ddp.py", line 7 in backward'}
READ = {"MainThread": '  File "data.py", line 3 in read'}


def seen(step: int = 12, phase: str = "training", silent_s: float = 0.4, host: str = "n1") -> Seen:
    return Seen(phase, step, host, silent_s)


def wait_here(ready: threading.Event, release: threading.Event) -> None:
    ready.set()
    release.wait()


def test_own_stacks_are_those_of_all_threads_but_the_watchers() -> None:
    ready, release = threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=wait_here, args=(ready, release), name=name) for name in ("loader", "watch", "board")
    ]
    for thread in threads:
        thread.start()
        ready.wait()
        ready.clear()
    stacks = own_stacks()
    release.set()
    for thread in threads:
        thread.join()
    assert {"MainThread", "loader"} <= set(stacks)
    assert not {"watch", "board"} & set(stacks)
    assert f'File "{__file__}"' in stacks["loader"]
    assert " in wait_here" in stacks["loader"]
    assert " in test_own_stacks_are_those_of_all_threads_but_the_watchers" in stacks["MainThread"]


def test_equal_stacks_are_written_once_and_ranks_without_any_are_listed() -> None:
    stacks = {0: {**REDUCE, "heartbeat": "  beating"}, 1: REDUCE, 2: REDUCE, 4: READ}
    places = {rank: seen() for rank in (0, 1, 2, 4)} | {3: seen(11, silent_s=41.2)}
    assert merged(stacks) == (
        'ranks 0-2, MainThread:\n  File "ddp.py", line 7 in backward\n\n'
        'rank 4, MainThread:\n  File "data.py", line 3 in read\n\n'
        "rank 0, heartbeat:\n  beating\n"
    )
    assert missing(6, places, stacks) == (
        "rank 3: no answer for 41 s, last seen at step 11, phase training\nrank 5: never came\n"
    )


@pytest.mark.parametrize(
    ("places", "stacks", "accused"),
    [
        pytest.param(
            {0: seen(), 1: seen(), 2: seen(silent_s=40.0, host="n2"), 3: seen()},
            {0: REDUCE, 1: REDUCE, 3: READ},
            Accused(2, "n2", "no answer for 40 s, last seen at step 12, phase training"),
            id="silent",
        ),
        pytest.param(
            {0: seen(), 1: seen(silent_s=50.0), 2: seen(silent_s=40.0), 3: seen()},
            {0: REDUCE, 3: REDUCE},
            Accused(1, "n1", "no answer for 50 s, last seen at step 12, phase training"),
            id="silent for longest",
        ),
        pytest.param(
            {0: seen(), 1: seen(silent_s=50.0), 3: seen()},
            {0: REDUCE, 3: REDUCE},
            Accused(2, "an unknown host", "never came"),
            id="never came",
        ),
        pytest.param(
            {0: seen(), 1: seen(11), 2: seen(), 3: seen()},
            dict.fromkeys(range(4), REDUCE),
            Accused(1, "n1", "is at step 11, phase training, while rank 0 is at step 12"),
            id="behind",
        ),
        pytest.param(
            {0: seen(), 1: seen(), 2: seen(), 3: seen(13)},
            dict.fromkeys(range(4), REDUCE),
            Accused(3, "n1", "is at step 13, phase training, while rank 0 is at step 12"),
            id="ahead: it skipped something",
        ),
        pytest.param(
            {0: seen(), 1: seen(), 2: seen(11), 3: seen(11)},
            dict.fromkeys(range(4), REDUCE),
            Accused(2, "n1", "is at step 11, phase training, while rank 0 is at step 12"),
            id="as many behind as ahead",
        ),
        pytest.param(
            dict.fromkeys(range(4), seen()),
            {0: REDUCE, 1: READ, 2: REDUCE, 3: REDUCE},
            Accused(1, "n1", "is at step 12, phase training, as the others are, but does something else"),
            id="another stack",
        ),
        pytest.param(
            dict.fromkeys(range(4), seen()),
            dict.fromkeys(range(4), REDUCE),
            Accused(None, "", "all ranks wait at the same place, step 12, phase training"),
            id="nobody",
        ),
    ],
)
def test_rank_at_fault(places: dict[int, Seen], stacks: dict[int, dict[str, str]], accused: Accused) -> None:
    assert accuse(4, places, stacks) == accused


def test_ranks_are_listed_in_stretches() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 5, 7, 8])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-2,5,7-8",
    ]
