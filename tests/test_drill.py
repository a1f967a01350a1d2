"""The fire drill on this machine, at 4 ranks: what it says of faults, and that it notices a missing defence."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from cluster.drill import Drill, Straight, prepare, run_undisturbed, try_fault
from cluster.drill_card import Result
from cluster.drill_faults import FAULTS
from cluster.runs import RunFolder
from cluster.spec import load_spec
from tests.training import REPOSITORY, command, environment, write_spec

DEFENCELESS = REPOSITORY / "tests/defenceless"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, staged_data: Path) -> Drill:
    folder = tmp_path_factory.mktemp("drill")
    spec = load_spec(write_spec(folder, staged_data), cwd=REPOSITORY)
    return prepare(spec, environment(folder), patience_s=60.0)


@pytest.fixture(scope="module")
def straight(shared: Drill) -> Straight:
    return run_undisturbed(shared)


def drill_one(key: str, shared: Drill, straight: Straight) -> Result:
    (fault,) = [fault for fault in FAULTS if fault.key == key]
    return try_fault(shared, fault, straight)


def facts(result: Result) -> dict[str, object]:
    """A result without what differs from run to run."""
    volatile = ("seconds_to_recover", "run_dir", "title", "note", "max_steps_lost", "fault")
    return {key: value for key, value in dataclasses.asdict(result).items() if key not in volatile} | {
        "holds": result.holds
    }


@pytest.mark.long
def test_flipped_bit_is_survived_bit_equal(shared: Drill, straight: Straight) -> None:
    result = drill_one("bit", shared, straight)
    assert facts(result) == {
        "how": "simulated", "survived": True, "bit_equal": True, "steps_lost": 2, "holds": True,
    }, result  # fmt: skip
    assert result.seconds_to_recover is not None
    assert result.seconds_to_recover > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "how"),
    [
        ("preempt", "simulated"),
        ("truncate", "simulated"),
        ("kill", "real"),
        ("kill-save", "real"),
        ("signal", "simulated"),
        ("port", "real"),
    ],
)
def test_fault_is_survived_bit_equal(key: str, how: str, shared: Drill, straight: Straight) -> None:
    result = drill_one(key, shared, straight)
    assert (result.how, result.holds) == (how, True), result


def without(defence: str, shared: Drill) -> Drill:
    taken = {"PYTHONPATH": str(DEFENCELESS), "WITHOUT_DEFENCE": defence}
    return dataclasses.replace(shared, environ={**shared.environ, **taken})


def test_drill_notices_that_checkpoints_are_not_verified(shared: Drill, straight: Straight) -> None:
    result = drill_one("bit", without("verify", shared), straight)
    assert facts(result) == {
        "how": "simulated", "survived": True, "bit_equal": False, "steps_lost": 0, "holds": False,
    }, result  # fmt: skip


@pytest.mark.long
def test_drill_notices_that_ranks_do_not_agree_to_stop(shared: Drill, straight: Straight) -> None:
    result = drill_one("signal", dataclasses.replace(without("agreement", shared), patience_s=45.0), straight)
    assert result.holds is False


@pytest.mark.long
def test_drill_notices_that_an_old_attempt_may_write(shared: Drill, straight: Straight) -> None:
    result = drill_one("old", without("fence", shared), straight)
    assert (result.survived, result.bit_equal, result.holds) == (True, False, False), result


@pytest.mark.long
def test_old_attempt_changes_no_file(shared: Drill, straight: Straight) -> None:
    result = drill_one("old", shared, straight)
    assert (result.how, result.holds) == ("simulated", True), result
    assert result.note.startswith("a process of attempt 1, started here after attempt 2 began, left with 1"), result


@pytest.mark.long
def test_drill_as_a_command_prints_its_card_as_json_and_keeps_it(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    words = command("cluster.drill", spec, "--only", "port", "--json", "train.seed=3")
    done = subprocess.run(words, env=environment(tmp_path), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert [(line["fault"], line["holds"]) for line in card["results"]] == [("port", True)]
    assert card["where"] == "4 ranks on this machine"
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["undisturbed", "port"]
    (kept,) = (tmp_path / "runs/tiny-drill").glob("drill-*/card.json")
    assert json.loads(kept.read_text()) == card
    assert RunFolder(Path(card["undisturbed"])).summary.exists()
    assert load_spec(Path(card["undisturbed"]) / "spec.yaml", cwd=tmp_path).train.seed == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "kill,fire"], "--only: fire: no fault; there are " + ", ".join(fault.key for fault in FAULTS)),
        (["train.epoch=3"], "command line: train.epoch: unknown key; did you mean epochs?"),
    ],
)
def test_wrong_usage_is_told_and_nothing_is_run(tmp_path: Path, words: list[str], told: str) -> None:
    spec = write_spec(tmp_path, tmp_path)
    done = subprocess.run(
        command("cluster.drill", spec, *words), env=dict(os.environ), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert not (tmp_path / "runs").exists()


def test_slurm_that_is_not_there_gives_its_own_exit_code(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data, "time_limit: 10")
    environ = environment(tmp_path, {"PATH": str(tmp_path)})
    done = subprocess.run(
        command("cluster.drill", spec, "--only", "kill"), env=environ, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert "Slurm was not reached; nothing was submitted. To find out: scontrol ping" in done.stderr


def test_job_that_cannot_even_run_undisturbed_is_told(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data)
    spec.write_text(spec.read_text() + "setup: ['false']\n")
    words = command("cluster.drill", spec)
    done = subprocess.run(words, env=environment(tmp_path), cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    told = "not even the undisturbed run finished: its job is gone, and left no word; "
    assert done.stderr.splitlines()[-1].startswith(told), done.stderr
