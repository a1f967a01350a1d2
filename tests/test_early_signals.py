"""Signals in a rank's first seconds: none kills it, and none is lost."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cluster.plan import SIGNALS_BLOCKED
from cluster.signals import held_back
from tests.training import REPOSITORY, command, environment, newest_run, write_spec

SHORT = (0, 300, 1000, 2000)  # milliseconds after the start
ALL = range(0, 3001, 100)


def code_after_usr2(folder: Path, spec: Path, delay_ms: int) -> int:
    """Start one rank, send it USR2 after a delay; returns its exit code."""
    words = [*SIGNALS_BLOCKED, *command("jobs.train", spec, "train.epochs=1000", "train.warmup_epochs=0")]
    with held_back():  # as the supervisor starts its local ranks
        rank = subprocess.Popen(words, env=environment(folder), cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    time.sleep(delay_ms / 1000)
    os.kill(rank.pid, signal.SIGUSR2)
    return rank.wait()


@pytest.mark.parametrize("delay_ms", SHORT)
def test_usr2_early_in_a_rank_stops_it_at_a_boundary(tmp_path: Path, staged_data: Path, delay_ms: int) -> None:
    assert code_after_usr2(tmp_path, write_spec(tmp_path, staged_data), delay_ms) == 75
    events = [event["event"] for event in newest_run(tmp_path).read_events()]
    events = [event for event in events if event != "checkpoint_saved"]  # one that was under way ends in between
    assert events[-2:] == ["stop_requested", "stopped"]


@pytest.mark.long
@pytest.mark.parametrize("delay_ms", [delay for delay in ALL if delay not in SHORT])
def test_usr2_at_every_tenth_of_a_second_stops_a_rank_at_a_boundary(
    tmp_path: Path, staged_data: Path, delay_ms: int
) -> None:
    assert code_after_usr2(tmp_path, write_spec(tmp_path, staged_data), delay_ms) == 75
