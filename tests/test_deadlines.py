"""How long a rank may stay where it is."""

from pathlib import Path

import pytest

from cluster.spec import CheckpointSpec, TrainSpec
from jobs.deadlines import Deadlines
from tests.small_run import make_spec


def after_steps(*seconds: float) -> Deadlines:
    deadlines = Deadlines()
    for each in (99.0, *seconds):
        deadlines.learn(each)
    return deadlines


@pytest.mark.parametrize(
    ("seconds", "limit_s"),
    [
        pytest.param((), 120.0, id="nothing is known of steps: the first one does not count"),
        pytest.param((0.2, 0.1), 120.0, id="fast steps get the floor"),
        pytest.param((20.0, 30.0, 10.0), 300.0, id="ten times the slowest"),
        pytest.param((500.0,), 1800.0, id="the ceiling"),
        pytest.param((900.0,), 2700.0, id="steps that the ceiling would cut off"),
    ],
)
def test_deadline_of_a_step_is_learned(seconds: tuple[float, ...], limit_s: float) -> None:
    assert after_steps(*seconds).limit_s("training") == limit_s


def test_each_phase_has_its_deadline_of_the_spec(tmp_path: Path) -> None:
    spec = make_spec(tmp_path).model_copy(
        update={
            "train": TrainSpec(start_timeout_s=50.0, step_timeout_s=4.0),
            "checkpoint": CheckpointSpec(save_timeout_s=70.0),
        }
    )
    deadlines = Deadlines.of(spec)
    assert (deadlines.limit_s("meeting"), deadlines.limit_s("preparing")) == (50.0, 50.0)
    assert deadlines.limit_s("training") == 50.0, "the first step is part of the preparation"
    deadlines.learn(40.0)
    assert (deadlines.limit_s("training"), deadlines.limit_s("evaluating")) == (4.0, 12.0)
    assert (deadlines.limit_s("saving"), deadlines.limit_s("finishing")) == (70.0, 70.0)
    assert deadlines.limit_s("leaving") == 12.0
