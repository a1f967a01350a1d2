"""The watch by itself: its notes, and a rank that is stuck when a stop's time is over.  Whole runs: test_hangs.py."""

import json
import re
import signal
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cluster.rank import KILL_WAIT_VARIABLE
from cluster.runs import utc_text, write_json
from jobs.watchdog import Watch
from tests import training
from tests.training import REPOSITORY, command, environment, write_spec


def test_first_step_ends_the_preparation() -> None:
    watch = Watch()
    limits = []
    for phase, step in (("preparing", 0), ("training", 0), ("training", 1), ("saving", 2), ("training", 2)):
        watch.at(phase, step)  # type: ignore[arg-type]
        limits.append(watch.deadlines.limit_s(phase))  # type: ignore[arg-type]
    assert limits == [600.0, 600.0, 120.0, 1800.0, 120.0]


def test_stuck_rank_leaves_unsaved_when_a_stops_time_is_over(tmp_path: Path, staged_data: Path) -> None:
    words = command("tests.stuck_train", "read", 0, 5, write_spec(tmp_path, staged_data))
    environ = environment(tmp_path, {KILL_WAIT_VARIABLE: "4"})
    with subprocess.Popen(words, env=environ, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        training.wait_for("a run folder", lambda: list((tmp_path / "runs").glob("*/*/attempts/0001")))
        run = training.newest_run(tmp_path)
        training.wait_for("the loss of step 3", lambda: training.last_step(run) == 3)  # known after step 5
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert " and nothing has moved since: this rank leaves unsaved; " in errors
    record = json.loads((run.failures / "a0001_r00000.json").read_text())
    assert (record["kind"], record["rank"], record["exit_code"], record["step"]) == ("hang", None, 1, 5)
    assert " in read_from_nobody" in run.stacks_of(1, 0).read_text()
    assert list(run.checkpoints.iterdir()) == []


def test_stuck_rank_has_the_grace_period_where_that_is_longer_than_kill_wait(tmp_path: Path, staged_data: Path) -> None:
    words = command("tests.stuck_train", "read", 0, 5, write_spec(tmp_path, staged_data))
    environ = environment(tmp_path, {KILL_WAIT_VARIABLE: "4"})
    with subprocess.Popen(words, env=environ, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        training.wait_for("a run folder", lambda: list((tmp_path / "runs").glob("*/*/attempts/0001")))
        run = training.newest_run(tmp_path)
        training.wait_for("the loss of step 3", lambda: training.last_step(run) == 3)
        end = utc_text(datetime.now(timezone.utc) + timedelta(seconds=12))
        write_json(run.grace, {"attempt": 1, "end": end})
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 1
    told = re.search(r"SIGTERM came (\d+) s ago and nothing has moved since: this rank leaves unsaved", errors)
    assert told
    assert 4 < int(told[1]) <= 12
    beat = json.loads(run.heartbeat.read_text())
    assert (beat["attempt"], beat["stop_signal"]) == (1, "SIGTERM")
