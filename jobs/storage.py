"""Storage: [storage] is the file operations that a save is made of, one method each; checkpoint -> [storage] -> disk.

They stand apart so that their order can be recorded, and proved against every way in which a power cut can lose or
reorder what was not synced.
"""

import errno
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from cluster.runs import sync_folder


class Storage:
    """A file system, as a save uses it."""

    def create(self, path: Path) -> BinaryIO:
        """A new, empty file."""
        return path.open("wb")

    def sync(self, file: BinaryIO) -> None:
        """Make the content of an open file survive a power cut."""
        file.flush()
        os.fsync(file.fileno())

    def sync_file(self, path: Path) -> None:
        """Make the content of a file that others write survive a power cut; one that is not there has none."""
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name; what had that name is gone."""
        old.replace(new)

    def unlink(self, path: Path) -> None:
        """Remove a name, if it is there."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Make new, changed and removed names of a folder survive a power cut."""
        sync_folder(folder)


class HashedFile:
    """A file being written, and the SHA-256 and size of what has been; torch.save writes into it from front to back."""

    def __init__(self, file: BinaryIO) -> None:
        """file: open and empty."""
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0  # bytes
        self.maybe_error: OSError | None = None  # what the storage said when it failed

    def write(self, data: bytes | memoryview) -> int:
        """Append data.

        Raises OSError: the storage failed; it is kept too, since torch.save raises something of its own in its place.
        """
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.maybe_error = error
            raise
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save calls it; what counts is the sync that follows."""
        self._file.flush()

    def hexdigest(self) -> str:
        """SHA-256 of all that was written, hexadecimal."""
        return self._digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below a folder; a quota may allow less."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def reserve(path: Path, size: int) -> None:
    """Write a file of this size and remove it again, to find out whether the folder takes it.

    size: bytes.  Space is reserved without writing it where the file system can do that.

    Raises OSError: the folder is read-only, full, or over its quota.
    """
    try:
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
            file.write(b"trial")
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
