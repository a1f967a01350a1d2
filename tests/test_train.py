"""One rank as a program: its command line, and that it ends when it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.train import parse_arguments
from tests.training import REPOSITORY, command, environment, events_of, newest_run, summary_of, write_spec

PHASES = (
    "python", "spec", "torch", "data", "device", "meeting", "groups",
    "attempt", "restore", "model", "ddp", "buckets", "saver", "first_step",
)  # fmt: skip
LINGERING = """
import runpy, sys, threading, time

threading.Thread(target=time.sleep, args=(3600,)).start()  # as libraries leave them; the interpreter waits for it
sys.argv = ["jobs.train", *sys.argv[1:]]
runpy.run_module("jobs.train", run_name="__main__")
"""
TELLING = """
import gc, os, runpy, sys

def tell_and_leave(code, leave=os._exit):
    print(f"enabled: {gc.isenabled()}, frozen: {gc.get_freeze_count() > 0}", flush=True)
    leave(code)

os._exit = tell_and_leave
sys.argv = ["jobs.train", *sys.argv[1:]]
runpy.run_module("jobs.train", run_name="__main__")
"""


@pytest.mark.parametrize("option", ["--local_rank=3", "--local-rank=3"])
def test_both_spellings_of_old_launch_scripts_are_read(option: str) -> None:
    args = parse_arguments([option, "spec.yaml", "train.lr=0.1"])
    assert (args.local_rank, args.spec, args.overrides) == (3, Path("spec.yaml"), ["train.lr=0.1"])


def test_finished_program_ends_though_a_thread_of_it_goes_on(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = [sys.executable, "-c", LINGERING, str(spec), "train.max_steps=2"]
    done = subprocess.run(words, env=environment(tmp_path), cwd=REPOSITORY, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert summary_of(newest_run(tmp_path))["steps"] == 2


def test_start_tells_its_phases_and_garbage_is_looked_for_again_after_it(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = [sys.executable, "-c", TELLING, str(spec), "train.max_steps=1"]
    done = subprocess.run(words, env=environment(tmp_path), cwd=REPOSITORY, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, b"enabled: True, frozen: True\n"), done.stderr
    [first_step] = events_of(newest_run(tmp_path), "first_step")
    assert tuple(first_step["phases"]) == PHASES
    assert first_step["seconds"] == round(sum(first_step["phases"].values()), 3)


def test_page_names_every_phase_of_a_start() -> None:
    section = (REPOSITORY / "docs/run-folder.md").read_text().split("| phase | what |")[1].split("\n\n")[0]
    named = [
        name for line in section.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")
    ]
    assert tuple(named) == PHASES


def test_rank_without_its_data_does_not_wait_for_the_others(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, tmp_path / "nothing")
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}  # where nobody is
    done = subprocess.run(
        command("jobs.train", spec),
        env={**os.environ, **environment(tmp_path, place | meeting)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    missing = tmp_path / "nothing/staged/synthetic_640_128.pt"
    words = f"{missing} does not exist: stage it first: python -m jobs.stage SPEC\n"
    assert (done.returncode, done.stderr.split(" E ")[1]) == (2, words)
