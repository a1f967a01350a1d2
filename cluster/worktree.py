"""Work tree: the folder of the code -> [worktree] -> what git says of it.  Standard library only.

Nothing is changed, the index included.  Where there is no git, no work tree, or one that git does not trust, there is
no answer.
Sources: git-ls-files(1), git-diff(1), gitglossary(7) "pathspec", git 2.20 and newer.
"""

import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIT_S = 60.0  # for looking through the work tree
MAX_DIFF_BYTES = 1 << 20  # what is kept of a diff
STAGED = re.compile(rb"[A-Z] (\d{6}) [0-9a-f]+ \d\t(.+)", re.DOTALL)  # git ls-files -t -s
SUBMODULE_MODE = b"160000"
GLOB = re.compile(r"([\\*?\[ ])")  # gitignore(5)


class WorkTreeError(RuntimeError):
    """git did not answer in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file that git tracks, or would offer to add."""

    path: str  # relative; of a repository within this one it ends with a slash
    is_tracked: bool
    is_submodule: bool


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs from the last commit in the tracked files."""

    kept: bytes  # its first MAX_DIFF_BYTES
    num_bytes: int
    sha256: str


def maybe_git(root: Path, words: Sequence[str], environ: Mapping[str, str]) -> bytes | None:
    """What a git command prints; None when it fails.

    Raises WorkTreeError: no answer in time.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(
            command, env=kept | {"GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, timeout=GIT_S, check=False
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise WorkTreeError(f"{' '.join(command[:5])} gave no answer within {GIT_S:.0f} s") from None
    return done.stdout if done.returncode == 0 else None


def maybe_entries(root: Path, environ: Mapping[str, str], not_in: Sequence[str]) -> list[Entry] | None:
    """The files below a folder; None when git cannot say.

    not_in: folders below it, with slashes, that git need not look through for files it does not track.
    """
    skipped = ["--exclude=/" + GLOB.sub(r"\\\1", folder) + "/" for folder in not_in]
    words = ["ls-files", "-z", "-t", "-s", "--cached", "--others", "--exclude-standard", *skipped]
    listed = maybe_git(root, words, environ)
    if listed is None:
        return None
    found: dict[str, Entry] = {}
    for line in filter(None, listed.split(b"\0")):
        staged = STAGED.fullmatch(line)
        path = (staged[2] if staged else line[2:]).decode(errors="surrogateescape")
        found[path] = Entry(path, staged is not None, staged is not None and staged[1] == SUBMODULE_MODE)
    return list(found.values())


def maybe_commit(root: Path, environ: Mapping[str, str]) -> str | None:
    """The commit that is checked out."""
    answer = maybe_git(root, ["rev-parse", "--verify", "HEAD"], environ)
    return None if answer is None else answer.decode().strip()


def maybe_diff(root: Path, environ: Mapping[str, str], not_these: Sequence[str]) -> Diff | None:
    """What differs from the commit below a folder.

    not_these: files whose contents must not be told.
    """
    paths = [".", *(f":(exclude,literal){path}" for path in not_these)]
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--relative", "HEAD", "--", *paths]
    text = maybe_git(root, words, environ)
    if text is None:
        return None
    return Diff(text[:MAX_DIFF_BYTES], len(text), hashlib.sha256(text).hexdigest())
