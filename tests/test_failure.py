"""Failures of a rank: what they count as, what they leave behind, how the process ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.allocation import AllocationError
from cluster.rank import RankError
from cluster.runs import RunError, SupersededError, UsageError
from cluster.spec import SpecError
from jobs.checkpoint import CheckpointError
from jobs.data import DataError
from jobs.device import DeviceError
from jobs.failure import Whereabouts, kind_of, record
from jobs.loop import NanLossError
from jobs.rendezvous import PortError, RendezvousError

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *[
            (error("x"), "usage")
            for error in (AllocationError, RankError, RunError, DataError, DeviceError, UsageError)
        ],
        (SpecError(["configs/a.yaml:1: x"]), "usage"),
        (RendezvousError("no store"), "connection"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:5"), "connection"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:1: Connection reset by peer"),
            "connection",
        ),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv"), "connection"),
        (RuntimeError("NCCL communicator was aborted on rank 0."), "connection"),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), "connection"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "exception"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (NanLossError("the loss of step 3 is nan"), "nan"),
        (PortError("rank 0 can bind no port"), "port"),
        (CheckpointError("step_00000001.pt: 1 bytes"), "exception"),
        (ValueError("x"), "exception"),
        (OSError(28, "No space left on device"), "disk"),
        (FileNotFoundError(2, "No such file or directory"), "exception"),
        (KeyError("x"), "exception"),
    ],
)
def test_kind_of_an_error(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def raised(text: str) -> Exception:
    """An exception with a traceback."""
    try:
        raise OSError(28, text)
    except OSError as error:
        return error


def test_record_of_a_failure_never_holds_the_value_of_a_secret(tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    where = Whereabouts(attempt=1, maybe_run_dir=tmp_path, environ={"HF_TOKEN": "abcdefgh"})
    record(raised("no access with abcdefgh"), "exception", 1, where)
    (path,) = (tmp_path / "failures").iterdir()
    content = json.loads(path.read_text())
    assert content["exception"] == "OSError: [Errno 28] no access with [hidden]"
    assert "abcdefgh" not in path.read_text()


def test_first_record_of_a_rank_stays(tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    where = Whereabouts(rank=17, attempt=2, maybe_run_dir=tmp_path)
    first = raised("first\nsecond line")
    record(first, "exception", 1, where)
    record(raised("later"), "exception", 1, where)
    (path,) = (tmp_path / "failures").iterdir()
    assert path.name == "a0002_r00017.json"
    content = json.loads(path.read_text())
    assert content.pop("traceback").splitlines()[0] == "Traceback (most recent call last):"
    assert (content.pop("time")[-1], bool(content.pop("host"))) == ("Z", True)
    assert content == {
        "format_version": 1,
        "attempt": 2,
        "rank": 17,
        "step": 0,
        "kind": "exception",
        "exit_code": 1,
        "exception": "OSError: [Errno 28] first",
    }


LEAVE = """
import sys
from pathlib import Path
from cluster.runs import SupersededError, UsageError, make_logger
from jobs.failure import Whereabouts, leave

make_logger("r00003", {})
errors = {"UsageError": UsageError("mend this"), "SupersededError": SupersededError("attempt 9 owns it")}
try:
    raise errors.get(sys.argv[1], RuntimeError("boom"))
except Exception as error:
    where = Whereabouts(rank=3, attempt=int(sys.argv[2]), maybe_run_dir=Path(sys.argv[3]))
    try:
        leave(error, where)
    finally:
        print("cleaned up")
"""


def leave_as(error: type[BaseException], attempt: int, folder: Path) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Exit code, what was said, and the records of a process that leaves because of an error."""
    finished = subprocess.run(
        [sys.executable, "-c", LEAVE, error.__name__, str(attempt), str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert finished.stdout == ""  # no clean-up of any kind
    said = [line.split(" ", 1)[1] for line in finished.stderr.splitlines()]
    failures = folder / "failures"
    records = [json.loads(path.read_text()) for path in failures.iterdir()] if failures.exists() else []
    return finished.returncode, said, records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder."""
    (tmp_path / "failures").mkdir()
    return tmp_path


def test_failed_rank_leaves_with_code_1_its_traceback_and_a_record(folder: Path) -> None:
    code, said, records = leave_as(RuntimeError, 2, folder)
    assert (code, said[0], said[-1]) == (
        1,
        "r00003 E Traceback (most recent call last):",
        "r00003 E RuntimeError: boom",
    )
    assert [(content["kind"], content["exit_code"], content["exception"]) for content in records] == [
        ("exception", 1, "RuntimeError: boom")
    ]
    assert records[0]["traceback"].splitlines() == [line.removeprefix("r00003 E ") for line in said]


def test_what_the_user_can_mend_ends_with_code_2_and_without_a_traceback(folder: Path) -> None:
    code, said, records = leave_as(UsageError, 2, folder)
    assert (code, said, [content["kind"] for content in records]) == (2, ["r00003 E mend this"], ["usage"])


def test_superseded_rank_writes_nothing(folder: Path) -> None:
    assert leave_as(SupersededError, 2, folder) == (1, ["r00003 E attempt 9 owns it"], [])


def test_failure_before_the_attempt_is_known_leaves_no_record(folder: Path) -> None:
    code, _, records = leave_as(RuntimeError, 0, folder)
    assert (code, records) == (1, [])


def test_record_that_cannot_be_written_does_not_change_the_end(tmp_path: Path) -> None:
    code, said, records = leave_as(UsageError, 2, tmp_path)
    path = tmp_path / "failures" / "a0002_r00003.json"
    assert (code, records) == (2, [])
    assert said == [
        "r00003 E mend this",
        f"r00003 E no record of this failure could be written: [Errno 2] No such file or directory: '{path}'",
    ]


def test_errors_are_told_apart_without_importing_torch() -> None:
    code = (
        "import sys; from jobs.failure import kind_of; "
        "print(kind_of(ImportError('libtorch.so')), kind_of(RuntimeError('x')), 'torch' in sys.modules)"
    )
    told = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    assert told == "exception exception False\n"


ENDED = """
import os, threading
from pathlib import Path
from cluster.runs import make_logger
from jobs.failure import Whereabouts, leave

make_logger("r00003", {})
threading.Timer(0.5, lambda: os._exit(76)).start()
where = Whereabouts(rank=3, attempt=2, maybe_run_dir=Path.cwd(), is_being_ended=True)
leave(RuntimeError("Connection closed by peer"), where)
"""


def test_what_fails_while_the_watch_ends_a_rank_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ENDED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (76, "")
    assert list((tmp_path / "failures").iterdir()) == []
