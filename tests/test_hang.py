"""What is written down of a hang, and what happens where it can't be."""

import json
import logging
import os
from pathlib import Path

import pytest

from cluster.runs import RunFolder
from jobs import hang
from jobs.failure import Whereabouts
from jobs.hang import Finding, publish
from jobs.stacks import Accused

FINDING = Finding(
    "nothing has moved for 41 s", Accused(3, "n2", "no answer for 40 s"), "the stacks\n", is_of_all=True, exit_code=76
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that attempt 1 owns."""
    run = RunFolder(tmp_path)
    run.make()
    run.claim_attempt({})
    return run


def where(run: RunFolder) -> Whereabouts:
    return Whereabouts(rank=0, attempt=1, maybe_run_dir=run.path)


def written(run: RunFolder) -> list[str]:
    folders = [folder for folder in (run.stacks, run.failures) if folder.is_dir()]
    return sorted(path.name for folder in folders for path in folder.iterdir())


def test_stacks_and_a_record_that_names_the_silent_rank_are_written(run: RunFolder) -> None:
    assert publish(FINDING, where(run)) == 76
    head, _, rest = run.stacks_of(1).read_text().partition("\n")
    assert (head.partition(" ")[2], rest) == ("nothing has moved for 41 s", "\nthe stacks\n")
    record = json.loads((run.failures / "a0001_r00000.json").read_text())
    told = {key: record[key] for key in ("rank", "host", "reporter", "kind", "exit_code", "exception")}
    assert told == {
        "rank": 3, "host": "n2", "reporter": 0, "kind": "hang", "exit_code": 76,
        "exception": "HangError: no answer for 40 s; nothing has moved for 41 s; stacks: stacks/a0001.txt",
    }  # fmt: skip


def test_attempt_that_has_a_successor_writes_nothing(run: RunFolder) -> None:
    run.claim_attempt({})
    assert publish(FINDING, where(run)) == 1
    assert written(run) == []


def test_storage_that_fails_leaves_the_stacks_to_the_log(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    run.stacks.rmdir()
    run.stacks.touch()
    assert publish(FINDING, where(run)) == 76
    assert written(run) == ["a0001_r00000.json"]
    assert caplog.messages == ["nothing has moved for 41 s; rank 3 on n2: no answer for 40 s", "the stacks\n"]


def test_storage_that_hangs_is_not_waited_for(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "WRITE_S", 0.1)
    pipe = run.stacks / f".a0001.txt.{os.getpid()}.tmp"
    os.mkfifo(pipe)
    assert publish(FINDING, where(run)) == 76
    assert written(run) == [pipe.name]
    with pipe.open("rb") as reader:  # lets the writing thread go
        reader.read()
