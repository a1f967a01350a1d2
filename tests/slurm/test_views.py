"""status, why and logs on a real Slurm: of runs that wait, come back, fail or are cancelled; slurmctld away."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import slurm
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox, down, up, without_slurm
from tests import training
from tests.slurm.test_comeback import hold_still, where
from tests.slurm.test_jobs import job_field, sbatch, wait_until_gone
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, events_of, submit, write_spec

TWO_NODES = "nodes: 2\ntime_limit: 5\npartition: low"


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def start(folder: Path, data: Path, environ: Mapping[str, str], text: str, *words: str) -> tuple[RunFolder, str]:
    """Submit; returns the run and its job id."""
    done = submit(write_spec(folder, data, text), *words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return RunFolder(Path(told["run_dir"])), told["job_id"]


def verb(name: str, *words: object, environ: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """`python -m cluster.<name> words` to its end."""
    return subprocess.run(
        command(f"cluster.{name}", *words),
        env=dict(environ),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def asked(name: str, *words: object, environ: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The object that a verb prints with --json, and its exit code."""
    done = verb(name, *words, "--json", environ=environ)
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout)), done.returncode


def told(name: str, *words: object, keys: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Some of these keys, and the exit code."""
    answer, code = asked(name, *words, environ=environ)
    return {key: answer[key] for key in keys.split()} | {"exit_code": code}


def wait_for_reason(job_id: str, reason: str, environ: Mapping[str, str]) -> None:
    def has_it() -> bool:
        job = slurm.maybe_job_state(job_id, environ)
        return job is not None and job.reason == reason

    training.wait_for(f"job {job_id} to wait for {reason}", has_it)


@pytest.fixture
def limit(environ: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Sets the longest time of partition high."""

    def set_limit(time: str) -> None:
        subprocess.run(["scontrol", "update", "PartitionName=high", f"MaxTime={time}"], env=environ, check=True)

    yield set_limit
    set_limit("INFINITE")


def test_waiting_runs_say_why_and_whether_that_ends(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], limit: Callable[[str], None]
) -> None:
    parent = sbatch("-o/dev/null", "--wrap=exit 3", environ=environ)
    asks: dict[str, tuple[str, ...]] = {
        "JobHeldUser": ("sbatch.hold=true",),
        "BeginTime": ("sbatch.begin=now+3600",),
        "PartitionTimeLimit": ("sbatch.hold=true", "partition=high"),
        "DependencyNeverSatisfied": (f"sbatch.dependency=afterok:{parent}",),
    }
    runs = {reason: start(tmp_path, staged_data, environ, TWO_NODES, *words) for reason, words in asks.items()}
    held, begins, too_long, vain = (job_id for _, job_id in runs.values())
    limit("2")
    subprocess.run(["scontrol", "release", too_long], env=environ, check=True)
    for reason, (_, job_id) in runs.items():
        wait_for_reason(job_id, reason, environ)
    keys = "state slurm_reason never_starts"
    assert {reason: told("status", job, keys=keys, environ=environ) for reason, (_, job) in runs.items()} == {
        "JobHeldUser": shown("pending", "JobHeldUser", never=False),
        "BeginTime": shown("pending", "BeginTime", never=False),
        "PartitionTimeLimit": shown("pending", "PartitionTimeLimit", never=True),
        "DependencyNeverSatisfied": shown("failed", "DependencyNeverSatisfied", never=True),
    }
    to_do = {job: asked("why", job, environ=environ)[0]["to_do"] for job in (held, begins, vain)}
    assert to_do == {held: f"scontrol release {held}", begins: None, vain: f"scancel {vain}, and submit it anew"}
    begin = slurm.run(["squeue", "-h", "-j", begins, "-o", "%S"], environ).strip()
    assert f"may start at {begin[11:16]}" in verb("why", begins, environ=environ).stdout.replace(begin[:10] + " ", "")

    subprocess.run(["scancel", held, begins, too_long, vain], env=environ, check=True)
    ended = told("status", held, keys="state because", environ=environ)
    because = f"job {held} ended as CANCELLED (JobHeldUser) before it began"
    assert ended == {"state": "cancelled", "because": because, "exit_code": 1}
    listed = asked("status", environ=environ)
    assert ([run["state"] for run in listed[0]["runs"]], listed[1]) == (["cancelled"] * 4, 0)

    _, requeued = start(tmp_path, staged_data, environ, TWO_NODES)
    training.wait_for("the job to run", lambda: job_field(requeued, "JobState", environ) == "RUNNING")
    subprocess.run(["scontrol", "requeuehold", requeued], env=environ, check=True)
    training.wait_for("the job to wait", lambda: job_field(requeued, "JobState", environ) != "COMPLETING")
    why, code = asked("why", requeued, environ=environ)
    assert (why["to_do"], why["never_starts"], code) == (f"scontrol release {requeued}", False, 0)
    subprocess.run(["scancel", requeued], env=environ, check=True)


