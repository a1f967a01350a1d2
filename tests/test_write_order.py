"""Order of writes: a power cut at any moment of a save, with whatever it loses or reorders, leaves a good checkpoint.

Saves run on a recorder of their file operations.  For every prefix of that record all states are built that a file
system may be in afterwards: content that was not synced is gone, half there or whole; names that were changed since the
last sync of their folder are as before or as after, each for itself.  What each sync is for is shown by leaving it out.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch

from cluster.runs import RunFolder, append_line, manifest_steps
from jobs.checkpoint import CheckpointError, data_path, load, load_newest, prune, read_manifest, save, verify
from jobs.storage import Storage


@dataclass(frozen=True)
class Operation:
    """One call of the storage; `committed` is what has been promised when it is about to happen."""

    kind: str  # create, write, sync, rename, unlink, sync_folder
    name: str = ""  # below the run folder
    new_name: str = ""
    data: bytes = b""
    committed: int = 0  # the last step whose save has returned


@dataclass
class Recorder(Storage):
    """The real storage, and a record of what was asked of it."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    committed: int = 0

    def note(self, kind: str, path: Path, new: Path | None = None, data: bytes = b"") -> None:
        name, new_name = (str(each.relative_to(self.root)) if each else "" for each in (path, new))
        self.operations.append(Operation(kind, name, new_name, data, self.committed))

    def create(self, path: Path) -> BinaryIO:
        self.note("create", path)
        return cast(BinaryIO, RecordedFile(super().create(path), self, path))

    def sync(self, file: BinaryIO) -> None:
        recorded = cast(RecordedFile, file)
        super().sync(recorded.file)
        self.note("sync", recorded.path)

    def sync_file(self, path: Path) -> None:
        super().sync_file(path)
        self.note("sync", path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.note("rename", old, new)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.note("unlink", path)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.note("sync_folder", folder)

    def end_save(self, step: int) -> None:
        self.committed = step
        self.operations.append(Operation("returned", committed=step))


@dataclass
class RecordedFile:
    """A file whose writes are noted."""

    file: BinaryIO
    recorder: Recorder
    path: Path

    def write(self, data: bytes | memoryview) -> int:
        self.recorder.note("write", self.path, data=bytes(data))
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def __enter__(self) -> "RecordedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@dataclass
class Disk:
    """What is on the disk for certain, and what may be."""

    names: dict[str, int] = field(default_factory=dict)  # name -> number of the file it stands for
    changes: list[Operation] = field(default_factory=list)  # of names, since their folder was synced
    now: dict[str, int] = field(default_factory=dict)  # names as processes see them
    synced: list[bytes] = field(default_factory=list)  # content per file
    written: list[bytes] = field(default_factory=list)

    def apply(self, done: Operation) -> None:
        """Take in the next operation of a record."""
        if done.kind == "create":
            self.now[done.name] = len(self.synced)
            self.synced.append(b"")
            self.written.append(b"")
            self.changes.append(replace(done, data=str(self.now[done.name]).encode()))
        elif done.kind == "write":
            self.written[self.now[done.name]] += done.data
        elif done.kind == "sync":
            self.synced[self.now[done.name]] = self.written[self.now[done.name]]
        elif done.kind == "rename":
            number = self.now.pop(done.name)
            self.now[done.new_name] = number
            self.changes.append(replace(done, data=str(number).encode()))
        elif done.kind == "unlink" and done.name in self.now:
            del self.now[done.name]
            self.changes.append(done)
        elif done.kind == "sync_folder":
            waiting = [change for change in self.changes if not is_in(change.name, done.name)]
            self.names = {name: number for name, number in self.names.items() if not is_in(name, done.name)}
            self.names |= {name: number for name, number in self.now.items() if is_in(name, done.name)}
            self.changes = waiting

    def states(self) -> Iterator[dict[str, bytes]]:
        """Every content that the disk may have after a power cut now."""
        for kept in itertools.product((False, True), repeat=len(self.changes)):
            names = dict(self.names)
            for change in itertools.compress(self.changes, kept):
                names.pop(change.name, None)
                if change.kind != "unlink":
                    names[change.new_name or change.name] = int(change.data)
            choices = [self.contents(number) for number in names.values()]
            for contents in itertools.product(*choices):
                yield dict(zip(names, contents, strict=True))

    def contents(self, number: int) -> list[bytes]:
        """What one file may hold."""
        certain, whole = self.synced[number], self.written[number]
        half = whole[: (len(certain) + len(whole)) // 2]
        return list(dict.fromkeys([certain, half, whole]))


def is_in(name: str, folder: str) -> bool:
    """Whether a folder's sync is about a name."""
    return str(Path(name).parent) == folder


def state_at(step: int, metrics_bytes: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((40,), float(step))}, "state": {"step": step, "metrics_bytes": metrics_bytes}}


def log_a_step(run: RunFolder, recorder: Recorder, step: int) -> int:
    """Add a line to metrics.jsonl, as the loop does; returns its length."""
    before = run.metrics.stat().st_size if run.metrics.exists() else 0
    if not before:
        recorder.note("create", run.metrics)
    append_line(run.metrics, {"step": step})
    recorder.note("write", run.metrics, data=run.metrics.read_bytes()[before:])
    return run.metrics.stat().st_size


def saves(root: Path) -> list[Operation]:
    """Three saves with pruning after each, the last of them again at the step of the one before."""
    run = RunFolder(root / "run")
    run.make()
    run.claim_attempt({})
    recorder = Recorder(run.path)
    for step in (1, 2, 3, 3):
        size = log_a_step(run, recorder, step)
        environment = {"world_size": 1}
        save(run, state_at(step, size), step=step, epoch=0, attempt=1, environment=environment, storage=recorder)
        recorder.end_save(step)
        prune(run.checkpoints, keep_last=1, maybe_best_step=None, storage=recorder)
    return recorder.operations


def crash_states(operations: list[Operation]) -> dict[frozenset[tuple[str, bytes]], int]:
    """Contents of the disk -> the step that must not be lost there; the highest, where several moments look alike."""
    disk = Disk()
    found: dict[frozenset[tuple[str, bytes]], int] = {}
    for position in range(len(operations) + 1):
        committed = operations[position - 1].committed if position else 0
        for state in disk.states():
            key = frozenset(state.items())
            found[key] = max(found.get(key, 0), promised(operations, position, committed))
        if position < len(operations):
            disk.apply(operations[position])
    return found


def promised(operations: list[Operation], position: int, committed: int) -> int:
    """The step that a run must be able to go on from; one that is being replaced by itself is not there meanwhile."""
    is_replaced = [done.kind for done in operations[:position]].count("returned") == 3 and position < len(operations)
    return 0 if committed == 3 and is_replaced else committed


def problem_of(folder: Path, state: frozenset[tuple[str, bytes]], committed: int) -> str:
    """What is wrong with a state of the disk; empty when nothing is."""
    run = RunFolder(folder)
    run.make()
    for name, content in state:
        (run.path / name).write_bytes(content)
    for step in manifest_steps(run.checkpoints):
        try:
            verify(data_path(run.checkpoints, step), read_manifest(run.checkpoints, step))
        except (CheckpointError, FileNotFoundError) as error:
            return f"a manifest speaks of data that is not there: {error}"
        length = load(run.checkpoints, read_manifest(run.checkpoints, step))["state"]["metrics_bytes"]
        if not run.metrics.exists() or run.metrics.stat().st_size < length:
            return f"step {step} knows more of metrics.jsonl than there is"
    loaded = load_newest(run, 2)
    newest = loaded.maybe_manifest.step if loaded.maybe_manifest else 0
    return "" if newest >= committed else f"step {committed} was promised, {newest} is the newest"


def problems(folder: Path, operations: list[Operation]) -> tuple[set[str], int]:
    """All that can go wrong with a record, and how many states were tried."""
    states = crash_states(operations)
    found = {problem_of(folder / str(number), *item) for number, item in enumerate(states.items())}
    return found - {""}, len(states)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    return saves(tmp_path_factory.mktemp("record"))


def test_power_cut_at_any_moment_of_a_save_leaves_a_good_checkpoint(record: list[Operation], tmp_path: Path) -> None:
    found, num_states = problems(tmp_path, record)
    print(f"\n{len(record)} operations, {num_states} states of the disk")
    assert found == set()
    assert num_states > 100


SYNCS = {
    "data": (2, 0),
    "names with the data": (2, 1),
    "metrics.jsonl": (2, 2),
    "names with metrics.jsonl": (1, 3),
    "manifest": (2, 4),
    "names with the manifest": (2, 5),
    "old manifest is gone": (3, 0),
    "manifest of the data that is replaced is gone": (4, 1),
}
"""What is synced, and where: number of the save, which of its syncs; a save begins with what the one before prunes."""


@pytest.mark.parametrize("what", SYNCS)
def test_no_sync_of_a_save_can_be_left_out(record: list[Operation], tmp_path: Path, what: str) -> None:
    which, number = SYNCS[what]
    saved = [sum(done.kind == "returned" for done in record[:place]) + 1 for place in range(len(record))]
    syncs = [place for place, done in enumerate(record) if done.kind.startswith("sync") and saved[place] == which]
    found, num_states = problems(tmp_path, record[: syncs[number]] + record[syncs[number] + 1 :])
    print(f"\nwithout {record[syncs[number]]}: {num_states} states, {sorted(found)}")
    assert found


def test_all_syncs_are_tried(record: list[Operation]) -> None:
    """A save in the middle has six, and the removal of an older checkpoint one."""
    returned = [place for place, done in enumerate(record) if done.kind == "returned"]
    assert sum(done.kind.startswith("sync") for done in record[returned[1] : returned[2]]) == 7
