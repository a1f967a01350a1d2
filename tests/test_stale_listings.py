"""Decisions on a storage that keeps listings for a minute, as NFS does: they go by what others have made by now.

Looked for, and now looked at afresh: the claim of an attempt (it would have tried the same number in a busy loop),
whether a later attempt owns the run (before a checkpoint is renamed, at a restore, before the summary and the
verdict), marks, the summary and failures of ranks (at a supervisor's start and at the end of an attempt), and the
checkpoints to go on from.  Left as they are: each line of metrics and each heartbeat, which would cost two operations
each and are covered by the next checkpoint; views, which decide nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.runs import RunFolder, SupersededError, look_afresh, manifest_steps, write_json
from cluster.supervise import maybe_exit_code_by_marks


class CachedPath(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """A path whose folder's listing stays as it was first seen, until this machine changes something in the folder."""

    listings: ClassVar[dict[str, list[str]]] = {}

    def names(self) -> list[str]:
        return self.listings.setdefault(str(self), [path.name for path in Path(self).iterdir()])

    def iterdir(self) -> Iterator["CachedPath"]:
        return iter([self / name for name in self.names()])

    def exists(self) -> bool:
        return self.name in CachedPath(self.parent).names()

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        Path(self).touch(mode, exist_ok)
        self.listings.pop(str(self.parent), None)


@pytest.fixture
def here(tmp_path: Path) -> RunFolder:
    """A run as this machine sees it."""
    CachedPath.listings.clear()
    return RunFolder(CachedPath(tmp_path))


@pytest.fixture
def there(tmp_path: Path) -> RunFolder:
    """The same, on another machine, which makes it."""
    run = RunFolder(tmp_path)
    run.make()
    run.claim_attempt({})
    return run


def test_attempt_is_claimed_behind_one_that_the_listing_does_not_show(there: RunFolder, here: RunFolder) -> None:
    assert here.latest_attempt() == 1
    there.claim_attempt({})
    assert here.latest_attempt() == 1  # as NFS says
    assert here.claim_attempt({}) == 3


def test_later_attempt_is_seen_before_anything_is_published(there: RunFolder, here: RunFolder) -> None:
    here.check_owner(1, afresh=True)
    there.claim_attempt({})
    here.check_owner(1)
    with pytest.raises(SupersededError):
        here.check_owner(1, afresh=True)


def test_mark_of_another_machine_is_seen_at_a_start(there: RunFolder, here: RunFolder) -> None:
    assert maybe_exit_code_by_marks(here) is None
    there.cancel_mark.write_text("{}")
    assert not here.cancel_mark.exists()
    assert maybe_exit_code_by_marks(here) == 1


def test_checkpoints_and_failures_of_other_machines_are_seen(there: RunFolder, here: RunFolder) -> None:
    assert (manifest_steps(here.checkpoints), list(here.failures.iterdir())) == ([], [])
    write_json(there.checkpoints / "step_00000007.json", {})
    (there.failures / "a0001_r00000.json").write_text(json.dumps({}))
    assert manifest_steps(here.checkpoints) == []
    here.look_afresh()
    assert manifest_steps(here.checkpoints) == [7]
    assert [path.name for path in here.failures.iterdir()] == ["a0001_r00000.json"]


def test_look_leaves_nothing_and_a_storage_that_takes_nothing_is_read_as_it_is(tmp_path: Path) -> None:
    look_afresh(tmp_path)
    look_afresh(tmp_path / "nosuch")
    assert list(tmp_path.iterdir()) == []
