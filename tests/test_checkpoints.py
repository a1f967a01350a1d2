"""Checkpoints as their user sees them: told, verified and exported, while nothing in the run changes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.checkpoints import HEAD, Checkpoint, find_checkpoints, main, table, verify_all
from cluster.progress import age
from cluster.runs import RunFolder, digest_of, write_json
from jobs.checkpoint import load_newest, save
from jobs.digest import weights_sha256
from tests.training import REPOSITORY, command

NOW_S = 1_800_000_000.0
ENVIRONMENT = {"world_size": 4}


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((1000,), float(step)), "bn.num_batches_tracked": torch.tensor(step)}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Checkpoints of steps 7, 14 and 21, made 30 s, 3 min and 5 h ago; the second is the best."""
    run = RunFolder(tmp_path / "runs" / "demo" / "a")
    run.make()
    run.spec.write_text("name: demo\n")
    run.claim_attempt({})
    for step, age_s in ((7, 18_000.0), (14, 180.0), (21, 30.0)):
        save(run, {"model": weights_of(step)}, step=step, epoch=step // 11, attempt=1, environment=ENVIRONMENT)
        os.utime(run.checkpoints / f"step_{step:08d}.json", (NOW_S - age_s, NOW_S - age_s))
    write_json(run.checkpoints / "best.json", {"step": 14, "test_accuracy": 0.5})
    return run


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def quarantine_newest(run: RunFolder) -> None:
    """What rank 0 does about a bad one."""
    flip_a_bit(run.checkpoints / "step_00000021.pt")
    ((name, reason),) = load_newest(run, 2).quarantined
    run.append_event("checkpoint_quarantined", attempt=2, job_id="7", name=name, reason=reason)


def content_of(run: RunFolder) -> dict[Path, tuple[int, str]]:
    return {path: digest_of(path) for path in run.path.rglob("*") if path.is_file()}


def states(found: list[Checkpoint]) -> list[tuple[str, str]]:
    return [(checkpoint.name, checkpoint.state) for checkpoint in found]


def ask(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the verb, in this process."""
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_checkpoint_is_told_by_its_manifest_and_its_files(run: RunFolder) -> None:
    found = find_checkpoints(run, NOW_S)
    size = (run.checkpoints / "step_00000014.pt").stat().st_size
    assert [checkpoint.step for checkpoint in found] == [21, 14, 7]
    assert found[1] == Checkpoint("step_00000014.pt", 14, "unread", 1, 1, 180.0, size, 4, is_best=True)


def test_table_fits_80_columns_and_names_the_best(run: RunFolder) -> None:
    quarantine_newest(run)
    lines = table(run, verify_all(run, find_checkpoints(run, NOW_S)))
    sizes = {step: (run.checkpoints / f"step_{step:08d}.pt").stat().st_size for step in (7, 14)}
    assert lines[:4] == [
        HEAD,
        f"        14      1       1      3 min {sizes[14]:>15,}      4  good, best",
        f"         7      0       1        5 h {sizes[7]:>15,}      4  good",
        f"        21      1       1       30 s {sizes[7]:>15,}      4  quarantined",
    ]
    assert lines[4].startswith(f"step 21, quarantined: step_00000021.pt: {sizes[7]} bytes with SHA-256 ")
    assert max(map(len, lines)) <= 80


def test_large_numbers_fit_80_columns() -> None:
    row = Checkpoint("x", 10**9, "quarantined", 99_999, 9999, 86_400.0 * 999, 10**12, 99_999, is_best=True)
    assert [len(line) for line in table(RunFolder(Path("/run")), [row])] == [len(HEAD), 80]


@pytest.mark.parametrize(
    ("age_s", "text"), [(0.4, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (7200.0, "2 h"), (172_800.0, "2 d")]
)
def test_age_is_one_number_and_its_unit(age_s: float, text: str) -> None:
    assert age(age_s) == text


def test_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert table(run, find_checkpoints(run, NOW_S)) == [f"{tmp_path} has no checkpoint yet"]
    run.append_event("pruned", attempt=1, job_id="", bytes=1, steps=[7], kept_steps=[])
    assert table(run, find_checkpoints(run, NOW_S)) == [
        f"{tmp_path} has no checkpoint any more: cluster.prune has removed them"
    ]


def test_what_lies_beside_the_checkpoints_is_told_too(run: RunFolder) -> None:
    quarantine_newest(run)
    for name in ("step_00000028.pt", "step_00000035.pt.a0001.tmp"):
        (run.checkpoints / name).write_bytes(b"x")
    (run.checkpoints / "bad" / "step_00000003.a0001.json").write_text("{}")  # its data was not there
    assert states(find_checkpoints(run, NOW_S)) == [
        ("step_00000014.pt", "unread"),
        ("step_00000007.pt", "unread"),
        ("step_00000035.pt.a0001.tmp", "unfinished"),
        ("step_00000028.pt", "unfinished"),
        ("bad/step_00000021.a0002.pt", "quarantined"),
        ("bad/step_00000003.a0001.pt", "quarantined"),
    ]


def test_verify_finds_the_bad_one_and_moves_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(run.path, "--verify", capsys=capsys)[0] == 0
    flip_a_bit(run.checkpoints / "step_00000014.pt")
    before = content_of(run)
    code, out, _ = ask(run.path, "--verify", "--json", capsys=capsys)
    found = {one["step"]: (one["state"], one["reason"]) for one in json.loads(out)["checkpoints"]}
    assert (code, found[21], found[7]) == (1, ("good", ""), ("good", ""))
    size, digest = digest_of(run.checkpoints / "step_00000014.pt")
    said = json.loads((run.checkpoints / "step_00000014.json").read_text())
    assert found[14] == (
        "bad",
        f"step_00000014.pt: {size} bytes with SHA-256 {digest[:12]}..., "
        f"the manifest says {said['size']} and {said['sha256'][:12]}...",
    )
    assert content_of(run) == before


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda manifest: manifest.write_text("{"), "step_00000014.json: it is damaged"),
        (lambda manifest: manifest.write_text("[]"), "step_00000014.json: it is damaged"),
        (lambda manifest: rewrite(manifest, step=7), "step_00000014.json: it speaks of step 7"),
        (
            lambda manifest: rewrite(manifest, size="9", sha256=None),
            "step_00000014.json: size, sha256: missing or of another type",
        ),
        (lambda manifest: manifest.with_suffix(".pt").unlink(), "step_00000014.pt: it is not there"),
    ],
)
def test_manifest_that_cannot_be_compared_makes_a_checkpoint_bad(run: RunFolder, damage: Any, reason: str) -> None:  # noqa: ANN401
    damage(run.checkpoints / "step_00000014.json")
    listed = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(run, NOW_S)}
    verified = {checkpoint.step: checkpoint for checkpoint in verify_all(run, list(listed.values()))}
    for one in (listed[14], verified[14]):
        assert (one.state, one.reason) == ("bad", reason)
    assert (listed[21].state, verified[21].state) == ("unread", "good")


def test_checkpoint_that_its_owner_removes_meanwhile_is_no_bad_one(run: RunFolder) -> None:
    found = find_checkpoints(run, NOW_S)
    for ending in ("json", "pt"):
        (run.checkpoints / f"step_00000007.{ending}").unlink()
    assert [checkpoint.step for checkpoint in verify_all(run, found)] == [21, 14]


def test_step_that_its_owner_saves_again_meanwhile_is_no_bad_one(run: RunFolder) -> None:
    found = find_checkpoints(run, NOW_S)
    save(run, {"model": weights_of(8)}, step=7, epoch=0, attempt=1, environment=ENVIRONMENT)
    assert [(one.step, one.state) for one in verify_all(run, found)] == [(21, "good"), (14, "good"), (7, "good")]


def test_newest_good_weights_are_exported_as_a_plain_state_dict(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flip_a_bit(run.checkpoints / "step_00000021.pt")
    before = content_of(run)
    target = tmp_path / "weights.pt"
    assert main([str(run.path), "--export", str(target)]) == 0
    out, errors = capfd.readouterr()
    assert out == f"exported the weights of step 14 to {target}\n"
    assert errors.startswith("checkpoint of step 21 cannot be used: step_00000021.pt: ")
    weights = torch.load(target, weights_only=True)
    assert weights_sha256(weights) == weights_sha256(weights_of(14))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "weights.pt"]
    assert content_of(run) == before


def test_step_is_chosen_and_json_is_one_object(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "weights.pt"
    assert main([str(run.path), "--export", str(target), "--step", "7", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    digest = weights_sha256(weights_of(7))
    assert told["exported"] == {"path": str(target), "step": 7, "weights_sha256": digest}
    assert weights_sha256(torch.load(target, weights_only=True)) == digest


def test_file_that_exists_is_never_replaced(run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "weights.pt"
    target.write_text("precious")
    assert main([str(run.path), "--export", str(target)]) == 2
    assert capfd.readouterr() == ("", f"{target} exists: remove it, or export to another name\n")
    assert target.read_text() == "precious"


def test_bad_step_is_not_exported(run: RunFolder, tmp_path: Path) -> None:
    flip_a_bit(run.checkpoints / "step_00000014.pt")
    target = tmp_path / "weights.pt"
    words = ["jobs.export", run.path, target, "--step", 14]
    done = subprocess.run(command(*map(str, words)), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"{run.path}: no good checkpoint to export"
    assert not target.exists()


def test_run_that_does_not_exist_and_step_without_export_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ask("nosuch", capsys=capsys)[0] == 2
    with pytest.raises(SystemExit) as left:
        main(["nosuch", "--step", "3"])
    assert left.value.code == 2


def test_verb_loads_no_torch() -> None:
    code = "import sys, cluster.checkpoints; print('torch' in sys.modules, 'jobs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
