"""Pace: a slow rank is named by its own time, whatever the others wait for it."""

import torch
from torch import nn

from jobs.board import Heard
from jobs.pace import NUM_WINDOWS, WINDOW_S, OwnClock, Pace, SlowRank


def heard(*works: tuple[float, int]) -> dict[int, Heard]:
    """What ranks 0, 1, ... said: seconds of their own passes, and micro-batches."""
    return {
        rank: Heard({"own_s": seconds, "pieces": pieces, "host": f"n{rank}"}, 0.0)
        for rank, (seconds, pieces) in enumerate(works)
    }


def news_of(pace: Pace) -> list[SlowRank]:
    return list(iter(pace.maybe_news, None))


def look_at_windows(pace: Pace, *costs_and_pieces: tuple[float, int], count: int = NUM_WINDOWS, first: int = 1) -> None:
    """Windows in which ranks take so long for a micro-batch, and do so many."""
    for number in range(first, first + count):
        works = [(number * cost * pieces, number * pieces) for cost, pieces in costs_and_pieces]
        pace.look(heard(*works), number * WINDOW_S)


def test_rank_that_is_slow_for_three_windows_is_named_once_with_its_host() -> None:
    pace = Pace()
    look_at_windows(pace, (0.1, 10), (0.1, 10), (0.25, 10), (0.12, 10), count=2)
    assert news_of(pace) == []
    look_at_windows(pace, (0.1, 10), (0.1, 10), (0.25, 10), (0.12, 10), count=5, first=3)
    assert news_of(pace) == [SlowRank(2, "n2", 2.5)]
    assert pace.maybe_slowest == 2


def test_slowest_rank_is_known_though_none_is_slow() -> None:
    pace = Pace()
    look_at_windows(pace, (0.1, 10), (0.14, 10), (0.1, 10), count=9)
    assert (pace.maybe_slowest, news_of(pace)) == (1, [])


def test_of_two_ranks_the_slow_one_is_named() -> None:
    pace = Pace()
    look_at_windows(pace, (0.3, 10), (0.1, 10))
    assert news_of(pace) == [SlowRank(0, "n0", 3.0)]


def test_rank_with_more_micro_batches_is_not_slow() -> None:
    pace = Pace()
    look_at_windows(pace, (0.1, 20), (0.1, 10), (0.1, 10))
    assert news_of(pace) == []


def test_rank_that_is_slow_now_and_then_is_not_named() -> None:
    pace, slow, seconds = Pace(), (True, True, False, True, True, False), 0.0
    for number, is_slow in enumerate(slow, start=1):
        seconds += 3.0 if is_slow else 1.0
        pace.look(heard((number * 1.0, number * 10), (seconds, number * 10)), number * WINDOW_S)
    assert news_of(pace) == []


def test_within_a_window_and_without_steps_nothing_is_judged() -> None:
    pace = Pace()
    for _ in range(9):
        pace.look(heard((1.0, 10), (9.0, 10)), WINDOW_S / 2)
    assert (news_of(pace), pace.maybe_slowest) == ([], 1)
    quiet = Pace()
    for number in range(9):
        quiet.look(heard((0.0, 0), (0.0, 0)), number * WINDOW_S)
    assert (news_of(quiet), quiet.maybe_slowest) == ([], None)


def test_lone_rank_is_the_slowest_and_never_slow() -> None:
    pace = Pace()
    look_at_windows(pace, (0.3, 10))
    assert (pace.maybe_slowest, news_of(pace)) == (0, [])


def test_clock_runs_from_the_step_to_the_last_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    clock = OwnClock(model, torch.device("cpu"))
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _gradient, name=name: order.append(name))  # type: ignore[no-untyped-call]
    clock.begin()
    loss = model(torch.ones(2, 4)).sum()
    before = clock.span().seconds()
    loss.backward()
    after = clock.span().seconds()
    assert before <= 0 < after == clock.span().seconds()
    assert set(order[-2:]) == {"0.weight", "0.bias"}
