"""What a user may not see, or cannot see now: hidden partitions, private jobs, a suspended job.

Sisters of the entry, and what was found:
- every squeue, sinfo and scontrol asks for all (SQUEUE_ALL and its like are set in one place, slurm.call).
- absence decided in status, stop, cancel, --resume: of another user's run it decides nothing any more.
- stop and cancel ended in a traceback where the run folder may not be written: one line, exit code 2.
- CONFIGURING, RESIZING, SIGNALING, STAGE_OUT, COMPLETING: stop leaves its mark and waits for nothing
  (tests/test_stop.py).
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import slurm
from cluster.runs import RunFolder, write_json
from cluster.sandbox import down, up, without_slurm
from tests import training
from tests.slurm.test_jobs import sbatch, wait_until_gone
from tests.slurm.test_sandbox import NOBODY, interpreter_for
from tests.slurm.test_views import asked
from tests.training import REPOSITORY, environment

AsNobody = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shy(short_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm with a hidden partition that shows nobody the jobs of others."""
    settings = ["PartitionName=dark Hidden=YES", "PrivateData=jobs"]
    sandbox = up(short_path / "s", num_nodes=1, environ=os.environ, settings=settings)
    yield {**without_slurm(environment(short_path)), **sandbox.variables()}
    down(sandbox.directory)


@pytest.fixture
def as_nobody(shy: dict[str, str], short_path: Path) -> AsNobody:
    """Runs a Python with our packages as another user."""
    shutil.copytree(REPOSITORY / "cluster", short_path / "code" / "cluster")
    python = interpreter_for(NOBODY)
    environ = {**shy, "PYTHONPATH": str(short_path / "code"), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [python, *words],
            env=environ,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def make_run(folder: Path, job_id: str, run_id: str = "20260102-030405-0a1b") -> RunFolder:
    """A run that everybody may read, of a job whose log lies in it."""
    run = RunFolder(folder / "runs" / "demo" / run_id)
    run.make(0o755)
    run.spec.write_text("name: demo\n")
    run.append_event("submitted", attempt=0, job_id=job_id, route="slurm")
    return run


def test_job_in_a_hidden_partition_is_found_by_its_run_folder(
    shy: dict[str, str], as_nobody: AsNobody, short_path: Path
) -> None:
    folder = short_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    script = f"""
import os
from pathlib import Path
from cluster import queue, slurm

words = ["--parsable", "-pdark", "--hold", "--output={folder}/x_%j.log", "--wrap=true"]
slurm.run(["sbatch", *words], os.environ)
print(slurm.jobs_of(Path("{folder}"), os.environ))
print(list(queue.ask_queue(os.environ, user=str(os.getuid()))))
"""
    done = as_nobody("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{'1': 'PENDING'}\n['1']\n", "")


def test_colleagues_live_run_is_never_called_failed_and_no_verb_decides_by_absence(
    shy: dict[str, str], as_nobody: AsNobody, short_path: Path
) -> None:
    run = make_run(short_path, "1")
    job_id = sbatch(f"--output={run.logs}/batch_%j.log", "--wrap=sleep 60", environ=shy)
    assert job_id == "1"
    unseen = "Slurm shows this user no job of it; as the run folder says"
    for state in ("pending", "training"):
        done = as_nobody("-m", "cluster.status", str(run.path), "--json")
        seen = json.loads(done.stdout)
        because = f"as of its submission; {unseen}" if state == "pending" else unseen
        assert (seen["state"], seen["because"], done.returncode) == (state, because, 0)
        run.claim_attempt({"job_id": "1", "host": "n1", "pid": 1})
        write_json(run.heartbeat, {"attempt": 1, "phase": "training", "step": 3, "total_steps": 9})
        (run.attempts / "0001").chmod(0o644)
    for name in ("stop", "cancel"):
        done = as_nobody("-m", f"cluster.{name}", str(run.path))
        words = f"{run.path} belongs to root, and you may not write there: ask them\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", words)
    assert not (run.stop_mark.exists() or run.cancel_mark.exists())

    run.path.chmod(0o777)  # a user who may write, as by an access list, sees no job all the same
    done = as_nobody("-m", "cluster.stop", str(run.path))
    words = f"nothing was changed: {run.path} belongs to root, and Slurm shows this user no job of it\n"
    assert (done.returncode, done.stderr, run.stop_mark.exists()) == (4, words, False)
    slurm.run(["scancel", "1"], shy)


def test_stop_of_a_suspended_job_leaves_the_mark_at_once(slurm_environ: dict[str, str], tmp_path: Path) -> None:
    environ = {**slurm_environ, "XDG_STATE_HOME": str(tmp_path)}
    run = make_run(tmp_path, "0")
    job_id = sbatch("-N1", f"--output={run.logs}/batch_%j.log", "--wrap=srun sleep 60", environ=environ)
    run.append_event("submitted", attempt=0, job_id=job_id, route="slurm")

    def has_step() -> bool:
        return f"{job_id}.0" in slurm.run(["squeue", "-h", "--steps", "-o", "%i"], environ)

    training.wait_for("the ranks", has_step)
    slurm.run(["scontrol", "suspend", job_id], environ)
    began_s = time.monotonic()
    answer, code = asked("stop", run.path, environ=environ)
    assert (answer["action"], code, run.read_json(run.stop_mark)["requeue"]) == ("marked", 0, False)
    assert time.monotonic() - began_s < 10
    state = slurm.maybe_job_state(job_id, environ)
    assert state is not None
    assert state.state == "SUSPENDED"
    slurm.run(["scancel", job_id], environ)
    wait_until_gone(job_id, environ)
