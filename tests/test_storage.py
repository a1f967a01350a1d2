"""File operations of a save."""

import errno
import hashlib
import io
from pathlib import Path

import pytest

from jobs.storage import HashedFile, Storage, free_bytes, reserve


class FullFile(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_file_is_hashed_while_it_is_written() -> None:
    file = io.BytesIO()
    hashed = HashedFile(file)
    for part in (b"abc", memoryview(b"def")):
        hashed.write(part)
    assert (file.getvalue(), hashed.size) == (b"abcdef", 6)
    assert hashed.hexdigest() == hashlib.sha256(b"abcdef").hexdigest()


def test_storages_own_error_is_kept() -> None:
    hashed = HashedFile(FullFile())
    with pytest.raises(OSError, match="No space left"):
        hashed.write(b"abc")
    assert hashed.maybe_error is not None
    assert (hashed.maybe_error.errno, hashed.size) == (errno.ENOSPC, 0)


def test_reservation_leaves_nothing_behind(tmp_path: Path) -> None:
    reserve(tmp_path / "trial.tmp", 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_more_than_is_free_cannot_be_reserved(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left|File too large") as caught:
        reserve(tmp_path / "trial.tmp", free_bytes(tmp_path) * 2)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_not_there_needs_no_sync(tmp_path: Path) -> None:
    Storage().sync_file(tmp_path / "metrics.jsonl")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reserve(tmp_path / "missing" / "trial.tmp", 10)
    assert list(tmp_path.iterdir()) == []
