"""Releases: a stored run goes on under this code; a run in another release's form is refused and left as it is.

tests/data/run_0.1.0 was made by release 0.1.0: tests/training.py's spec with 2 ranks, 2 epochs, every_steps 5 and
keep_last 1, stopped by Ctrl-C after step 18.  /stored/... stands for the folders of the machine that made it, and
submitit's own files are left out.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from cluster.index import find_run
from cluster.plan import read_plan
from cluster.runs import RELEASE, FormatError, RunError, RunFolder, check_format, digest_of, write_json
from cluster.signals import StopFlag
from jobs.control import Control
from tests import small_run
from tests.training import REPOSITORY, environment, metrics_without_timing, submit, summary_of

STORED = REPOSITORY / "tests/data/run_0.1.0"
TOTAL_STEPS = 22
SAMPLES_SHA256 = "30cab39c348db70e9be14002eb4088b4ea18a46d2c3116c57530e1f304e9968f"  # of a run that was not stopped
VERSIONED = (
    "spec.yaml",
    "plan.json",
    "attempts/0001",
    "events.jsonl",
    "heartbeat.json",
    "verdict_a0001.json",
    "checkpoints/step_00000018.json",
    "checkpoints/best.json",
    "stop.json",
    "cancelled.json",
    "summary.json",
)


group = pytest.fixture(small_run.lone_group)


def put_stored(folder: Path, data: Path) -> RunFolder:
    """The stored run below a folder of this machine."""
    run = RunFolder(folder / "runs" / "tiny" / "20261130-082436-7457")
    shutil.copytree(STORED, run.path)
    for path in run.path.rglob("*"):
        if path.is_file() and path.suffix != ".pt":
            text = path.read_text().replace("/stored/runs", str(folder / "runs")).replace("/stored/data", str(data))
            path.write_text(text)
    run.make()  # git keeps no empty folders
    return run


def put_version_2(path: Path) -> None:
    """Change nothing but the form that a file says it has."""
    if not path.exists():
        write_json(path, {})
    text = path.read_text()
    changed = text.replace('"format_version": 1', '"format_version": 2').replace(
        "format_version: 1\n", "format_version: 2\n"
    )
    assert changed != text
    path.write_text(changed)


def content_of(run: RunFolder) -> dict[str, tuple[int, str]]:
    return {str(path): digest_of(path) for path in run.path.rglob("*") if path.is_file()}


def refusal(path: Path, to_install: str) -> str:
    """What a reader says."""
    head = f"{path}: format_version 2, and this is slurm-ddp {RELEASE}, which reads 1: "
    return f"{head}install {to_install}; nothing was changed"


def test_stored_run_resumes_and_finishes(tmp_path: Path, staged_data: Path) -> None:
    run = put_stored(tmp_path, staged_data)
    done = submit("--resume", run.path, environ=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = summary_of(run)
    told = {key: summary[key] for key in ("status", "steps", "attempts", "lost_steps", "samples_sha256")}
    assert told == {
        "status": "finished",
        "steps": TOTAL_STEPS,
        "attempts": 2,
        "lost_steps": 0,
        "samples_sha256": SAMPLES_SHA256,
    }
    assert [line["step"] for line in metrics_without_timing(run)] == list(range(1, TOTAL_STEPS + 1))
    assert [event["from_step"] for event in run.read_events() if event["event"] == "resumed"] == [18]


@pytest.mark.parametrize("name", VERSIONED)
def test_file_of_another_release_is_refused_with_the_release_to_install(tmp_path: Path, name: str) -> None:
    run = put_stored(tmp_path, tmp_path)
    claim = json.loads((run.attempts / "0001").read_text())
    (run.attempts / "0001").write_text(json.dumps({**claim, "release": "0.2.0"}))
    put_version_2(run.path / name)
    before = content_of(run)
    for read in (lambda: find_run(str(run.path), {}), lambda: read_plan(run)):  # every verb, and the supervisor
        with pytest.raises(FormatError) as caught:
            read()
        assert str(caught.value) == refusal(run.path / name, "slurm-ddp 0.2.0")
    assert content_of(run) == before


@pytest.mark.parametrize("name", ["spec.yaml", "checkpoints/step_00000018.json"])
def test_resumption_of_another_releases_run_ends_with_2_and_changes_nothing(tmp_path: Path, name: str) -> None:
    run = put_stored(tmp_path, tmp_path)
    put_version_2(run.path / name)
    before = content_of(run)
    done = submit("--resume", run.path, environ=environment(tmp_path))
    words = refusal(run.path / name, "the release of slurm-ddp that wrote it")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{words}\n")
    assert content_of(run) == before


def test_ranks_refuse_a_checkpoint_of_another_release_together(tmp_path: Path, group: dist.ProcessGroup) -> None:
    spec = small_run.make_spec(tmp_path, max_steps=2)
    run = small_run.undisturbed(spec, group).recorder.run
    manifest = run.checkpoints / "step_00000002.json"
    put_version_2(manifest)
    before = content_of(run)
    attempt = run.claim_attempt({})
    with pytest.raises(RunError) as caught:  # the error that rank 0 tells all
        small_run.start_attempt(spec, run, Control(group, StopFlag()), attempt)
    assert str(caught.value) == refusal(manifest, "the release of slurm-ddp that wrote it")
    assert {path: content for path, content in content_of(run).items() if path in before} == before
    assert run.checkpoints.joinpath("bad").exists() is False


@pytest.mark.parametrize("version", [1, "2", 2.0, True, None])
def test_what_is_no_other_form_is_left_to_the_reader(version: object) -> None:
    check_format(Path("x"), {"format_version": version})
    check_format(Path("x"), {})


def test_file_that_names_its_release_is_believed_first() -> None:
    with pytest.raises(FormatError) as caught:
        check_format(Path("/run/x.json"), {"format_version": 2, "release": "0.3.1"}, "0.2.0")
    assert str(caught.value) == refusal(Path("/run/x.json"), "slurm-ddp 0.3.1")


def paths_named(run: Path) -> Iterator[str]:
    """Absolute paths in the text files of a run."""
    for path in run.rglob("*"):
        if path.is_file() and path.suffix != ".pt":
            yield from (word for word in path.read_text().replace('"', " ").split() if word.startswith("/"))


def test_stored_run_names_no_machine() -> None:
    named = set(paths_named(STORED))
    assert named
    assert {name for name in named if not name.startswith("/stored/")} == set()
