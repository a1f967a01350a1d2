"""The fire drill on a real Slurm, at 4 ranks on four nodes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import slurm
from cluster.drill_faults import FAULTS
from tests.training import REPOSITORY, command, environment, write_spec

TWO_NODES = "nodes: 2\ntasks_per_node: 2\ntime_limit: 10\npartition: {}"


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def drill(spec: Path, *words: str, environ: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """`python -m cluster.drill spec words`: its exit code and card."""
    done = subprocess.run(
        command("cluster.drill", spec, "--json", *words),
        env=environ,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def facts(card: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    return [(line["fault"], line["how"], line["note"], line["holds"]) for line in card["results"]]


def test_drilled_job_is_preempted_by_a_higher_partition(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, TWO_NODES.format("low"))
    code, card = drill(spec, "--only", "preempt", environ=environ)
    assert facts(card) == [("preempt", "real", "by a job in partition high", True)], card
    assert card["results"][0]["steps_lost"] == 0
    assert code == 0
    assert slurm.run(["squeue", "-h"], environ) == ""


def test_preemption_is_simulated_where_no_partition_is_above(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, TWO_NODES.format("high"))
    code, card = drill(spec, "--only", "preempt", environ=environ)
    told = "by scontrol requeue, since no partition is above high"
    assert facts(card) == [("preempt", "simulated", told, True)], card
    assert code == 0


@pytest.mark.long
def test_every_fault_of_the_drill_is_survived_bit_equal(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 4\ntime_limit: 10\npartition: low")
    code, card = drill(spec, environ=environ)
    assert [(line["fault"], line["holds"]) for line in card["results"]] == [(fault.key, True) for fault in FAULTS], card
    assert {line["fault"] for line in card["results"] if line["how"] != "real"} == {"old"}, card
    assert (code, card["holds"]) == (0, True)
