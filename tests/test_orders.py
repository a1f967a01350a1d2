"""Orders name the run's job alone, and none is given for a stranger's."""

from pathlib import Path

import pytest

from cluster.identity import RunJob
from cluster.orders import cancel, requeue, signal_ranks, update
from cluster.slurm import SlurmError, StrangerError, is_final
from tests.executables import put_executable

FOLDER = Path("/runs/demo/a")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Job 7 is ours, 22 is our member 3 of an array, 8 a stranger's, and there is no other; orders are noted."""
    shown = {
        "7": f"JobId=7\\n   Command={FOLDER}/job.sbatch\\n",
        "22": f"JobId=22 ArrayJobId=22 ArrayTaskId=3\\n   StdOut={FOLDER}/logs/x\\n",
        "8": "JobId=8\\n   Command=/home/you/job.sbatch\\n",
    }
    cases = "".join(f'"show job {job}") printf "{text}"; exit;; ' for job, text in shown.items())
    unknown = '"show job "*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;'
    put_executable(tmp_path, "scontrol", f'case "$*" in {cases}{unknown} esac; echo "scontrol $*" >> {tmp_path}/asked')
    put_executable(tmp_path, "scancel", f'echo "scancel $*" >> {tmp_path}/asked')
    return {"PATH": str(tmp_path)}


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_member_of_an_array_is_named_apart_from_the_others(tmp_path: Path, environ: dict[str, str]) -> None:
    member = RunJob("22", FOLDER)
    requeue(member, environ)
    update(member, "Requeue=0", environ)
    signal_ranks(member, "USR2", environ)
    cancel([RunJob("7", FOLDER), member], environ, only_pending=True)
    assert asked(tmp_path) == [
        "scontrol requeue 22_3",
        "scontrol update JobId=22_3 Requeue=0",
        "scancel --signal=USR2 22_3",
        "scancel --state=PENDING 7 22_3",
    ]


@pytest.mark.parametrize("job_id", ["8", "9"], ids=["a stranger's", "gone"])
def test_no_order_is_given_for_a_job_that_is_not_the_runs(tmp_path: Path, environ: dict[str, str], job_id: str) -> None:
    job = RunJob(job_id, FOLDER)
    for order in (requeue, lambda job, environ: update(job, "Requeue=0", environ)):
        with pytest.raises(StrangerError) as caught:
            order(job, environ)
        assert is_final(caught.value)
        assert str(caught.value) == f"Slurm's job {job_id} is not of {FOLDER}, or is gone: it was left alone"
    cancel([job], environ)
    assert asked(tmp_path) == []
    cancel([job, RunJob("7", FOLDER)], environ)
    assert asked(tmp_path) == ["scancel 7"]


def test_job_that_waits_already_is_requeued_and_a_refusal_is_an_error(tmp_path: Path, environ: dict[str, str]) -> None:
    script = (tmp_path / "scontrol").read_text()
    put_executable(tmp_path, "scontrol", f'{script}\necho "Job is pending execution for job 7" >&2; exit 1')
    requeue(RunJob("7", FOLDER), environ)
    refusal = "Requested operation is presently disabled for job 7"
    put_executable(tmp_path, "scontrol", f'{script}\necho "{refusal}" >&2; exit 1')
    with pytest.raises(SlurmError) as caught:
        requeue(RunJob("7", FOLDER), environ)
    assert str(caught.value) == f"scontrol requeue 7: exit code 1: {refusal}"
