"""Checkpoints on a real file system: whole, damaged, cut short by kill -9, by a full disk, by a later attempt."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.runs import RELEASE, FormatError, RunFolder, SupersededError, digest_of
from jobs.checkpoint import CheckpointError, load_newest, prune, publish, read_manifest, remove_leftovers, save, verify

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = {"world_size": 4, "threads_per_rank": 1, "torch": "2.14.1", "device": "cpu"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that attempt 1 owns."""
    run = RunFolder(tmp_path / "run")
    run.make()
    run.claim_attempt({})
    return run


def state_of(step: int) -> dict[str, Any]:
    weights = torch.full((1000,), float(step))
    return {"model": {"w": weights, "n": torch.tensor(step)}, "state": {"step": step, "digest": "00"}, "list": [1, 2.5]}


def save_step(run: RunFolder, step: int, attempt: int = 1, state: dict[str, Any] | None = None) -> None:
    save(run, state or state_of(step), step=step, epoch=step // 3, attempt=attempt, environment=ENVIRONMENT)


def step_loaded(run: RunFolder) -> int | None:
    """The step of the checkpoint that a new attempt would go on from."""
    state = load_newest(run, 2).maybe_state
    return None if state is None else int(state["model"]["n"])


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names_of(*steps: int) -> list[str]:
    return [f"step_{step:08d}.{ending}" for step in steps for ending in ("json", "pt")]


def test_state_comes_back_as_it_was_saved(run: RunFolder) -> None:
    save_step(run, 12)
    loaded = load_newest(run, 2)
    assert loaded.maybe_state is not None
    assert torch.equal(loaded.maybe_state["model"].pop("w"), torch.full((1000,), 12.0))
    assert torch.equal(loaded.maybe_state["model"].pop("n"), torch.tensor(12))
    assert loaded.maybe_state == {"model": {}, "state": {"step": 12, "digest": "00"}, "list": [1, 2.5]}
    assert loaded.maybe_manifest == read_manifest(run.checkpoints, 12)
    assert loaded.quarantined == ()


def test_data_file_can_be_read_without_trust(run: RunFolder) -> None:
    save_step(run, 1)
    content = torch.load(run.checkpoints / "step_00000001.pt", weights_only=True)
    assert list(content) == ["format_version", "model", "state", "list"]


def test_manifest_says_what_the_data_file_is(run: RunFolder) -> None:
    save_step(run, 12)
    manifest = json.loads((run.checkpoints / "step_00000012.json").read_text())
    assert len(manifest.pop("sha256")) == 64
    assert manifest == {
        "step": 12,
        "epoch": 4,
        "attempt": 1,
        "size": (run.checkpoints / "step_00000012.pt").stat().st_size,
        "world_size": 4,
        "environment": ENVIRONMENT,
        "format_version": 1,
    }


def test_run_without_checkpoints_has_nothing_to_go_on_from(run: RunFolder) -> None:
    loaded = load_newest(run, 1)
    assert (loaded.maybe_state, loaded.maybe_manifest, loaded.quarantined) == (None, None, ())


def test_steps_are_ordered_as_numbers(run: RunFolder) -> None:
    for step in (99_999_999, 100_000_000):
        save_step(run, step)
    assert step_loaded(run) == 100_000_000


def truncate(data: Path, _manifest: Path) -> None:
    os.truncate(data, data.stat().st_size - 1)


def append(data: Path, _manifest: Path) -> None:
    data.write_bytes(data.read_bytes() + b"\0")


def flip_a_bit(data: Path, _manifest: Path) -> None:
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def empty(data: Path, _manifest: Path) -> None:
    os.truncate(data, 0)


def remove_data(data: Path, _manifest: Path) -> None:
    data.unlink()


def cut_manifest(_data: Path, manifest: Path) -> None:
    os.truncate(manifest, manifest.stat().st_size // 2)


def empty_manifest(_data: Path, manifest: Path) -> None:
    os.truncate(manifest, 0)


def binary_manifest(_data: Path, manifest: Path) -> None:
    manifest.write_bytes(b"\xff\xfe\0")


def list_in_manifest(_data: Path, manifest: Path) -> None:
    manifest.write_text("[1, 2]")


def edit(manifest: Path, **changes: object) -> None:
    content = json.loads(manifest.read_text()) | changes
    manifest.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def odd_version(_data: Path, manifest: Path) -> None:
    edit(manifest, format_version="1")


def other_step(_data: Path, manifest: Path) -> None:
    edit(manifest, step=1)  # a step that exists


def step_as_text(_data: Path, manifest: Path) -> None:
    edit(manifest, step="2")


def no_digest(_data: Path, manifest: Path) -> None:
    edit(manifest, sha256=None)


BROKEN_DATA = (truncate, append, flip_a_bit, empty, remove_data)
BROKEN_MANIFEST = (cut_manifest, empty_manifest, binary_manifest, list_in_manifest, no_digest)
WRONG_MANIFEST = (odd_version, other_step, step_as_text)
Damage = Callable[[Path, Path], None]


def damage_step(run: RunFolder, damage: Damage, step: int) -> None:
    damage(run.checkpoints / f"step_{step:08d}.pt", run.checkpoints / f"step_{step:08d}.json")


@pytest.mark.parametrize("damage", [*BROKEN_DATA, *BROKEN_MANIFEST, *WRONG_MANIFEST])
def test_damaged_checkpoint_is_put_aside_for_the_one_before(
    run: RunFolder, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    for step in (1, 2):
        save_step(run, step)
    damage_step(run, damage, 2)
    with caplog.at_level(logging.WARNING, logger="run"):
        loaded = load_newest(run, 7)
    assert loaded.maybe_state is not None
    assert int(loaded.maybe_state["model"]["n"]) == 1
    ((name, reason),) = loaded.quarantined
    assert caplog.messages == [f"checkpoint of step 2 is bad and was moved to bad/{name}: {reason}"]
    assert files_of(run.checkpoints) == ["bad", *names_of(1)]
    kept = ["step_00000002.a0007.json", "step_00000002.a0007.pt"]
    assert files_of(run.checkpoints / "bad") == (kept[:1] if damage is remove_data else kept)
    assert load_newest(run, 8).quarantined == ()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (odd_version, "step_00000002.json: format_version '1'"),
        (other_step, "step_00000002.json: it speaks of step 1"),
        (step_as_text, "step_00000002.json: it speaks of step '2'"),
    ],
)
def test_reason_names_file_and_fault(run: RunFolder, damage: Damage, reason: str) -> None:
    save_step(run, 2)
    damage_step(run, damage, 2)
    assert load_newest(run, 2).quarantined == (("step_00000002.a0002.pt", reason),)


def save_as_the_next_release(run: RunFolder, *, manifest_too: bool) -> None:
    """A checkpoint of step 2 in another form: the data alone, or the manifest as well."""
    save_step(run, 2, state={"format_version": 2, **state_of(2)})
    if manifest_too:
        edit(run.checkpoints / "step_00000002.json", format_version=2, a_new_field=1, sha256=None)


@pytest.mark.parametrize(("manifest_too", "ending"), [(True, "json"), (False, "pt")])
def test_checkpoint_of_another_release_is_refused_and_stays_where_it_is(
    run: RunFolder, *, manifest_too: bool, ending: str
) -> None:
    save_step(run, 1)
    save_as_the_next_release(run, manifest_too=manifest_too)
    before = {path.name: path.read_bytes() for path in run.checkpoints.iterdir()}
    with pytest.raises(FormatError) as caught:
        load_newest(run, 2)
    assert str(caught.value) == (
        f"{run.checkpoints}/step_00000002.{ending}: format_version 2, and this is slurm-ddp {RELEASE}, which reads 1: "
        "install the release of slurm-ddp that wrote it; nothing was changed"
    )
    assert {path.name: path.read_bytes() for path in run.checkpoints.iterdir()} == before


def test_all_bad_checkpoints_are_named_and_nothing_is_loaded(run: RunFolder) -> None:
    for step in (1, 2, 3):
        save_step(run, step)
        damage_step(run, flip_a_bit, step)
    loaded = load_newest(run, 2)
    assert (loaded.maybe_state, loaded.maybe_manifest) == (None, None)
    assert [name for name, _ in loaded.quarantined] == [f"step_0000000{step}.a0002.pt" for step in (3, 2, 1)]


def test_data_that_only_a_trusting_reader_could_load_is_put_aside(run: RunFolder) -> None:
    save_step(run, 1)
    save_step(run, 2, state={"path": Path("x")})
    assert step_loaded(run) == 1


def tag_with_gpu(data: Path, manifest: Path) -> None:
    """Make it a file whose tensors were saved from GPU 0: torch notes the device of each storage in data.pkl."""
    with zipfile.ZipFile(data) as archive:
        parts = {entry: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in parts.items():
            if entry.filename.endswith("data.pkl"):
                assert b"X\x03\0\0\0cpu" in content
                content = content.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            archive.writestr(entry.filename, content)
    size, digest = digest_of(data)
    edit(manifest, size=size, sha256=digest)


def test_checkpoint_that_was_made_on_a_gpu_is_read_on_the_cpu(run: RunFolder) -> None:
    save_step(run, 3)
    damage_step(run, tag_with_gpu, 3)
    loaded = load_newest(run, 2)
    assert loaded.quarantined == ()
    assert loaded.maybe_state is not None
    assert loaded.maybe_state["model"]["w"].device == torch.device("cpu")
    assert torch.equal(loaded.maybe_state["model"]["w"], torch.full((1000,), 3.0))


def test_storage_that_cannot_be_read_says_nothing_about_the_checkpoint(run: RunFolder) -> None:
    save_step(run, 1)
    data = run.checkpoints / "step_00000001.pt"
    content = data.read_bytes()
    data.unlink()
    data.mkdir()  # reading it is an error other than "no such file"
    with pytest.raises(IsADirectoryError):
        load_newest(run, 2)
    data.rmdir()
    data.write_bytes(content)
    assert step_loaded(run) == 1


def test_step_saved_twice_holds_what_was_saved_last(run: RunFolder) -> None:
    save_step(run, 5)
    save_step(run, 5, state=state_of(50))
    assert step_loaded(run) == 50
    assert files_of(run.checkpoints) == names_of(5)


def test_garbage_in_the_place_of_a_save_is_replaced(run: RunFolder) -> None:
    (run.checkpoints / "step_00000005.pt").write_bytes(b"left by a kill")
    (run.checkpoints / "step_00000005.pt.a0001.tmp").write_bytes(b"left by a kill")
    save_step(run, 5)
    assert step_loaded(run) == 5
    assert files_of(run.checkpoints) == names_of(5)


def test_superseded_attempt_writes_nothing(run: RunFolder) -> None:
    save_step(run, 1)
    before = {path.name: path.read_bytes() for path in run.checkpoints.iterdir()}
    run.claim_attempt({})
    for step in (1, 2):
        with pytest.raises(SupersededError):
            save_step(run, step, attempt=1)
    assert {path.name: path.read_bytes() for path in run.checkpoints.iterdir()} == before


def test_attempt_that_is_superseded_while_it_writes_publishes_nothing(run: RunFolder) -> None:
    run.claim_attempt({})
    with pytest.raises(SupersededError):
        publish(run.checkpoints / "step_00000001.pt", lambda file: file.write(b"written"), run, 1)
    assert files_of(run.checkpoints) == []


@pytest.mark.parametrize(
    ("keep_last", "best", "kept"),
    [(1, None, (4,)), (2, None, (3, 4)), (2, 1, (1, 3, 4)), (2, 4, (3, 4)), (3, 9, (2, 3, 4)), (9, None, (1, 2, 3, 4))],
)
def test_newest_and_best_are_kept(run: RunFolder, keep_last: int, best: int | None, kept: tuple[int, ...]) -> None:
    for step in (1, 2, 3, 4):
        save_step(run, step)
    removed = prune(run.checkpoints, keep_last=keep_last, maybe_best_step=best)
    assert removed == [step for step in (1, 2, 3, 4) if step not in kept]
    assert files_of(run.checkpoints) == sorted(names_of(*kept))


@pytest.mark.parametrize(
    ("checkpoints_that_fit", "best", "kept"),
    [(4, None, (1, 2, 3, 4)), (2, None, (3, 4)), (2, 1, (1, 4)), (1, 1, (4,)), (0, 1, (4,))],
)
def test_older_checkpoints_go_until_the_rest_fits(
    run: RunFolder, checkpoints_that_fit: int, best: int | None, kept: tuple[int, ...]
) -> None:
    for step in (1, 2, 3, 4):
        save_step(run, step)
    size = (run.checkpoints / "step_00000004.pt").stat().st_size
    prune(run.checkpoints, keep_last=9, maybe_best_step=best, maybe_max_bytes=size * checkpoints_that_fit)
    assert files_of(run.checkpoints) == sorted(names_of(*kept))


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(run: RunFolder) -> None:
    save_step(run, 1)
    for name in ("step_00000002.pt", "step_00000003.pt.a0001.tmp", "step_00000004.json.a0001.tmp"):
        (run.checkpoints / name).write_bytes(b"x")
    others = ["best.json", "my_copy.pt", "step_00000001 (copy).pt"]
    for name in others:
        (run.checkpoints / name).write_bytes(b"x")
    (run.checkpoints / "bad").mkdir()
    remove_leftovers(run.checkpoints)
    assert files_of(run.checkpoints) == sorted([*names_of(1), *others, "bad"])


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from cluster.runs import RunFolder
from jobs.checkpoint import save

run, step = RunFolder(Path(sys.argv[1])), 1
while True:
    state = {"model": {"w": torch.rand(250_000), "n": torch.tensor(step)}}
    save(run, state, step=step, epoch=0, attempt=1, environment={"world_size": 1})
    print(step, flush=True)
    step += 1
"""


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, "subprocess.Popen[str]"]]:
    """A process that saves one checkpoint after another, each with the number of its step."""
    run = RunFolder(tmp_path_factory.mktemp("killed") / "run")
    run.make()
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SAVE_FOREVER, str(run.path)]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    yield run, process
    process.kill()
    process.communicate()


def test_kill_9_in_the_middle_of_a_save_leaves_the_one_before(
    saver: tuple[RunFolder, "subprocess.Popen[str]"],
) -> None:
    """Stopped and looked at in many places of a save, as a kill would leave them; then killed in one."""
    run, process = saver
    assert process.stdout is not None
    for moment in range(20):
        committed = int(process.stdout.readline())
        time.sleep(0.0007 * moment)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert newest_of_a_copy(run, moment) >= committed
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    committed = max(map(int, process.stdout.read().split()), default=committed)
    loaded = load_newest(run, 2)
    assert loaded.quarantined == ()
    assert loaded.maybe_state is not None
    assert int(loaded.maybe_state["model"]["n"]) >= committed


def newest_of_a_copy(run: RunFolder, number: int) -> int:
    """The newest step of what lies there at this moment; all of it must be good."""
    copy = RunFolder(run.path.with_name(f"copy_{number}"))
    copy.checkpoints.mkdir(parents=True)
    for path in sorted(run.checkpoints.iterdir())[-8:]:
        (copy.checkpoints / path.name).write_bytes(path.read_bytes())
    loaded = load_newest(copy, 2)
    assert loaded.quarantined == ()
    assert loaded.maybe_state is not None
    return int(loaded.maybe_state["model"]["n"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "small", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_is_an_error_that_leaves_older_checkpoints_alone(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    run.make()
    save_step(run, 1)
    before = files_of(run.checkpoints)
    with pytest.raises(OSError, match="No space left on device"):
        save_step(run, 2, state={"model": {"w": torch.rand(100_000)}})
    assert files_of(run.checkpoints) == before == names_of(1)
    assert step_loaded(run) == 1


def test_storage_that_gives_back_other_bytes_is_an_error(run: RunFolder) -> None:
    """The manifest speaks of other data: what verify sees when a disk or a server has lied."""
    save_step(run, 1)
    manifest = read_manifest(run.checkpoints, 1)
    damage_step(run, flip_a_bit, 1)
    with pytest.raises(CheckpointError) as caught:
        verify(run.checkpoints / "step_00000001.pt", manifest)
    assert str(caught.value).startswith(f"step_00000001.pt: {manifest.size} bytes with SHA-256 ")
