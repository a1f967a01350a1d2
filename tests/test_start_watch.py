"""Start watch: what counts as a rank's first sign of life, and what is said of a start that is given up."""

from pathlib import Path

import pytest

from cluster.start_watch import StartWatch, is_inside_step, start_limit_s
from tests.executables import put_answer
from tests.specs import load
from tests.training import SPEC


@pytest.mark.parametrize(
    ("written", "overdue"),
    [
        ("", True),
        ("pyxis: importing docker image ...\nslurmstepd: error: x r00000 y\n", True),
        ("2026-01-02T03:04:05.678Z r00000 I begun\n", False),
        ("noise\n2026-01-02T03:04:05.678Z r00017 W late\n", False),
    ],
    ids=["nothing", "not of a rank", "rank 0", "another rank"],
)
def test_only_a_line_of_a_rank_is_a_sign_of_one(tmp_path: Path, written: str, overdue: bool) -> None:
    log = tmp_path / "log"
    log.write_text("2026-01-02T03:04:05.678Z r00000 I of an earlier start\n")
    watch = StartWatch(log, limit_s=0)
    with log.open("a") as file:
        file.write(written)
    assert watch.is_overdue() is overdue


def test_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    assert not StartWatch(tmp_path / "log", limit_s=60).is_overdue()
    assert StartWatch(tmp_path / "log", limit_s=0).is_overdue()


def test_steps_in_the_way_are_named(tmp_path: Path) -> None:
    put_answer(tmp_path, "squeue", "5.batch batch\n5.3 htop -d 5\n5.interactive interactive\n")
    watch = StartWatch(tmp_path / "log", 630.0, "5", {"PATH": str(tmp_path)})
    assert watch.why(["srun: Job 5 step creation still disabled, retrying (Requested nodes are busy)"]) == (
        "no rank has begun within 630 s (see train.start_timeout_s); srun: Job 5 step creation still disabled, "
        "retrying (Requested nodes are busy); steps of this job: 5.3 (htop -d 5) (srun --overlap leaves the ranks "
        "their CPUs)"
    )


def test_limit_is_the_specs_and_a_margin(tmp_path: Path) -> None:
    from cluster.spec import dump_spec

    text = SPEC.format(where="cluster: local", data=tmp_path, runs=tmp_path)
    assert start_limit_s(dump_spec(load(tmp_path, text))) == 660
    assert start_limit_s(dump_spec(load(tmp_path, text, "train.start_timeout_s=12.5"))) == 25
    assert start_limit_s("name: of a release without the key") == 660


@pytest.mark.parametrize(
    ("environ", "inside"),
    [({}, False), ({"SLURM_STEP_ID": "0"}, True), ({"SLURM_STEP_ID": str(0xFFFF_FFFB)}, False)],
    ids=["batch shell", "srun --pty", "batch step by number"],
)
def test_shell_inside_a_step_is_told_from_a_batch_shell(environ: dict[str, str], inside: bool) -> None:
    assert is_inside_step(environ) is inside
