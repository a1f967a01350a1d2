"""Which job is it, on which cluster: two that share storage and home, and a slurmctld that has lost its state.

Both count their jobs from 1, so that a job id alone means two jobs.

Sisters of the entry, and what was found:
- `submitting` without an answer, successors, jobs that enter themselves, raw sbatch: all name their cluster now.
- ClusterName in capitals, in quotes, in no file that this machine has: tests/test_clusters.py.
- prune took a run that waits on another cluster for one that nobody runs: it is left alone.
- why told the state of a stranger's job of the same id; the comment, Requeue=0 and ExcNodeList went to it; a run folder
  of raw sbatch was gone on with by a stranger: all compare the job with the run first.
- SCANCEL_BATCH and its like in a user's profile changed what an order means: they are left out.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import orders, slurm
from cluster.identity import RunJob, maybe_shown, record_of
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox, down, up, without_slurm
from tests import training
from tests.slurm.test_jobs import sbatch
from tests.slurm.test_views import asked, verb
from tests.training import environment, events_of, submit, write_spec

HELD = "nodes: 1\ntime_limit: 5\npartition: low\nsbatch: {hold: true}"


@pytest.fixture
def clusters(short_path: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """The environments of two clusters with one home; their names are alpha and beta."""
    sandboxes = []
    try:
        for name in ("alpha", "beta"):
            settings = [f"ClusterName={name}"]
            sandboxes.append(up(short_path / name, num_nodes=1, environ=os.environ, settings=settings))
        alpha, beta = (environ_of(sandbox, tmp_path) for sandbox in sandboxes)
        yield alpha, beta
    finally:
        for sandbox in sandboxes:
            down(sandbox.directory)


def environ_of(sandbox: Sandbox, home: Path) -> dict[str, str]:
    return {**without_slurm(environment(home)), **sandbox.variables(), "XDG_STATE_HOME": str(home)}


def submitted(folder: Path, data: Path, environ: Mapping[str, str], *words: str) -> tuple[RunFolder, str]:
    done = submit(write_spec(folder, data, HELD), *words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return RunFolder(Path(told["run_dir"])), told["job_id"]


def state_of(job_id: str, environ: Mapping[str, str]) -> str:
    state = slurm.maybe_job_state(job_id, environ)
    return "" if state is None else state.state


def files_of(run: RunFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}


def test_verbs_refuse_a_run_of_another_cluster_name_the_right_one_and_touch_no_job_of_the_same_id(
    tmp_path: Path, staged_data: Path, clusters: tuple[dict[str, str], dict[str, str]]
) -> None:
    alpha, beta = clusters
    run, job_id = submitted(tmp_path, staged_data, alpha)
    stranger = sbatch("--hold", "-o/dev/null", "--wrap=true", environ=beta)
    assert stranger == job_id == "1"
    assert [(event["event"], event["cluster"]) for event in run.read_events()] == [
        ("submitting", "alpha"),
        ("submitted", "alpha"),
    ]
    before = files_of(run)
    where = f"{run.path}: its job 1 is of cluster alpha, and this machine's is beta: ask there"
    for name in ("stop", "cancel"):
        done = verb(name, run.path, environ=beta)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{where}\n")
    resumed = verb("submit", "--resume", run.path, environ=beta)
    more = "or end it there by cluster.stop first; --force goes on here, for a cluster that is gone for good"
    assert (resumed.returncode, resumed.stderr) == (2, f"{where}, {more}\n")
    pruned = verb("prune", run.path, "--checkpoints=all", environ=beta)
    assert (pruned.returncode, "its job is of cluster alpha: ask there" in " ".join(pruned.stdout.split())) == (1, True)
    assert files_of(run) == before

    for index in (tmp_path / "slurm-ddp").iterdir():
        index.unlink()  # the run's own events tell
    seen, code = asked("status", run.path, environ=beta)
    assert (seen["state"], seen["because"], code) == ("pending", "as of its submission", 4)
    assert (state_of(job_id, alpha), state_of(stranger, beta)) == ("PENDING", "PENDING")

    assert verb("cancel", run.path, environ=alpha).returncode == 0
    assert (state_of(job_id, alpha), state_of(stranger, beta)) == ("CANCELLED", "PENDING")


def test_run_that_was_stopped_moves_to_another_cluster_and_one_that_was_not_by_force(
    tmp_path: Path, staged_data: Path, clusters: tuple[dict[str, str], dict[str, str]]
) -> None:
    alpha, beta = clusters
    run, _ = submitted(tmp_path, staged_data, alpha)
    forced = submit("--resume", run.path, "--force", environ=beta)
    assert (forced.returncode, forced.stdout) == (0, f"submitted to job 1; run folder: {run.path}\n"), forced.stderr
    assert [event["cluster"] for event in events_of(run, "submitted")] == ["alpha", "beta"]
    assert verb("stop", run.path, environ=alpha).returncode == 2

    run.claim_attempt({"job_id": "1", "host": "n1", "pid": 1})
    ended = {"attempt": 1, "job_id": "1", "outcome": "stopped", "cause": "stopped", "action": "leave"}
    run.verdict(1).write_text(json.dumps(ended))
    moved = submit("--resume", run.path, environ=alpha)
    assert moved.returncode == 0, moved.stderr
    assert [event["cluster"] for event in events_of(run, "submitted")] == ["alpha", "beta", "alpha"]


def lose_state(sandbox: Sandbox, environ: Mapping[str, str]) -> None:
    """End slurmctld, and start it as one that has never run before: it counts its jobs from 1 again."""
    pid_file = sandbox.directory / "run" / "slurmctld.pid"
    pid = int(pid_file.read_text())
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
    training.wait_for("slurmctld to end", lambda: not Path(f"/proc/{pid}").exists())
    for path in (sandbox.directory / "state").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    slurmctld = ["slurmctld", "-c", "-f", environ["SLURM_CONF"]]
    subprocess.run(slurmctld, env={**environ, "PATH": f"{environ['PATH']}:/usr/sbin"}, check=True)

    def answers() -> bool:
        done = subprocess.run(["scontrol", "ping"], env=dict(environ), capture_output=True, text=True, check=False)
        return done.returncode == 0

    training.wait_for("slurmctld to answer", answers)
    subprocess.run(["scontrol", "reconfigure"], env=dict(environ), check=True)


def test_job_that_got_the_id_of_a_runs_job_from_a_slurmctld_without_memory_is_left_alone(
    tmp_path: Path, short_path: Path, staged_data: Path
) -> None:
    sandbox = up(short_path / "s", num_nodes=1, environ=os.environ)
    try:
        environ = environ_of(sandbox, tmp_path)
        run, job_id = submitted(tmp_path, staged_data, environ)
        salloc = ["salloc", "-N1", "--quiet", "bash", "-c", "exec scontrol show job $SLURM_JOB_ID"]
        subprocess.run(salloc, env=environ, check=True, capture_output=True)
        own = maybe_shown("2", environ)
        assert own is not None
        by_hand = RunJob("2", run.path, record_of(own))
        lose_state(sandbox, environ)
        strangers = [sbatch("--hold", "--requeue", "-o/dev/null", "--wrap=true", environ=environ) for _ in range(2)]
        assert strangers == [job_id, "2"]

        answer, code = asked("stop", run.path, environ=environ)
        assert (answer["action"], code) == ("none", 1)
        assert asked("status", run.path, environ=environ)[0]["state"] == "failed"
        for job in (RunJob(job_id, run.path), by_hand):
            refuse_orders(job, environ)
        answer, code = asked("cancel", run.path, environ=environ)
        assert (answer["action"], code) == ("marked", 0)
        assert [state_of(stranger, environ) for stranger in strangers] == ["PENDING", "PENDING"]
    finally:
        down(sandbox.directory)


def refuse_orders(job: RunJob, environ: Mapping[str, str]) -> None:
    """Every order for a job whose id another has is refused, and leaves that one as it is."""
    told = f"Slurm's job {job.job_id} is not of {job.folder}, or is gone: it was left alone"
    before = subprocess.run(["scontrol", "show", "job", job.job_id], env=dict(environ), capture_output=True, check=True)
    calls: list[Any] = [
        lambda: orders.requeue(job, environ),
        lambda: orders.update(job, "Comment=ours", environ),
        lambda: orders.signal_ranks(job, "USR2", environ),
    ]
    for call in calls:
        with pytest.raises(slurm.SlurmError) as caught:
            call()
        assert str(caught.value) == told
    orders.cancel([job], environ)
    after = subprocess.run(["scontrol", "show", "job", job.job_id], env=dict(environ), capture_output=True, check=True)
    assert after.stdout == before.stdout


@pytest.mark.long
def test_raw_job_with_the_id_of_an_older_run_makes_a_run_of_its_own(
    tmp_path: Path, short_path: Path, staged_data: Path
) -> None:
    sandbox = up(short_path / "s", num_nodes=1, environ=os.environ)
    try:
        environ = environ_of(sandbox, tmp_path)
        spec = write_spec(tmp_path, staged_data, "nodes: 1\ntasks_per_node: 2\ntime_limit: 5")
        run_raw(spec, environ)
        (old,) = (tmp_path / "runs" / "tiny").iterdir()
        before = files_of(RunFolder(old))
        lose_state(sandbox, environ)
        time.sleep(1.1)  # Slurm's times are whole seconds
        run_raw(spec, environ)
        (new,) = (path for path in (tmp_path / "runs" / "tiny").iterdir() if path != old)
        assert (old.name, new.name[:2], len(new.name)) == ("1", "1-", 6)
        assert [(path / "summary.json").exists() for path in (old, new)] == [True, True]
        assert files_of(RunFolder(old)) == before
    finally:
        down(sandbox.directory)


def run_raw(spec: Path, environ: Mapping[str, str]) -> None:
    """The raw sbatch route to its end."""
    size = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=2", "--time=5"]
    raw = {**environ, "SPEC": str(spec), "PYTHON": training.command("")[0]}
    sbatch("--wait", *size, f"--output={spec.parent}/ddp-%j.log", "sbatch/ddp.sbatch", environ=raw)
