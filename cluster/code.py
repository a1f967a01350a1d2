"""Code: the folder that the packages were imported from -> [code] -> a run's snapshot of it, and its digests.

In a git work tree the snapshot holds what git tracks and what it would offer to add, elsewhere the two packages.  Each
file is read once and written, 17 ms for this project's 339: the digests need the bytes anyway, a hard link would
change with its original, and nothing is fsynced, since a snapshot that a power cut spoils is found out at the start.
Where every file is looked at, plain strings and descriptors are half the time of Path objects.  Standard library only.
"""

import errno
import hashlib
import importlib.util
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.runs import UsageError
from cluster.worktree import WorkTreeError, maybe_entries

PACKAGES = ("cluster", "jobs")
STARTER = "cluster/start.py"
MAX_BYTES = 50 << 20
MAX_FILES = 10_000
NUM_NAMED = 3
READ_BYTES = 1 << 20

SECRET_NAMES = frozenset((
    ".env", ".netrc", "_netrc", ".pypirc", ".pgpass", ".git-credentials", ".htpasswd", ".boto", "kubeconfig",
    "credentials", "token",
))  # fmt: skip
SECRET_BEGINNINGS = (
    ".env.", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials.", "secret.", "secrets.", "token.", "tokens.",
)  # fmt: skip
SECRET_ENDINGS = (".env", ".pem", ".key", ".p12", ".pfx", ".keytab", ".kdbx")
SECRET_FOLDERS = frozenset((".aws", ".ssh", ".gnupg", ".kube", ".docker"))
NO_SECRET_ENDINGS = (".py", ".pub", ".example", ".sample", ".template", ".md")  # code, and what is meant to be seen

IS_SECRET = "its name says that it is secret"
IS_SUBMODULE = "a submodule"
IS_REPOSITORY = "a git repository of its own"
IS_ODD = "its name has a line break"


class CodeError(UsageError):
    """The code cannot be kept with the run."""


@dataclass(frozen=True, slots=True)
class Project:
    """The code of a run."""

    root: Path  # the folder that holds the packages, absolute
    is_work_tree: bool  # git knows the packages
    has_untracked: bool
    sizes: Mapping[str, int]  # path relative to the root -> bytes of the file, or of the text of a link
    left_out: Mapping[str, str]  # path -> why a snapshot does not hold it

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())


def packages_folder() -> Path:
    """The folder from which this process has imported the packages."""
    return Path(__file__).absolute().parents[1]


def find_project(root: Path, environ: Mapping[str, str], *, not_in: Sequence[Path] = ()) -> Project:
    """Look through the folder that holds the packages.

    not_in: folders of runs and data, which are no code wherever they lie.

    Raises CodeError: git did not answer in time.
    """
    inside = [str(folder.relative_to(root)) for folder in not_in if folder != root and folder.is_relative_to(root)]
    try:
        entries = maybe_entries(root, environ, inside) or []
    except WorkTreeError as error:
        raise CodeError(f"code: {error}; put large folders into .gitignore, or use code: live") from None
    is_work_tree = any(entry.path == STARTER for entry in entries)  # else it is installed below one
    listed = {entry.path: IS_SUBMODULE if entry.is_submodule else "" for entry in entries}
    if not is_work_tree:
        listed = {path: "" for package in PACKAGES for path in below(root, package)}
    listed = {path: why for path, why in listed.items() if is_code(path, inside)}
    reasons = {path: why or reason_against(path) for path, why in listed.items()}
    sizes = {path: maybe_size(f"{root}/{path}") for path, why in reasons.items() if not why}
    untracked = is_work_tree and any(not entry.is_tracked and entry.path in reasons for entry in entries)
    return Project(
        root,
        is_work_tree,
        untracked,
        {path: size for path, size in sorted(sizes.items()) if size is not None},
        {path: why for path, why in sorted(reasons.items()) if why},
    )


