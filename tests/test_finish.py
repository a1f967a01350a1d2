"""The end of a run: final weights and summary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.runs import RunFolder, SupersededError, write_json
from jobs.digest import weights_sha256
from jobs.finish import finish, held_seconds, is_broken, num_preemptions, summarize
from jobs.loop import Loop
from tests.small_run import lone_group, make_spec, undisturbed

CONTRACT = """
    format_version run_id name status steps epochs world_size attempts preemptions lost_steps test_accuracy test_loss
    train_loss images_per_s weights_sha256 samples_sha256 bit_exact goodput wall_s
"""


group = pytest.fixture(scope="module")(lone_group)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, group: dist.ProcessGroup) -> Loop:
    """A run at its end, published."""
    loop = undisturbed(make_spec(tmp_path_factory.mktemp("finish")), group)
    finish(loop)
    return loop


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.make()
    return run


def test_summary_has_exactly_the_keys_of_the_contract(loop: Loop) -> None:
    assert list(json.loads(loop.recorder.run.summary.read_text())) == CONTRACT.split()


def test_summary_tells_what_the_run_did(loop: Loop) -> None:
    summary, state = json.loads(loop.recorder.run.summary.read_text()), loop.state
    measured = {key: summary.pop(key) for key in ("images_per_s", "goodput", "wall_s")}
    assert summary == {
        "format_version": 1,
        "run_id": "run",
        "name": "small",
        "status": "finished",
        "steps": 8,
        "epochs": 2,
        "world_size": 1,
        "attempts": 1,
        "preemptions": 0,
        "lost_steps": 0,
        "test_accuracy": state.test_accuracy,
        "test_loss": state.test_loss,
        "train_loss": state.train_loss,
        "weights_sha256": weights_sha256(loop.learner.model.state_dict()),
        "samples_sha256": state.samples_sha256,
        "bit_exact": True,
    }
    assert measured["images_per_s"] == round(28 / state.step_seconds, 1)
    assert 0 < measured["goodput"] <= 1
    assert measured["wall_s"] >= 0


def test_final_weights_are_a_plain_state_dict(loop: Loop) -> None:
    weights = torch.load(loop.recorder.run.model_final, weights_only=True)
    assert weights_sha256(weights) == weights_sha256(loop.learner.model.state_dict())


def test_end_is_told_after_the_summary(loop: Loop) -> None:
    event = loop.recorder.run.read_events()[-1]
    assert (event["event"], event["step"], event["test_accuracy"]) == ("finished", 8, loop.state.test_accuracy)
    assert loop.recorder.run.read_json(loop.recorder.run.heartbeat)["phase"] == "finished"


@pytest.mark.parametrize("event", ["extended", "environment_changed"])
def test_run_that_was_changed_on_the_way_is_not_bit_exact(
    tmp_path: Path, loop: Loop, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events.jsonl"
    events.write_bytes(loop.recorder.run.events.read_bytes())
    monkeypatch.setattr(RunFolder, "events", events)
    assert summarize(loop, "")["bit_exact"] is True
    loop.recorder.event(event)
    assert summarize(loop, "")["bit_exact"] is False


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("submitting submitted finished", False),
        ("submitted extended submitting submission_refused submitting submitted", False),
        ("submitted extended submitting submitted extended submitting submission_refused submitting submitted", True),
        ("submitted extended submitting attempt_started", True),
    ],
)
def test_extension_that_slurm_refused_changes_nothing(names: str, expected: bool) -> None:
    assert is_broken([{"event": name} for name in names.split()]) is expected


@pytest.mark.parametrize(("attempt", "is_exact"), [(1, True), (2, False)])
def test_run_whose_code_was_changed_between_attempts_is_not_bit_exact(attempt: int, is_exact: bool) -> None:
    assert is_broken([{"event": "code_drift", "attempt": attempt}]) is not is_exact


def test_superseded_attempt_publishes_nothing(tmp_path: Path, group: dist.ProcessGroup) -> None:
    loop = undisturbed(make_spec(tmp_path), group)
    run = loop.recorder.run
    run.claim_attempt({})
    with pytest.raises(SupersededError):
        finish(loop)
    assert (run.summary.exists(), run.model_final.exists()) == (False, False)


def started(attempt: int, second: int) -> dict[str, Any]:
    return {"event": "attempt_started", "attempt": attempt, "time": at(second)}


def resumed(attempt: int, last_beat: str | None) -> dict[str, Any]:
    return {"event": "resumed", "attempt": attempt, "time": at(0), "last_beat": last_beat}


def at(second: int) -> str:
    return f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}.000Z"


@pytest.mark.parametrize(
    ("events", "verdicts", "seconds"),
    [
        pytest.param([started(1, 10)], {}, 90, id="the only attempt counts to now"),
        pytest.param([started(1, 10), started(2, 60)], {1: 30}, 20 + 40, id="an attempt counts to its verdict"),
        pytest.param(
            [started(1, 10), started(2, 60), resumed(2, at(25))], {}, 15 + 40, id="without one to its last heartbeat"
        ),
        pytest.param(
            [started(1, 10), started(2, 60), resumed(2, at(25))], {1: 31}, 21 + 40, id="a verdict outranks it"
        ),
        pytest.param([started(1, 10), started(2, 60), resumed(2, None)], {}, 40, id="without either it counts nothing"),
        pytest.param(
            [started(1, 10), started(2, 30), started(3, 60), resumed(3, at(20))],
            {1: 25},
            15 + 40,
            id="a heartbeat of the attempt before is not taken for its own",
        ),
        pytest.param(
            [started(1, 10), started(2, 60)], {1: 20, 2: 70}, 10 + 40, id="the last counts to now in any case"
        ),
    ],
)
def test_held_seconds_go_from_each_start_to_each_end(
    run: RunFolder, events: list[dict[str, Any]], verdicts: dict[int, int], seconds: float
) -> None:
    for attempt, second in verdicts.items():
        write_json(run.verdict(attempt), {"time": at(second)})
    assert held_seconds(run, events, now=at(100)) == seconds


def test_only_verdicts_of_preemption_count_as_preemptions(run: RunFolder) -> None:
    for attempt, cause in ((1, "preempted"), (2, "killed"), (4, "preempted"), (5, "preempted")):
        write_json(run.verdict(attempt), {"cause": cause})
    assert num_preemptions(run, attempts=4) == 2
