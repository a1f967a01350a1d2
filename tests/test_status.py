"""cluster.status: what it prints of one run and of all, as a table, as plain lines and as JSON, and its exit codes."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.figures import figures
from cluster.run_state import BAD, LIVE
from cluster.runs import RunFolder, append_line, write_json
from cluster.status import act
from cluster.status_text import COLOURS, clock, plain_lines, show, show_detail, table
from cluster.view import look_at
from tests.executables import put_answer
from tests.run_folders import answer_with, environment, make_run
from tests.terminals import Terminal
from tests.training import REPOSITORY

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=timezone.utc)
TRAINING: dict[str, Any] = {
    "run_dir": "/runs/demo/20260102-030405-0a1b",
    "run_id": "20260102-030405-0a1b",
    "name": "demo",
    "job_id": "17",
    "state": "training",
    "because": "",
    "source": "squeue",
    "slurm_state": "RUNNING",
    "slurm_reason": "",
    "start": "2026-01-02T11:00:00.000Z",
    "never_starts": False,
    "time_left_s": 7200,
    "nodes": "n[1-4]",
    "excluded": "n5",
    "successors": ["18"],
    "attempt": 2,
    "step": 120,
    "total_steps": 960,
    "epoch": 4,
    "epochs": 30,
    "eta_s": 104,
    "images_per_s": 512.4,
    "loss": 1.2341,
    "accuracy": 0.65,
    "checkpoint_step": 96,
    "checkpoint_age_s": 130.0,
    "heartbeat_age_s": 2.0,
    "goodput": 0.931,
}
NOTHING = dict.fromkeys(
    key
    for key in TRAINING
    if key not in ("run_dir", "run_id", "name", "job_id", "state", "because", "source", "never_starts", "successors")
)
PENDING = {
    **TRAINING,
    **NOTHING,
    "run_id": "20260102-030406-0a1c",
    "name": "a name of more than twenty letters",
    "state": "pending",
    "because": "Priority: jobs of higher priority come first",
    "start": "2026-01-03T11:00:00.000Z",
    "successors": [],
    "attempt": 0,
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def test_run_is_one_line_where_there_is_no_terminal() -> None:
    never = {**PENDING, "never_starts": True, "job_id": None}
    begin = {**PENDING, "slurm_reason": "BeginTime", "start": "2026-01-02T12:02:00.000Z", "because": ""}
    assert plain_lines([TRAINING, PENDING, never, begin], NOW) == [
        "run                   name                                job  state",
        "20260102-030405-0a1b  demo                                17   training  attempt 2, step 120/960, epoch 4/30, "
        "512 images/s, 1:44 left, goodput 0.93, accuracy 0.6500, saved 2 min ago, on n[1-4], without n5, "
        "behind it job 18",
        "20260102-030406-0a1c  a name of more than twenty letters  17   pending   "
        "Priority: jobs of higher priority come first, start expected at 2026-01-03 11:00",
        "20260102-030406-0a1c  a name of more than twenty letters  -    pending   "
        "Priority: jobs of higher priority come first, it never starts like this",
        "20260102-030406-0a1c  a name of more than twenty letters  17   pending   may start at 12:02",
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_fits_the_terminal_and_cuts_no_figure(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(table([TRAINING, PENDING], NOW))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(out.getvalue().split())
    missing = [
        word
        for word in ("17", "training", "120/960", "0.6500", "n[1-4]", "2026-01-03", TRAINING["run_id"])
        if word not in words
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("out", "variables", "is_drawn"),
    [
        (io.StringIO(), {"TERM": "xterm"}, False),
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {}, False),
    ],
    ids=["pipe", "terminal", "NO_COLOR", "dumb", "no TERM"],
)
def test_table_is_drawn_in_terminals_only(
    out: io.StringIO, variables: dict[str, str], is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show([TRAINING], out, variables, NOW)
    show_detail(TRAINING, out, variables, NOW)
    assert ("\033[" in out.getvalue()) == is_drawn


def test_one_run_is_told_in_full() -> None:
    out = io.StringIO()
    show_detail(TRAINING, out, {}, NOW)
    assert out.getvalue() == (
        "demo 20260102-030405-0a1b\n"
        "state       training\n"
        "run folder  /runs/demo/20260102-030405-0a1b\n"
        "job         17, RUNNING\n"
        "started     11:00\n"
        "limit in    2:00:00\n"
        "nodes       n[1-4]\n"
        "left out    n5\n"
        "successors  18\n"
        "attempt     2\n"
        "step        120 of 960\n"
        "epoch       4 of 30\n"
        "done in     1:44\n"
        "images/s    512\n"
        "loss        1.234\n"
        "accuracy    0.6500\n"
        "checkpoint  step 96, 2 min ago\n"
        "goodput     0.93\n"
        "said by     squeue\n"
    )


def test_every_state_has_a_colour() -> None:
    assert set(COLOURS) == LIVE | BAD | {"stopped", "finished"}


def test_time_of_another_day_carries_its_date() -> None:
    assert [clock(f"2026-01-0{day}T11:00:00.000Z", NOW) for day in (2, 3)] == ["11:00", "2026-01-03 11:00"]


def test_figures_of_a_running_run_come_from_its_last_logged_step(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1, "training")
    answer_with(tmp_path, f"1|RUNNING|2026-01-02T11:00:00|2:00:00|n1||None|{run.path}/s\n")
    run.append_event("attempt_started", attempt=1, job_id="1", nodes=["n1"], world_size=2)
    beat = {"step": 3, "total_steps": 9, "steps_per_epoch": 3, "global_batch": 10, "images_per_s": 5.0, "loss": 2.0}
    write_json(run.heartbeat, {"attempt": 1, "phase": "training", **beat})
    for step, more in ((3, {"test_accuracy": 0.25}), (6, {})):
        append_line(run.metrics, {"step": step, "loss": 1.0, "images_per_s": 10.0, **more})
    (run.checkpoints / "step_00000006.json").write_text("{}")
    told = figures(look_at(run, environ).views[0])
    ages = {key: told.pop(key) for key in ("checkpoint_age_s", "heartbeat_age_s", "start", "goodput")}
    assert all(value is not None for value in ages.values())
    assert told == {
        "run_dir": str(run.path),
        "run_id": "run-0001",
        "name": "demo",
        "job_id": "1",
        "state": "training",
        "because": "",
        "source": "squeue",
        "slurm_state": "RUNNING",
        "slurm_reason": "",
        "never_starts": False,
        "time_left_s": 7200,
        "nodes": "n1",
        "excluded": None,
        "successors": [],
        "attempt": 1,
        "step": 6,
        "total_steps": 9,
        "epoch": 3,
        "epochs": 3,
        "eta_s": 3,
        "images_per_s": 10.0,
        "loss": 1.0,
        "accuracy": 0.25,
        "checkpoint_step": 6,
    }


def test_goodput_is_seconds_in_steps_over_seconds_held(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1, "failed")
    lines = [
        {"time": "2026-01-02T03:00:00.000Z", "event": "attempt_started", "attempt": 1},
        {"time": "2026-01-02T04:00:00.000Z", "event": "attempt_started", "attempt": 2},
        {"time": "2026-01-02T04:00:10.000Z", "event": "resumed", "attempt": 2, "last_beat": "2026-01-02T03:00:30.000Z"},
    ]
    for line in lines:
        append_line(run.events, line)
    run.claim_attempt({"job_id": "1", "host": "n1", "pid": 1})
    answer_with(tmp_path, f"1|RUNNING|N/A|1:00|n1||None|{run.path}/s\n")
    write_json(run.heartbeat, {"attempt": 2, "phase": "training", "step": 6, "total_steps": 9, "global_batch": 10})
    for step in (3, 6):
        append_line(run.metrics, {"step": step, "loss": 1.0, "images_per_s": 10.0})
    run.verdict(1).unlink()
    write_json(run.verdict(2), {"time": "2026-01-02T04:00:30.000Z", "outcome": "stopped", "action": "requeue"})
    view = look_at(run, environ).views[0]
    assert (view.state.word, figures(view)["goodput"]) == ("requeued", 0.1)  # 6 s of 30 + 30


def status(environ: Mapping[str, str], *words: object) -> "subprocess.CompletedProcess[str]":
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = act([*map(str, words)], environ)
    return subprocess.CompletedProcess("", code, out.getvalue(), errors.getvalue())


def test_exit_code_says_whether_the_answer_is_bad(tmp_path: Path, environ: dict[str, str]) -> None:
    runs = [make_run(tmp_path, environ, job, kind) for job, kind in ((1, "finished"), (2, "failed"), (3, "pending"))]
    answer_with(tmp_path, f"3|PENDING|N/A|1:00|||BadConstraints|{runs[2].path}/s\n")
    codes = [status(environ, *words).returncode for words in ((), ("1",), ("2",), ("3",), ("nobody",), ("--json",))]
    assert codes == [0, 0, 1, 1, 2, 0]
    put_answer(tmp_path / "bin", "squeue", errors="Unable to contact slurm controller\n", exit_code=1)
    done = status(environ)
    error = "exit code 1: Unable to contact slurm controller"
    said = f"Slurm was not reached, and this is what the run folders say: {error}\n"
    assert (done.returncode, done.stderr) == (4, said)
    assert [status(environ, job).returncode for job in ("1", "3")] == [0, 4]


def test_json_is_one_object(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1)
    one, all_runs = json.loads(status(environ, "1", "--json").stdout), json.loads(status(environ, "--json").stdout)
    assert all_runs == {
        "runs": [{key: value for key, value in one.items() if key != "slurm_error"}],
        "slurm_error": None,
    }
    assert (one["run_dir"], one["state"], one["accuracy"], one["goodput"]) == (str(run.path), "finished", 0.5, 0.5)


def test_runs_of_a_run_root_are_found_without_an_index(tmp_path: Path, environ: dict[str, str]) -> None:
    for number in (1, 2):
        make_run(tmp_path, environ, number, "finished", route="direct")
    elsewhere = {**environ, "XDG_STATE_HOME": str(tmp_path / "other")}
    assert status(elsewhere).stdout == "no runs yet; to find those of a run_root: python -m cluster.status FOLDER\n"
    for folder in (tmp_path / "runs", tmp_path / "runs" / "demo"):
        shown = json.loads(status(elsewhere, folder, "--json").stdout)["runs"]
        assert [run["run_id"] for run in shown] == ["run-0002", "run-0001"]
    assert len(json.loads(status(elsewhere, "--json").stdout)["runs"]) == 2


def test_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1)
    line = f"{sys.executable} -m cluster.status | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout in ("0\n", "141\n")  # whether it had written all before the reader left


def test_watching_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        act(["--watch", "--json"], {})
    assert caught.value.code == 2


def test_watching_a_run_that_has_ended_shows_it_once(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1)
    assert isinstance(run, RunFolder)
    watched, once = status(environ, "1", "--watch"), status(environ, "1")
    assert (watched.stdout, watched.returncode) == (once.stdout, 0)