def shown(state: str, reason: str, *, never: bool) -> dict[str, Any]:
    return {
        "state": state,
        "slurm_reason": reason,
        "never_starts": never,
        "exit_code": 1 if never or state == "failed" else 0,
    }


def test_dependency_that_is_never_satisfied_ends_the_waiting_for_a_run(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    parent = sbatch("-o/dev/null", "--wrap=exit 3", environ=environ)
    spec = write_spec(tmp_path, staged_data, TWO_NODES)
    done = submit(spec, f"sbatch.dependency=afterok:{parent}", "--wait", environ=environ)
    assert done.returncode == 1
    job_id = events_of(training.newest_run(tmp_path), "submitted")[0]["job_id"]
    assert done.stderr.startswith(f"job {job_id} never starts: DependencyNeverSatisfied: ")
    subprocess.run(["scancel", job_id], env=environ, check=True)


def test_runs_are_shown_from_their_folders_while_slurmctld_is_away(
    short_path: Path, tmp_path: Path, staged_data: Path
) -> None:
    sandbox = up(short_path / "s", num_nodes=1, gpus_per_node=0, environ=os.environ)
    try:
        variables = {**without_slurm(os.environ), **sandbox.variables()}
        environ = {**environment(tmp_path), **variables, "XDG_STATE_HOME": str(tmp_path)}
        run, job_id = start(tmp_path, staged_data, environ, "nodes: 1\ntime_limit: 5\nsbatch:\n  hold: true")
        controller = int((sandbox.directory / "run" / "slurmctld.pid").read_text())
        os.kill(controller, signal.SIGSTOP)
        check_away(run, job_id, environ, "no answer within 1.5 s")
        os.kill(controller, signal.SIGKILL)
        check_away(run, job_id, environ, "no answer within 1.5 s")
    finally:
        down(sandbox.directory)


def check_away(run: RunFolder, job_id: str, environ: Mapping[str, str], error: str) -> None:
    note = f"Slurm was not reached, and this is what the run folder{{}} say{{}}: {error}\n"
    every = verb("status", environ=environ)
    line = f"{run.run_id}  tiny  {job_id}  pending  as of its submission"
    assert (every.stdout.splitlines()[1].split(), every.returncode) == (line.split(), 4)
    assert every.stderr == note.format("s", "")
    one, why = verb("status", job_id, environ=environ), verb("why", job_id, environ=environ)
    assert (one.stderr, one.returncode) == (note.format("s", ""), 4)
    assert (why.stdout.splitlines()[0], why.stderr, why.returncode) == (
        f"tiny {run.run_id}: pending",
        note.format("", "s"),
        4,
    )


@pytest.fixture
def preempt(environ: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Takes all nodes for a moment by a job of the higher partition."""
    started: list[str] = []

    def take() -> None:
        started.append(sbatch("-phigh", "-N4", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 2", environ=environ))

    yield take
    for job_id in started:
        subprocess.run(["scancel", job_id], env=environ, check=False)


@pytest.fixture
def follow(environ: dict[str, str]) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts `cluster.logs -f`."""
    started: list[subprocess.Popen[str]] = []

    def start_it(job_id: str) -> "subprocess.Popen[str]":
        words = command("cluster.logs", job_id, "-f")
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, env=environ, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start_it
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_run_that_is_preempted_twice_is_followed_to_its_end(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    preempt: Callable[[], None],
    follow: Callable[[str], "subprocess.Popen[str]"],
) -> None:
    run, job_id = start(tmp_path, staged_data, environ, where())
    following = follow(job_id)
    stops = []
    for number in (1, 2):
        training.wait_for("the attempt to train", lambda n=number: len(events_of(run, "first_step")) == n)
        keys = "state attempt nodes total_steps source"
        assert told("status", job_id, keys=keys, environ=environ) == {
            "state": "training",
            "attempt": number,
            "nodes": "n[1-4]",
            "total_steps": TOTAL_STEPS,
            "source": "squeue",
            "exit_code": 0,
        }
        hold_still(run)
        preempt()
        training.wait_for("the requeue", lambda n=number: len(events_of(run, "requeued")) == n)
        training.wait_for("the job to wait", lambda: job_field(job_id, "JobState", environ) == "PENDING")
        stops.append(events_of(run, "stopped")[-1]["step"])
        waits = told("status", job_id, keys="state step checkpoint_step", environ=environ)
        assert waits == {"state": "requeued", "step": stops[-1], "checkpoint_step": stops[-1], "exit_code": 0}
        assert run.run_id in comment_of(job_id, environ)
    output, errors = following.communicate(timeout=training.PATIENCE_S)
    assert (following.returncode, errors) == (0, "the run has finished\n")
    banners = [line for line in output.splitlines() if line.startswith("---")]
    assert [banner.split(":")[0] for banner in banners if "job" in banner] == [f"--- attempt {n}" for n in (1, 2, 3)]
    logs = "".join(run.attempt_log(number).read_text() for number in (1, 2, 3))
    assert [line for line in output.splitlines() if not line.startswith("---")] == logs.splitlines()

    why, code = asked("why", run.path, environ=environ)
    story = [(one["from_step"], one["to_step"], one["outcome"], one["action"]) for one in why["attempts"]]
    assert (story, code) == (
        [
            (0, stops[0], "stopped", "requeue"),
            (stops[0], stops[1], "stopped", "requeue"),
            (stops[1], TOTAL_STEPS, "finished", "leave"),
        ],
        0,
    )
    assert len(verb("why", run.path, environ=environ).stdout.splitlines()) == 1 + 3
    assert told("status", job_id, keys="state step", environ=environ) == {
        "state": "finished",
        "step": TOTAL_STEPS,
        "exit_code": 0,
    }


def comment_of(job_id: str, environ: Mapping[str, str]) -> str:
    return slurm.run(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%k"], environ).strip()


@pytest.mark.long
def test_failed_run_says_why_in_ten_lines(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    fault = "faults:\n- {at_step: 5, rank: 1, do: raise}\n"
    faulty = {**environ, "CLUSTER_ALLOW_FAULTS": "1"}
    run, job_id = start(tmp_path, staged_data, faulty, f"{TWO_NODES}\n{fault}")
    training.wait_for("a comment", lambda: run.run_id in comment_of(job_id, environ))
    wait_until_gone(job_id, environ)
    why, code = asked("why", job_id, environ=environ)
    assert {key: why[key] for key in ("state", "class", "rank", "slurm", "see")} == {
        "state": "failed",
        "class": "exception",
        "rank": 1,
        "slurm": f"job {job_id} is FAILED (NonZeroExitCode), exit code 1:0",
        "see": str(run.attempt_log(1)),
    }
    assert re.fullmatch(r"rank 1 on \S+: FaultError: broken on purpose at step 5", why["cause"])
    assert (why["traceback"][-1], code) == ("jobs.faults.FaultError: broken on purpose at step 5", 1)
    lines = verb("why", job_id, environ=environ).stdout.splitlines()
    assert (len(lines), lines[0]) == (10, f"tiny {run.run_id}: failed, attempt 1")
    shown = told("status", job_id, keys="state because attempt", environ=environ)
    assert (shown["state"], shown["attempt"], shown["exit_code"]) == ("failed", 1, 1)
    of_rank = verb("logs", job_id, "--rank", 1, "--level", "E", environ=environ).stdout.splitlines()
    assert {line.split()[1:3] == ["r00001", "E"] for line in of_rank[1:-1]} == {True}
    assert [line.split(" E ")[1] for line in of_rank[1:-1]] == why["traceback"]


@pytest.mark.long
def test_failing_line_of_setup_is_named(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    run, job_id = start(tmp_path, staged_data, environ, f"{TWO_NODES}\nsetup:\n- cd /nosuch")
    wait_until_gone(job_id, environ)
    why, code = asked("why", job_id, environ=environ)
    assert (why["state"], why["attempts"], why["see"], code) == ("failed", [], str(run.batch_log(job_id)), 1)
    assert "/nosuch" in why["cause"]
    logs = verb("logs", job_id, environ=environ)
    assert (logs.returncode, logs.stdout.splitlines()[0]) == (1, f"--- batch_{job_id}.log ---")
    assert "/nosuch" in logs.stdout


@pytest.mark.long
def test_cancelled_run_says_so_and_keeps_its_users_comment(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    run, job_id = start(tmp_path, staged_data, environ, TWO_NODES, "train.epochs=400", "comment=mine, for the paper")
    training.wait_for_step(tmp_path, 3)
    subprocess.run(["scancel", job_id], env=environ, check=True)
    wait_until_gone(job_id, environ)
    assert comment_of(job_id, environ) == "mine, for the paper"
    why, code = asked("why", job_id, environ=environ)
    step = events_of(run, "stopped")[0]["step"]
    assert (why["state"], why["class"], why["cause"], code) == (
        "cancelled",
        "user cancel",
        f"user cancel (SIGTERM), saved at step {step}",
        1,
    )
    assert why["slurm"].startswith(f"job {job_id} is CANCELLED")
    following = verb("logs", job_id, "-f", environ=environ)
    assert (following.returncode, following.stderr) == (75, "the run has stopped and is saved\n")


@pytest.mark.long
def test_log_folder_that_is_gone_is_the_cause_that_is_named(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    """Field report 27: Slurm opens the log before the job's first line, and the job ends without a word.

    A file stands in the folder's place, since 26.05 makes folders that are missing.
    """
    run, job_id = start(tmp_path, staged_data, environ, f"{TWO_NODES}\nsbatch:\n  hold: true")
    run.logs.rename(run.path / "moved")
    run.logs.touch()
    subprocess.run(["scontrol", "release", job_id], env=environ, check=True)
    wait_until_gone(job_id, environ)
    run.logs.unlink()
    run.logs.mkdir()
    why, code = asked("why", job_id, environ=environ)
    assert (why["state"], code) == ("failed", 1)
    assert why["cause"].endswith(f"it left no log, so Slurm could not start it or not open {run.logs}")
    assert why["to_do"] == f"is {run.logs} on storage that the nodes see? then submit it anew"


@pytest.fixture
def limiting(short_path: Path) -> Iterator[Sandbox]:
    """A Slurm that ends jobs which use more memory than they asked for."""
    gather = ("Type=jobacct_gather/linux", "Frequency=task=1", "Params=OverMemoryKill")
    settings = ["SelectTypeParameters=CR_Core_Memory", *(f"JobAcctGather{line}" for line in gather)]
    sandbox = up(short_path / "s", num_nodes=1, gpus_per_node=0, settings=settings, environ=os.environ)
    yield sandbox
    down(sandbox.directory)


@pytest.mark.long
def test_run_that_is_killed_for_memory_says_so(limiting: Sandbox, tmp_path: Path, staged_data: Path) -> None:
    variables = {**without_slurm(os.environ), **limiting.variables()}
    environ = {**environment(tmp_path), **variables, "XDG_STATE_HOME": str(tmp_path)}
    text = "nodes: 1\ntime_limit: 5\nmemory_per_node: 150M"
    run, job_id = start(tmp_path, staged_data, environ, text)
    wait_until_gone(job_id, environ)
    why, code = asked("why", job_id, environ=environ)
    assert (why["state"], why["class"], why["rank"], code) == ("failed", "out of memory", 0, 1)
    assert why["cause"] == "rank 0 was ended by a signal: Killed; slurmstepd: Exceeded job memory limit"
    assert why["slurm"] == (
        f"job {job_id} is FAILED (NonZeroExitCode), exit code 1:0; its log: Exceeded job memory limit"
    )
    assert run.latest_attempt() == 1
