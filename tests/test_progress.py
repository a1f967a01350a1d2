"""Progress: one line of figures, drawn as a bar in a terminal and said now and then elsewhere."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from cluster.progress import Bar, OccasionalLines, Silence, bar, progress_text, shown_on
from tests.terminals import Terminal

BEAT = {"phase": "training", "step": 120, "total_steps": 960, "steps_per_epoch": 32, "global_batch": 64}
ALL = BEAT | {"loss": 1.2341, "accuracy": 0.65, "images_per_s": 512.4}


@pytest.mark.parametrize(
    ("beat", "text"),
    [
        (ALL, "training: step 120/960, epoch 4/30, loss 1.234, accuracy 0.6500, 512 images/s, 1:44 left"),
        (BEAT, "training: step 120/960, epoch 4/30"),
        (BEAT | {"step": 0, "phase": "saving"}, "saving: step 0/960, epoch 1/30"),
        (BEAT | {"step": 960, "phase": "evaluating"}, "evaluating: step 960/960, epoch 30/30"),
        (BEAT | {"step": 33, "total_steps": 40}, "training: step 33/40, epoch 2/2"),
        (BEAT | {"images_per_s": 0.0}, "training: step 120/960, epoch 4/30"),
        (BEAT | {"images_per_s": 0.5}, "training: step 120/960, epoch 4/30, 0 images/s, 1 d 5:52 left"),
        (BEAT | {"images_per_s": 10.0}, "training: step 120/960, epoch 4/30, 10 images/s, 1:29:36 left"),
        ({"phase": "starting", "step": 0}, "starting: step 0/0, epoch 0/0"),
    ],
    ids=[
        "all",
        "no figures yet",
        "first step",
        "last step",
        "part of an epoch",
        "very slow",
        "days",
        "hours",
        "before the length is known",
    ],
)
def test_progress_is_one_line(beat: dict[str, Any], text: str) -> None:
    assert progress_text(beat) == text


@pytest.mark.parametrize("beat", [ALL, BEAT, {"phase": "starting"}], ids=["all", "no figures yet", "starting"])
def test_bar_fits_80_columns(beat: dict[str, Any]) -> None:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(bar(beat))
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_bar_shows_what_the_line_says() -> None:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False, legacy_windows=False).print(bar(ALL))
    first, second = out.getvalue().splitlines()
    assert first == f"training {'━' * 5}╸{' ' * 41} step 120/960, 1:44 left"
    assert second == "epoch 4/30, loss 1.234, accuracy 0.6500, 512 images/s"


def test_line_without_a_terminal_is_printed_when_it_is_new() -> None:
    out = io.StringIO()
    shown = OccasionalLines(out, last_s=-1000.0)
    shown.wait("one")
    shown.wait("two")  # too soon
    shown.last_s = time.monotonic() - 1000.0
    shown.wait("one")
    shown.progress(BEAT)
    assert out.getvalue() == "one\ntraining: step 120/960, epoch 4/30\n"


@pytest.mark.parametrize(
    ("out", "environ", "quiet", "kind"),
    [
        (io.StringIO(), {"TERM": "xterm"}, False, OccasionalLines),
        (Terminal(), {"TERM": "xterm"}, False, Bar),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False, Bar),
        (Terminal(), {"TERM": "dumb"}, False, OccasionalLines),
        (Terminal(), {}, False, OccasionalLines),
        (Terminal(), {"TERM": "xterm"}, True, Silence),
    ],
    ids=["pipe", "terminal", "no colours", "dumb terminal", "no TERM", "JSON"],
)
def test_bar_is_drawn_where_lines_can_be_written_over(
    out: io.StringIO, environ: dict[str, str], quiet: bool, kind: type
) -> None:
    with shown_on(out, environ, maybe_errors=io.StringIO() if quiet else None) as shown:
        assert type(shown) is kind
        shown.wait("starting")
        shown.progress(ALL)


@pytest.mark.parametrize("environ", [{"TERM": "xterm"}, {}], ids=["terminal", "plain"])
def test_line_of_the_log_stays_in_one_piece_above_the_bar(environ: dict[str, str]) -> None:
    out = Terminal()
    with shown_on(out, environ) as shown:
        shown.progress(ALL)
        shown.log(b"run folder: /" + b"long/" * 40 + b"[red]\xff\n")
    assert "run folder: /" + "long/" * 40 + "[red]\ufffd\n" in out.getvalue()


def test_log_goes_to_standard_error_where_the_output_is_json() -> None:
    out, errors = Terminal(), io.StringIO()
    with shown_on(out, {"TERM": "xterm"}, maybe_errors=errors) as shown:
        shown.wait("starting")
        shown.progress(ALL)
        shown.log(b"one\n")
    assert (out.getvalue(), errors.getvalue()) == ("", "one\n")