def below(root: Path, folder: str) -> Iterator[str]:
    """Files and links below a folder of the root, relative to the root."""
    for place, folders, names in os.walk(root / folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (str((Path(place) / name).relative_to(root)) for name in (*links, *names))


def is_code(path: str, not_in: Sequence[str]) -> bool:
    """Whether a path may be code: neither what Python compiles, nor a file of a run or of data."""
    if "__pycache__" in path.split("/"):
        return False
    return not any(path.startswith(f"{folder}/") for folder in not_in)


def reason_against(path: str) -> str:
    """Why a file is left out by its name; empty when it is not."""
    if path.endswith("/"):
        return IS_REPOSITORY
    if "\n" in path or "\r" in path:
        return IS_ODD
    *folders, name = path.lower().split("/")
    if not SECRET_FOLDERS.isdisjoint(folders):
        return IS_SECRET
    is_named_so = name in SECRET_NAMES or name.startswith(SECRET_BEGINNINGS) or name.endswith(SECRET_ENDINGS)
    return IS_SECRET if is_named_so and not name.endswith(NO_SECRET_ENDINGS) else ""


def maybe_size(path: str | Path) -> int | None:
    """Bytes of a file or a link; None for what is gone or neither, such as a socket."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:  # deleted, and git has not been told
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode) else None


def check_size(project: Project) -> None:
    """Raises CodeError: a snapshot would be too large, or is no program."""
    advice = "put what is no code into .gitignore, or use code: live; nothing was submitted"
    if STARTER not in project.sizes or not any(path.startswith("jobs/") for path in project.sizes):
        raise CodeError(f"code: {project.root} does not hold the packages cluster and jobs; use code: live")
    if project.num_bytes > MAX_BYTES:
        largest = sorted(project.sizes.items(), key=lambda item: -item[1])[:NUM_NAMED]
        named = ", ".join(f"{path} {megabytes(size)}" for path, size in largest)
        raise CodeError(
            f"code: a snapshot of {project.root} would have {megabytes(project.num_bytes)}, and at most "
            f"{megabytes(MAX_BYTES)} are kept; the largest files: {named}; {advice}"
        )
    if len(project.sizes) > MAX_FILES:
        raise CodeError(
            f"code: {project.root} has {len(project.sizes)} files, and at most {MAX_FILES} are kept; {advice}"
        )


def megabytes(size: int) -> str:
    """An amount for people."""
    return f"{size / (1 << 20):.1f} MiB"


def copy_project(project: Project, folder: Path) -> dict[str, str]:
    """Copy the files into a new folder; returns the lines that file_sums gives of it.

    Raises CodeError: a file cannot be read.  Raises OSError: the storage refused.
    """
    root, parents = project.root, {path.rpartition("/")[0] for path in project.sizes}
    compiled = {parent for parent in parents if has_bytecode(root, parent)}
    for parent in sorted(parents | {f"{parent}/__pycache__" for parent in compiled}):
        (folder / parent).mkdir(parents=True, exist_ok=True)
    sums = {path: copy_file(f"{root}/{path}", f"{folder}/{path}") for path in project.sizes}
    for path in sums:
        parent, _, name = path.rpartition("/")
        if parent in compiled and name.endswith(".py"):
            copy_bytecode(f"{root}/{path}", f"{folder}/{path}", f"{folder}/{parent}/__pycache__")
    return sums


def has_bytecode(root: Path, folder: str) -> bool:
    """Whether a folder of the packages has been compiled; in a job no others are needed."""
    return folder.partition("/")[0] in PACKAGES and (root / folder / "__pycache__").is_dir()


def copy_file(source: str, target: str) -> str:
    """Copy one file or link; returns its digest."""
    try:
        status, data = read_file(source)
    except OSError as error:
        if error.errno == errno.ELOOP:
            Path(target).symlink_to(Path(source).readlink())
            return link_sum(Path(target))
        raise CodeError(f"code: {source} cannot be read: {error.strerror}; nothing was submitted") from None
    times = (status.st_atime_ns, status.st_mtime_ns)
    write_file(
        target, data, 0o755 if status.st_mode & stat.S_IXUSR else 0o644, times if source.endswith(".py") else None
    )
    return hashlib.sha256(data).hexdigest()


def read_file(path: str) -> tuple[os.stat_result, bytes]:
    """What a file is and holds.

    Raises OSError: it cannot be read; with errno.ELOOP it is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        blocks = [os.read(descriptor, status.st_size + 1)]
        while blocks[-1]:
            blocks.append(os.read(descriptor, READ_BYTES))
    finally:
        os.close(descriptor)
    return status, b"".join(blocks)


def write_file(path: str, data: bytes, mode: int, maybe_times: tuple[int, int] | None = None) -> None:
    """Write a new file.

    mode: permissions, less the umask.  maybe_times: when it was read and changed, in nanoseconds.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if maybe_times is not None:
            os.utime(descriptor, ns=maybe_times)
    finally:
        os.close(descriptor)


def copy_bytecode(source: str, target: str, folder: str) -> None:
    """Copy what this Python has compiled of a file, so that a job need not; Python knows by a mark that it is of it.

    target: the file's copy.  folder: for what was compiled.
    """
    compiled = importlib.util.cache_from_source(source)
    try:
        _, data = read_file(compiled)
    except OSError:  # not compiled yet
        return
    copy = os.lstat(target)
    if data[4:16] == struct.pack("<III", 0, int(copy.st_mtime) & 0xFFFF_FFFF, copy.st_size):  # PEP 552
        write_file(f"{folder}/{compiled.rpartition('/')[2]}", data, 0o644)


def link_sum(path: Path) -> str:
    """The digest of a symbolic link: of where it points."""
    return hashlib.sha256(f"link to {path.readlink()}".encode(errors="surrogateescape")).hexdigest()


def file_sums(folder: Path, paths: Sequence[str] | None = None) -> dict[str, str]:
    """Path -> SHA-256 of the files below a folder, sorted by path; without what Python compiles.

    paths: the files, relative to the folder; all of it by default.
    """
    found = sorted(path for path in below(folder, "") if is_code(path, ())) if paths is None else paths
    return {path: one_sum(folder / path) for path in found}


def one_sum(path: Path) -> str:
    """The digest of a file or a link."""
    return link_sum(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()


def live_sums(root: Path) -> dict[str, str]:
    """file_sums of the two packages where they lie."""
    return file_sums(root, [path for package in PACKAGES for path in sorted(below(root, package)) if is_code(path, ())])


def sums_text(sums: Mapping[str, str]) -> str:
    """The digests in the form of sha256sum(1)."""
    return "".join(f"{digest}  {path}\n" for path, digest in sums.items())


def read_sums(text: str) -> dict[str, str]:
    """What sums_text wrote."""
    return {path: digest for digest, path in (line.split("  ", 1) for line in text.splitlines())}


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Files that were changed, added or removed."""
    return tuple(sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path)))
