"""Run folder: what is published whole, what only grows, and who may write."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cluster.runs import (
    FORMAT_VERSION,
    READERS,
    RELEASE,
    LineHandler,
    RunFolder,
    SupersededError,
    append_line,
    new_run_id,
    read_lines,
    seconds_between,
    utc_text,
    write_atomic,
    write_json,
)

REPOSITORY = Path(__file__).parents[1]
MOMENT = datetime(2026, 1, 2, 4, 4, 5, 678_900, tzinfo=timezone(timedelta(hours=1)))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo" / "20260102-030405-0a1b")
    folder.make()
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_run_id_sorts_by_time_in_utc_and_differs_within_a_second() -> None:
    assert new_run_id(MOMENT, "0a1b") == "20260102-030405-0a1b"
    assert len({new_run_id(MOMENT) for _ in range(20)}) > 1
    assert new_run_id(MOMENT) < new_run_id(MOMENT + timedelta(seconds=1))


def test_times_are_utc_to_the_millisecond_and_can_be_subtracted() -> None:
    assert utc_text(MOMENT) == "2026-01-02T03:04:05.678Z"
    assert seconds_between(utc_text(MOMENT), utc_text(MOMENT + timedelta(minutes=1, milliseconds=5))) == 60.005


def test_line_that_a_kill_cut_short_is_left_out_and_the_next_one_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"step": 1, "text": "größer"})
    with path.open("ab") as file:
        file.write('{"step": 2, "text": "gr\u00f6'.encode()[:-1])  # in the middle of a character
    assert list(read_lines(path)) == [{"step": 1, "text": "größer"}]
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [{"step": 1, "text": "größer"}, {"step": 3}]


def test_file_of_lines_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "events.jsonl")) == []


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from cluster.runs import append_line\n"
        "for n in range(50): append_line(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, 'text': 'x' * 3000})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), who], cwd=REPOSITORY) for who in ("a", "b", "c")
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = sorted((line["who"], line["n"], len(line["text"])) for line in read_lines(path))
    assert found == [(who, n, 3000) for who in ("a", "b", "c") for n in range(50)]


def test_event_has_its_time_name_attempt_and_job_before_its_own_fields(run: RunFolder) -> None:
    run.append_event("checkpoint_saved", attempt=2, job_id="17", step=40)
    event = run.read_events()[0]
    assert list(event) == ["time", "event", "attempt", "job_id", "step"]
    assert {**event, "time": ""} == {
        "time": "", "event": "checkpoint_saved", "attempt": 2, "job_id": "17", "step": 40,
    }  # fmt: skip


def test_attempts_claimed_at_once_by_several_processes_get_different_numbers(run: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.runs import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1])); print([run.claim_attempt({'job_id': sys.argv[2]}) for _ in range(10)])"
    )
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(run.path), str(job)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        for job in range(4)
    ]
    claimed = {str(job): json.loads(claimer.communicate()[0]) for job, claimer in enumerate(claimers)}
    assert sorted(number for numbers in claimed.values() for number in numbers) == list(range(1, 41))
    owners = {number: run.read_attempt(number)["job_id"] for number in range(1, 41)}
    assert owners == {number: job for job, numbers in claimed.items() for number in numbers}


def test_claim_records_its_owner(run: RunFolder) -> None:
    assert run.latest_attempt() == 0
    assert run.claim_attempt({"job_id": "17", "host": "n1", "pid": 4}) == 1
    assert {**run.read_attempt(1), "time": ""} == {
        "format_version": 1, "release": RELEASE, "attempt": 1, "time": "", "job_id": "17", "host": "n1", "pid": 4,
    }  # fmt: skip


def test_release_is_the_packages_and_reads_its_own_form() -> None:
    version = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == RELEASE == READERS[FORMAT_VERSION]


@pytest.mark.parametrize("content", [None, "", '{"job_id": "1'])
def test_attempt_whose_owner_has_not_written_yet_has_none(run: RunFolder, content: str | None) -> None:
    if content is not None:
        (run.attempts / "0001").write_text(content)
    assert run.read_attempt(1) == {}


def test_owner_goes_on_until_a_later_attempt_is_claimed(run: RunFolder) -> None:
    attempt = run.claim_attempt({})
    run.check_owner(attempt)
    run.claim_attempt({})
    with pytest.raises(SupersededError) as caught:
        run.check_owner(attempt)
    assert str(caught.value) == f"attempt 2 owns {run.path}; attempt 1 writes nothing more"


def test_published_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    write_json(path, {"name": "größer"})
    assert path.read_text() == '{\n  "format_version": 1,\n  "name": "größer"\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_keeps_the_old_content_and_leaves_nothing_else(small_disk: Path) -> None:
    path = small_disk / "spec.yaml"
    write_atomic(path, "old")
    with pytest.raises(OSError, match="No space left on device"):
        write_atomic(path, b"x" * 200_000)
    assert path.read_text() == "old"
    assert list(small_disk.iterdir()) == [path]


def test_json_file_that_is_not_there_yet_is_empty(run: RunFolder) -> None:
    assert run.read_json(run.summary) == {}


def test_every_log_line_has_time_speaker_and_level_even_where_a_text_has_several() -> None:
    reader, writer = os.pipe()
    record = logging.LogRecord("run", logging.WARNING, __file__, 1, "one %s\ntwo \udcff", ("größer",), None)
    record.created = MOMENT.timestamp()
    LineHandler("r00017", writer).emit(record)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        assert file.read() == (
            "2026-01-02T03:04:05.678Z r00017 W one größer\n2026-01-02T03:04:05.678Z r00017 W two \\udcff\n"
        )


def test_log_line_that_cannot_be_written_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    LineHandler("r00000", writer).emit(logging.LogRecord("run", logging.INFO, __file__, 1, "text", (), None))
    os.close(writer)


def test_log_line_never_holds_the_value_of_a_secret() -> None:
    reader, writer = os.pipe()
    handler = LineHandler("r00000", writer, environ={"HF_TOKEN": "abcdefgh", "NAME": "demo-name"})
    handler.emit(logging.LogRecord("run", logging.INFO, __file__, 1, "%s and %s", ("abcdefgh", "demo-name"), None))
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read().split(" I ")[1] == "[hidden] and demo-name\n"


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_new_folder_and_what_is_written_in_it_are_as_readable_as_asked(tmp_path: Path, mode: int, umask: int) -> None:
    os.umask(umask)
    run = RunFolder(tmp_path / "runs" / "demo" / "a")
    run.make(mode)
    run.take_umask()
    run.append_event("submitted", attempt=0, job_id="7")
    write_json(run.heartbeat, {})
    run.claim_attempt({})
    (run.checkpoints / "bad").mkdir()
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (run.path, *run.path.rglob("*"))}
    assert modes == {True: mode, False: mode & 0o666}
    assert run.path.parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_folder_that_exists_keeps_the_permissions_that_its_owner_gave_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    run.make()
    run.path.chmod(0o2755)
    run.make(0o700)
    assert run.path.stat().st_mode & 0o7777 == 0o2755


def test_new_folder_keeps_the_group_of_shared_storage(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    run = RunFolder(tmp_path / "a")
    run.make(0o750)
    assert run.path.stat().st_mode & 0o7777 == run.logs.stat().st_mode & 0o7777 == 0o2750
