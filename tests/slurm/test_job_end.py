"""How Slurm ends a job is read alike on every release: 22.05.8, 24.11.5 and 26.05.5 were tried.

Sisters that were looked for, places that hang on one release's words:
- Job.maybe_error_path: 26.05 leaves StdErr empty where it is StdOut, so no line of the log was read; mended.
- told_by_slurmstepd, early_end, slurm_word: looked for "slurmstepd" at the head of a line; they share job_end.STEPD.
- forecast: "to start at TIME a using" on 26.05; mended.  squeue -O StdOut: expanded up to 22.05, as it was given since
  24.11; both begin with the run folder, which is all that is compared.
- scancel --full --signal=TERM: slurmstepd writes the line of a cancelled job, and the job runs on; the record decides.
- srun's lines about tasks and nodes, refusals of sbatch, squeue's forms, scontrol show config: equal on the three.
- OverSubscribe=NO for OK, ReqTRES and AllocTRES for TRES, NumNodes=1-1 for 1: no part of the program reads them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import slurm
from tests.slurm.test_jobs import job_field, sbatch, wait_until_gone
from tests.training import REPOSITORY, wait_for

# The step ends at the first TERM, as ranks do that have saved; the batch shell outlives it, as the supervisor does.
SCRIPT = f"""trap : TERM CONT
srun sleep 100 & while kill -0 $! 2>&-; do wait $!; done
trap "" TERM CONT; cd {REPOSITORY} && exec env PYTHONPATH={REPOSITORY} {sys.executable} tests/slurm/tell_end.py >$TOLD
"""


@pytest.fixture
def jobs(slurm_environ: dict[str, str], tmp_path: Path) -> Iterator["Jobs"]:
    jobs = Jobs(slurm_environ, tmp_path)
    yield jobs
    for job_id in jobs.job_ids:
        subprocess.run(["scancel", job_id], env=slurm_environ, check=False)
    for job_id in jobs.job_ids:
        wait_until_gone(job_id, slurm_environ)


class Jobs:
    """Jobs whose ends are told, by name."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self.environ = environ
        self.folder = folder
        self.job_ids: list[str] = []

    def start(self, name: str, *options: str) -> str:
        """Submit one whose standard error goes where its standard output does; returns its id."""
        environ = {**self.environ, "TOLD": str(self.folder / name)}
        log = f"--output={self.folder}/{name}.log"
        job_id = sbatch("-t10", "--requeue", log, *options, "--wrap", SCRIPT, environ=environ)
        self.job_ids.append(job_id)
        return job_id

    def wait_for_step(self, *job_ids: str) -> None:
        for job_id in job_ids:
            step = ["squeue", "-h", "--steps", "-j", job_id, "-o", "%i"]
            wait_for(
                "the step", lambda step=step, wanted=f"{job_id}.0": wanted in slurm.run(step, self.environ).split()
            )

    def preempt(self, node: str) -> None:
        self.job_ids.append(
            sbatch("-phigh", f"-w{node}", "--exclusive", "-o/dev/null", "--wrap=:", environ=self.environ)
        )

    def told(self, name: str) -> list[str | None]:
        """What is made of its end: of the record with the log, of the record, of the log."""
        path = self.folder / name
        wait_for(f"the end of {name}", lambda: path.exists() and path.read_text().endswith("\n"))
        found: list[str | None] = json.loads(path.read_text())
        return found


def test_record_and_log_tell_by_what_a_job_is_ended(jobs: Jobs) -> None:
    cancelled, signalled, requeued = (jobs.start(name, "-wn1") for name in ("cancelled", "signalled", "requeued"))
    at_once = jobs.start("at once", "-wn2", "-plow-nograce", "--exclusive")
    graceful = jobs.start("graceful", "-wn3", "--exclusive")
    no_requeue = jobs.start("no requeue", "-wn4", "-plow-nograce", "--exclusive", "--no-requeue")
    jobs.wait_for_step(cancelled, signalled, requeued, at_once, graceful, no_requeue)
    slurm.run(["scancel", cancelled], jobs.environ)
    slurm.run(["scancel", "--full", "--signal=TERM", signalled], jobs.environ)
    slurm.run(["scontrol", "requeue", requeued], jobs.environ)
    for node in ("n2", "n3", "n4"):
        jobs.preempt(node)
    names = ("cancelled", "signalled", "requeued", "at once", "graceful", "no requeue")
    assert {name: jobs.told(name) for name in names} == {
        "cancelled": ["user cancel", "user cancel", "user cancel"],
        "signalled": [None, None, "user cancel"],
        "requeued": ["requeued", "requeued", "requeued"],
        "at once": ["preempted", "requeued", "preempted"],
        "graceful": ["preempted", "preempted", None],
        "no requeue": ["preempted", "preempted", "preempted"],
    }


@pytest.mark.long
def test_record_and_log_tell_of_a_time_limit_and_of_a_node_that_died(jobs: Jobs) -> None:
    limited = jobs.start("limited", "-wn1", "-t1")
    died = jobs.start("died", "-wn[2-3]", "-N2")
    died_for_good = jobs.start("died for good", "-wn[2-3]", "-N2", "--no-requeue")
    jobs.wait_for_step(limited, died, died_for_good)
    slurm.run(["scontrol", "update", "nodename=n3", "state=down", "reason=test"], jobs.environ)
    assert [jobs.told(name) for name in ("died", "died for good")] == [
        ["node failure", "requeued", "node failure"],
        ["node failure", "node failure", "node failure"],
    ]
    assert jobs.told("limited") == ["time limit", "time limit", "time limit"]


def test_allocation_without_a_batch_script_that_is_cancelled_is_told_by_its_record_alone(
    jobs: Jobs, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    words = ["salloc", "-N1", "-t5", "bash", "-c", f"trap : TERM HUP; sleep 3; TOLD={told}; {SCRIPT.splitlines()[-1]}"]
    salloc = subprocess.Popen(words, env=jobs.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert salloc.stderr is not None
    job_id = next(line for line in salloc.stderr if "Granted" in line).split()[-1]
    time.sleep(0.5)
    slurm.run(["scancel", job_id], jobs.environ)
    salloc.communicate(timeout=30)
    assert json.loads(told.read_text()) == ["user cancel", "user cancel", None]
    assert job_field(job_id, "JobState", jobs.environ) == "CANCELLED"
