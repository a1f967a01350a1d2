"""Phases of a start: they add up, and they begin when the kernel made the process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.phases import Phases, process_began_s
from tests.training import REPOSITORY


def test_phases_follow_each_other_without_a_gap_and_in_their_order() -> None:
    phases = Phases(time.monotonic() - 100)
    phases.end("torch")
    phases.end("meeting")
    assert list(phases.seconds) == ["torch", "meeting"]
    assert phases.seconds["torch"] == pytest.approx(100, abs=50)  # and not again in the one that follows
    assert phases.seconds["meeting"] == pytest.approx(0, abs=50)
    assert phases.total_s() == round(phases.seconds["torch"] + phases.seconds["meeting"], 3)


def test_phase_that_comes_twice_is_counted_together() -> None:
    phases = Phases(time.monotonic() - 100)
    phases.end("groups")
    phases._since_s -= 1000
    phases.end("groups")
    assert list(phases.seconds) == ["groups"]
    assert phases.seconds["groups"] == pytest.approx(1100, abs=50)


def test_start_of_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    def stat(ticks: int) -> Path:
        path = tmp_path / str(ticks)
        fields = [str(number) for number in range(4, 53)]  # proc(5) counts from 1; 1 and 2 are the id and the name
        fields[22 - 4] = str(ticks)
        path.write_text(f"7 (a) b (c) R {' '.join(fields)}\n")
        return path

    assert process_began_s(stat(90_000)) - process_began_s(stat(50_000)) == pytest.approx(400, abs=50)


def test_program_began_when_it_was_forked_and_not_when_it_could_first_look() -> None:
    code = "import time; time.sleep(0.5); from jobs.phases import process_began_s; print(process_began_s())"
    before = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    after = time.monotonic()
    began = float(child.communicate()[0])
    assert before - 0.02 <= began <= after + 0.02  # the kernel counts in hundredths of a second
