"""cluster.logs: the lines of ranks, attempt after attempt, filtered, followed to the end, whatever bytes they hold."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.log_copy import LogCopy, keep_by
from cluster.logs import answer
from cluster.runs import RunFolder, write_json
from tests.executables import put_executable
from tests.run_folders import environment, make_run
from tests.training import REPOSITORY, command

HEAD = "2026-01-02T03:04:05.678Z"
FIRST = (
    f"{HEAD} r00000 I one\n{HEAD} r00001 W two\n{HEAD} r00001 E three\n"
    f"Fatal Python error: Bus error\n{HEAD} r00010 C four\n"
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


@pytest.fixture
def run(tmp_path: Path, environ: dict[str, str]) -> RunFolder:
    """A run whose first attempt was preempted and whose second goes on."""
    folder = make_run(tmp_path, environ, 17, "training")
    folder.append_event("attempt_started", attempt=1, job_id="17", nodes=["n1", "n2"], world_size=4)
    (folder.attempts / "0001").write_text('{"job_id": "17", "time": "T1"}')
    (folder.attempts / "0002").write_text('{"job_id": "17", "time": "T2"}')
    folder.attempt_log(1).write_text(FIRST)
    folder.attempt_log(2).write_text(f"{HEAD} r00000 I five\n")
    stop(folder, 1)
    return folder


def stop(run: RunFolder, attempt: int, action: str = "requeue") -> None:
    said = {
        "attempt": attempt,
        "outcome": "stopped",
        "reason": "preempted (SIGTERM), saved at step 40",
        "action": action,
    }
    write_json(run.verdict(attempt), said)


def logs(environ: Mapping[str, str], *words: object) -> "subprocess.CompletedProcess[bytes]":
    out, errors = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = answer([*map(str, words)], environ)
    out.flush()
    return subprocess.CompletedProcess("", code, out.buffer.getvalue(), errors.getvalue().encode())


BEGIN_1 = "--- attempt 1: job 17 on n1, n2, 4 ranks, T1 ---\n"
END_1 = "--- attempt 1 stopped: preempted (SIGTERM), saved at step 40; next: requeue ---\n"
BEGIN_2 = "--- attempt 2: job 17, T2 ---\n"


def test_all_attempts_are_shown_in_their_order(run: RunFolder, environ: dict[str, str]) -> None:
    done = logs(environ, "17")
    expected = f"{BEGIN_1}{FIRST}{END_1}{BEGIN_2}{HEAD} r00000 I five\n"
    assert (done.stdout.decode(), done.stderr, done.returncode) == (expected, b"", 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--attempt", 2), f"{BEGIN_2}{HEAD} r00000 I five\n"),
        (("--rank", 1), f"{BEGIN_1}{HEAD} r00001 W two\n{HEAD} r00001 E three\n{END_1}{BEGIN_2}"),
        (("--rank", 1, "--level", "E"), f"{BEGIN_1}{HEAD} r00001 E three\n{END_1}{BEGIN_2}"),
        (
            ("--level", "E"),
            f"{BEGIN_1}{HEAD} r00001 E three\nFatal Python error: Bus error\n{HEAD} r00010 C four\n{END_1}{BEGIN_2}",
        ),
    ],
    ids=["attempt", "rank", "rank and level", "level"],
)
def test_lines_are_chosen_by_rank_level_and_attempt(
    run: RunFolder, environ: dict[str, str], words: tuple[object, ...], expected: str
) -> None:
    done = logs(environ, "17", *words)
    assert (done.stdout.decode(), done.returncode) == (expected, 0)


def test_choice_without_any_line_is_a_bad_answer(run: RunFolder, environ: dict[str, str]) -> None:
    done = logs(environ, "17", "--rank", 3)
    num_lines = sum(len(run.attempt_log(attempt).read_bytes().splitlines()) for attempt in (1, 2))
    said = f"none of {num_lines} lines is of the rank or the level that was asked for\n"
    assert (done.stderr.decode(), done.returncode) == (said, 1)


def test_attempt_that_was_never_made_is_named(run: RunFolder, environ: dict[str, str]) -> None:
    done = logs(environ, "17", "--attempt", 3)
    assert (done.stderr.decode(), done.returncode) == (f"--attempt 3: {run.path} has attempts 1 to 2\n", 2)


def test_rank_of_six_digits_is_found() -> None:
    assert keep_by(123456, None)(f"{HEAD} r123456 I x\n".encode())
    assert not keep_by(12345, None)(f"{HEAD} r123456 I x\n".encode())


def test_odd_bytes_are_passed_on_as_they_are(run: RunFolder, environ: dict[str, str]) -> None:
    odd = b"\x00\xff\xfe no text \x1b[31m\r\n" + b"x" * 100_000 + b"\n"
    run.attempt_log(2).write_bytes(odd)
    assert logs(environ, "17", "--attempt", 2).stdout == BEGIN_2.encode() + odd


def test_line_that_was_cut_short_is_ended(run: RunFolder, environ: dict[str, str]) -> None:
    run.attempt_log(1).write_text("cut sho")
    assert logs(environ, "17", "--attempt", 1).stdout.decode() == f"{BEGIN_1}cut sho\n{END_1}"


def test_reader_that_has_seen_enough_ends_it_quietly(run: RunFolder, environ: dict[str, str]) -> None:
    run.attempt_log(2).write_text(f"{HEAD} r00000 I five\n" * 100_000)
    line = f"{sys.executable} -m cluster.logs 17 | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{BEGIN_1}141\n", "")


def test_growing_log_is_copied_by_whole_lines_and_once(run: RunFolder) -> None:
    seen: list[bytes] = []
    copy = LogCopy(run, seen.append, after=1, has_banners=False)
    copy.copy(is_last=False)
    with run.attempt_log(2).open("a") as log:
        log.write("half a")
    copy.copy(is_last=False)
    assert b"".join(seen) == f"{HEAD} r00000 I five\n".encode()
    with run.attempt_log(2).open("a") as log:
        log.write(" line\nand half")
    copy.copy(is_last=True)
    assert b"".join(seen).decode() == f"{HEAD} r00000 I five\nhalf a line\nand half\n"


@pytest.mark.parametrize(("end", "code"), [("finish", 0), ("stop", 75), ("fail", 1)])
def test_run_is_followed_to_its_end_and_the_exit_code_says_which(
    tmp_path: Path, run: RunFolder, environ: dict[str, str], end: str, code: int
) -> None:
    alive = f"17|17|RUNNING|N/A|1:00|n1||None|{run.path}/s"
    put_executable(tmp_path / "bin", "squeue", f"test -e {tmp_path}/gone || echo '{alive}'")
    following = subprocess.Popen(
        command("cluster.logs", "17", "-f"),
        env=environ,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert [following.stdout.readline() for _ in range(9)][-1] == f"{HEAD} r00000 I five\n"
    with run.attempt_log(2).open("a") as log:
        log.write(f"{HEAD} r00000 I six\n")
    assert following.stdout.readline() == f"{HEAD} r00000 I six\n"
    (tmp_path / "gone").touch()
    if end == "finish":
        run.summary.write_text('{"attempts": 2}')
    elif end == "stop":
        stop(run, 2, action="leave")
    else:
        write_json(run.verdict(2), {"attempt": 2, "outcome": "failed", "reason": "boom", "action": "stop"})
    rest, errors = following.communicate()
    ends = {"stop": "attempt 2 stopped: preempted (SIGTERM), saved at step 40", "fail": "attempt 2 failed: boom"}
    assert rest == (f"--- {ends[end]} ---\n" if end in ends else "")
    word = {0: "finished", 75: "stopped and is saved", 1: "failed"}[code]
    assert (following.returncode, errors) == (code, f"the run has {word}\n")


def test_run_none_of_whose_ranks_was_started_shows_its_jobs_log(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 18, "pending")
    done = logs(environ, "18")
    assert (done.stdout, done.returncode) == (b"", 1)
    assert done.stderr.decode() == f"no rank of {run.path} was started yet\n"
    run.batch_log("18").write_bytes(b"odd \xff\nsetup: line 2 of 3 (cd x) ended with exit code 1\n")
    done = logs(environ, "18")
    assert done.stdout == b"--- batch_18.log ---\nodd \xff\nsetup: line 2 of 3 (cd x) ended with exit code 1\n"
    said = f"no rank of {run.path} was started yet: setup: line 2 of 3 (cd x) ended with exit code 1\n"
    assert (done.stderr.decode(), done.returncode) == (said, 1)


def test_run_without_a_supervisor_has_no_log_of_ours(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 19, "training", route="direct")
    done = logs(environ, run.path)
    said = f"{run.path} was started without a supervisor: its ranks write where their command was started\n"
    assert (done.stderr.decode(), done.returncode) == (said, 1)


def test_usage_is_told(run: RunFolder, environ: dict[str, str]) -> None:
    assert logs(environ, "nobody").returncode == 2
    with pytest.raises(SystemExit) as caught:
        logs(environ, "17", "-f", "--attempt", 1)
    assert caught.value.code == 2
