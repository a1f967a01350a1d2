"""The fire drill on a real Slurm, at 4 ranks on four nodes."""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import slurm
from cluster.drill_faults import FAULTS, higher_partition, requeue_or_terminate
from cluster.drill_run import DrillRun, NotTriedError
from cluster.runs import RunFolder
from tests import training
from tests.slurm.test_jobs import sbatch, wait_until_gone
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


@pytest.mark.long
def test_drilled_job_is_preempted_by_a_higher_partition(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, TWO_NODES.format("low"))
    code, card = drill(spec, "--only", "preempt", environ=environ)
    assert facts(card) == [("preempt", "real", "by a job in partition high", True)], card
    assert card["results"][0]["steps_lost"] == 0
    assert code == 0
    training.wait_for("an empty queue", lambda: slurm.run(["squeue", "-h"], environ) == "")


@pytest.mark.long
def test_preemption_is_simulated_where_no_partition_is_above(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, TWO_NODES.format("high"))
    code, card = drill(spec, "--only", "preempt", environ=environ)
    told = "by scontrol requeue, since no partition is above high"
    assert facts(card) == [("preempt", "simulated", told, True)], card
    assert code == 0


@pytest.fixture
def jobs(environ: dict[str, str]) -> Iterator[Callable[..., str]]:
    """Starts jobs that sleep, and waits until they run."""
    started: list[str] = []

    def start(*flags: str) -> str:
        job_id = sbatch("-N1", "-plow", "-t5", "-o/dev/null", *flags, environ=environ)
        started.append(job_id)
        training.wait_for(
            "the job's step", lambda: f"{job_id}.0" in slurm.run(["squeue", "-hs", "-o%i"], environ).split()
        )
        return job_id

    yield start
    for job_id in started:
        subprocess.run(["scancel", job_id], env=environ, check=False)
        wait_until_gone(job_id, environ)


def drill_run(job_id: str, folder: Path, environ: dict[str, str]) -> DrillRun:
    """A job as the drill sees it."""
    submission = subprocess.Popen(["true"], text=True)
    submission.wait()
    return DrillRun(RunFolder(folder), job_id, "slurm", environ, 60.0, submission, folder / "log")


@pytest.mark.long
def test_job_that_may_not_be_requeued_gets_its_term_all_the_same(
    tmp_path: Path, environ: dict[str, str], jobs: Callable[..., str]
) -> None:
    script = f"echo ready > {tmp_path}/ready; trap 'echo TERM > {tmp_path}/got; exit' TERM; sleep 60 & wait"
    job_id = jobs("--no-requeue", f"--wrap=srun sh -c {shlex.quote(script)}")
    training.wait_for("the trap", (tmp_path / "ready").exists)
    assert requeue_or_terminate(drill_run(job_id, tmp_path, environ)) == "scancel --signal=TERM"
    training.wait_for("the signal", (tmp_path / "got").exists)


def test_drill_preempts_nothing_where_other_jobs_would_be_hit(
    tmp_path: Path, environ: dict[str, str], jobs: Callable[..., str]
) -> None:
    job_id = jobs("-wn1", "--wrap=srun sleep 60")
    drilled = drill_run(job_id, tmp_path, environ)
    assert higher_partition(drilled) == "high"
    jobs("-wn1", "--wrap=srun sleep 60")
    with pytest.raises(NotTriedError, match=r"^other jobs run on n1, and would be hit$"):
        higher_partition(drilled)


@pytest.mark.long
def test_every_fault_of_the_drill_is_survived_bit_equal(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 4\ntime_limit: 10\npartition: low")
    code, card = drill(spec, environ=environ)
    assert [(line["fault"], line["holds"]) for line in card["results"]] == [(fault.key, True) for fault in FAULTS], card
    assert {line["fault"] for line in card["results"] if line["how"] != "real"} == {"old"}, card
    assert (code, card["holds"]) == (0, True)
