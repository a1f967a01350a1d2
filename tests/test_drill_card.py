"""The drill's report card: what is read from a run folder, and how it looks."""

import json
from pathlib import Path

import pytest

from cluster.drill_card import (
    WIDTH,
    Card,
    Result,
    card_json,
    card_text,
    maybe_seconds_to_recover,
    outcome_of,
    slowest_step_s,
    steps_lost,
)
from cluster.runs import RunFolder, append_line, write_json

HELD = Result(
    "kill", "rank killed by -9", "real", survived=True, bit_equal=True, steps_lost=2, max_steps_lost=6,
    seconds_to_recover=8.25, run_dir="/data/runs/demo-drill/20261130-065412-3599",
)  # fmt: skip
LOST = Result(
    "preempt", "preempted", "simulated", "by scontrol requeue, since no partition is above low; it took a while",
    survived=True, bit_equal=True, steps_lost=4, max_steps_lost=0, seconds_to_recover=71.0,
    run_dir="/data/runs/demo-drill/20261130-065500-0001",
)  # fmt: skip
DEAD = Result(
    "disk", "disk full", "real", "rank 0 on n1: OSError", run_dir="/data/runs/demo-drill/20261130-065600-0002"
)
UNTRIED = Result("port", "port taken", "not tried", "no rank came as far as to break")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.make()
    return run


def add_event(run: RunFolder, second: int, event: str, **fields: object) -> None:
    append_line(run.events, {"time": f"2026-01-02T03:04:{second:02d}.000Z", "event": event, **fields})


def test_card_has_a_line_for_each_fault_and_names_those_that_do_not_hold() -> None:
    card = Card("demo.yaml", "4 ranks on Slurm", 61.2, "/data/runs/demo-drill/x", (HELD, LOST, DEAD, UNTRIED))
    assert card_text(card) == (
        """\
demo.yaml: 4 ranks on Slurm, 61 s

fault                    survived bit-equal lost back in  run
rank killed by -9        yes      yes          2   8.2 s  20261130-065412-3599
preempted                yes      yes          4  71.0 s  20261130-065500-0001
disk full                NO       NO           -       -  20261130-065600-0002
port taken               not tried

undisturbed: /data/runs/demo-drill/x
preempted: simulated: by scontrol requeue, since no partition is above low; it
  took a while
disk full: rank 0 on n1: OSError
port taken: not tried: no rank came as far as to break

1 of 4 hold; not: preempted, disk full, port taken"""
    )
    assert max(map(len, card_text(card).splitlines())) <= WIDTH
    assert card.holds is False


def test_card_of_a_drill_in_which_all_hold() -> None:
    card = Card("demo.yaml", "4 ranks on Slurm", 61.2, "/runs/x", (HELD,))
    assert card_text(card).splitlines()[-1] == "1 of 1 hold"
    assert card.holds is True
    assert card_json(card) == {
        "format_version": 1,
        "spec": "demo.yaml",
        "where": "4 ranks on Slurm",
        "seconds": 61.2,
        "undisturbed": "/runs/x",
        "results": [
            {
                "fault": "kill",
                "title": "rank killed by -9",
                "how": "real",
                "note": "",
                "survived": True,
                "bit_equal": True,
                "steps_lost": 2,
                "max_steps_lost": 6,
                "seconds_to_recover": 8.25,
                "run_dir": "/data/runs/demo-drill/20261130-065412-3599",
                "holds": True,
            }
        ],
        "holds": True,
    }


@pytest.mark.parametrize(("result", "holds"), [(HELD, True), (LOST, False), (DEAD, False), (UNTRIED, False)])
def test_fault_holds_when_survived_bit_equal_and_no_more_lost_than_may_be(result: Result, holds: bool) -> None:
    assert result.holds is holds


def test_outcomes_of_two_runs_are_equal_whatever_their_attempts_and_speed(tmp_path: Path) -> None:
    outcomes = []
    for name, attempt, loss in (("a", 1, 0.5), ("b", 2, 0.5), ("c", 1, 0.25)):
        run = RunFolder(tmp_path / name)
        run.make()
        write_json(run.summary, {"weights_sha256": "w", "samples_sha256": "s"})
        append_line(run.metrics, {"step": 1, "loss": loss, "attempt": attempt, "images_per_s": 10.0 * attempt})
        outcomes.append(outcome_of(run))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


def test_slowest_step_is_told_by_the_lowest_rate(run: RunFolder) -> None:
    for rate in (400.0, 20.0, 300.0):
        append_line(run.metrics, {"step": 1, "images_per_s": rate})
    assert slowest_step_s(run, 60) == 3.0


def test_steps_lost_are_counted_from_where_the_rank_broke(run: RunFolder) -> None:
    assert steps_lost(run, maybe_step=14) == 0
    add_event(run, 1, "resumed", from_step=12, lost_steps=0)
    assert steps_lost(run, maybe_step=14) == 2
    assert steps_lost(run, maybe_step=None) == 0
    add_event(run, 2, "resumed", from_step=15, lost_steps=1)
    assert steps_lost(run, maybe_step=14) == 3


def test_recovery_is_timed_from_the_fault_to_the_next_first_step(run: RunFolder) -> None:
    assert maybe_seconds_to_recover(run) is None
    add_event(run, 1, "first_step", attempt=1)
    add_event(run, 2, "checkpoint_saved", attempt=1)
    run.attempt_log(1).write_text(
        "2026-01-02T03:04:01.000Z r00003 W breaks on purpose: kill at step 4 of rank 3\n"
        "2026-01-02T03:04:01.500Z r00003 W now breaks on purpose: pause\n"
        "2026-01-02T03:04:03.500Z r00003 W now breaks on purpose: kill\n"
    )
    assert maybe_seconds_to_recover(run) is None
    add_event(run, 9, "first_step", attempt=2)
    assert maybe_seconds_to_recover(run) == 5.5


def test_recovery_without_a_new_attempt_is_timed_to_the_next_save(run: RunFolder) -> None:
    run.attempt_log(1).write_text("2026-01-02T03:04:03.500Z r00000 W now breaks on purpose: enospc\n")
    add_event(run, 1, "first_step", attempt=1)
    add_event(run, 2, "checkpoint_saved", attempt=1)
    add_event(run, 5, "checkpoint_saved", attempt=1)
    assert maybe_seconds_to_recover(run) == 1.5


def test_recovery_of_a_run_that_was_asked_to_stop_is_timed_from_then(run: RunFolder) -> None:
    run.attempt_log(1).write_text("2026-01-02T03:04:00.500Z r00003 W now breaks on purpose: pause\n")
    add_event(run, 4, "stop_requested", attempt=1)
    add_event(run, 5, "checkpoint_saved", attempt=1)
    add_event(run, 11, "first_step", attempt=2)
    assert maybe_seconds_to_recover(run) == 7.0


def test_card_is_an_object_of_json() -> None:
    card = Card("demo.yaml", "4 ranks on Slurm", 61.2, "/runs/x", (HELD, UNTRIED))
    assert json.loads(json.dumps(card_json(card))) == card_json(card)
