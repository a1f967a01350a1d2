"""Jobs on a real Slurm of four nodes: submitted, by raw sbatch, in salloc; killed and resumed."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster import slurm
from cluster.plan import make_plan, read_plan, write_plan
from cluster.runs import RunFolder, write_atomic, write_json
from cluster.spec import dump_spec, load_spec
from tests import training
from tests.training import REPOSITORY, TOTAL_STEPS, command, environment, events_of, submit, summary_of, write_spec

FOUR_NODES = "nodes: 4\ntime_limit: 10\npartition: low"
TINY = (  # turns the reference configuration into a job of seconds; its shape on Slurm stays
    "train.device=cpu", "train.model=small", "train.epochs=1", "train.warmup_epochs=0", "train.global_batch_size=64",
    "dataset.kind=synthetic", "dataset.num_train=640", "dataset.num_test=128",
)  # fmt: skip


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {
        **slurm_environ,
        **{k: v for k, v in environment(tmp_path).items() if k not in slurm_environ},
        "XDG_STATE_HOME": str(tmp_path),
    }


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, staged_data: Path, slurm_environ: dict[str, str]
) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    environ = {**slurm_environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = submit(write_spec(folder, staged_data, FOUR_NODES), "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    return training.newest_run(folder)


def wait_until_gone(job_id: str, environ: Mapping[str, str]) -> None:
    """Wait until the job has left the queue for good."""
    training.wait_for(f"job {job_id} to end", lambda: slurm.has_ended(slurm.maybe_job_state(job_id, environ)))


def sbatch(*words: object, environ: Mapping[str, str], cwd: Path = REPOSITORY) -> str:
    """Submit without our submitter; returns the job id."""
    done = subprocess.run(
        ["sbatch", "--parsable", *map(str, words)],
        env=dict(environ),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def job_field(job_id: str, name: str, environ: Mapping[str, str]) -> str:
    """One field of `scontrol show job`."""
    match = re.search(rf"\b{name}=(\S+)", slurm.run(["scontrol", "show", "job", job_id], environ))
    assert match, name
    return match[1]


def job_of(run: RunFolder) -> str:
    return str(events_of(run, "submitted")[-1]["job_id"])


def test_undisturbed_job_trains_on_four_nodes(undisturbed: RunFolder) -> None:
    summary = summary_of(undisturbed)
    assert (summary["world_size"], summary["steps"], summary["attempts"]) == (4, TOTAL_STEPS, 1)
    assert len(events_of(undisturbed, "attempt_started")[0]["nodes"]) == 4
    job_id = job_of(undisturbed)
    assert sorted(path.name for path in undisturbed.logs.iterdir()) == ["attempt_0001.log", f"batch_{job_id}.log"]
    assert [path for path in (undisturbed.path, *undisturbed.path.rglob("*")) if path.stat().st_mode & 0o077] == []


def test_submitted_script_is_the_one_that_dry_run_prints(
    tmp_path: Path, undisturbed: RunFolder, environ: dict[str, str]
) -> None:
    spec = undisturbed.path.parents[2] / "tiny.yaml"
    dry = submit(spec, "--dry-run", environ=environ)
    printed_id = re.search(r"/tiny/([^/]+)/logs", dry.stdout)
    assert printed_id
    script = dry.stdout.replace(printed_id[1], undisturbed.run_id)
    assert script == undisturbed.script.read_text()
    assert script == (undisturbed.submitit / f"{job_of(undisturbed)}_submission.sh").read_text()
    assert not (undisturbed.path.parent / printed_id[1]).exists()


@pytest.mark.long
def test_reference_configuration_trains_eight_ranks(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    words = [*TINY, f"dataset.root={staged_data}", f"run_root={tmp_path / 'runs'}", "name=vier knoten"]
    done = submit("configs/4node.yaml", *words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    assert slurm.run(["squeue", "-h", "-j", submitted["job_id"], "-o", "%j"], environ) == "vier knoten\n"
    wait_until_gone(submitted["job_id"], environ)
    run = RunFolder(Path(submitted["run_dir"]))
    summary = summary_of(run)
    assert (summary["name"], summary["world_size"], summary["run_id"]) == ("vier knoten", 8, submitted["run_id"])
    assert job_field(submitted["job_id"], "JobState", environ) == "COMPLETED"
    assert job_field(submitted["job_id"], "Requeue", environ) == "1"
    assert submitted["script"] == run.script.read_text()


def test_raw_sbatch_runs_the_same_job(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    lines = ["#!/bin/bash", (REPOSITORY / "sbatch/ddp.sbatch").read_text()]
    assert lines[1].startswith(lines[0])
    spec = tmp_path / "4node.yaml"
    shutil.copy(REPOSITORY / "configs/4node.yaml", spec)
    words = [*TINY, f"dataset.root={staged_data}", f"run_root={tmp_path / 'runs'}"]
    raw = {**environ, "SPEC": str(spec), "PYTHON": command("")[0]}
    flags = [f"--output={tmp_path}/ddp-%j.log", "--nodes=2", "--time=5"]
    job_id = sbatch(*flags, "sbatch/ddp.sbatch", *words, environ=raw)
    wait_until_gone(job_id, environ)
    run = RunFolder(tmp_path / "runs/4node" / job_id)
    assert (summary_of(run)["world_size"], summary_of(run)["run_id"]) == (4, job_id)
    log = run.batch_log(job_id).read_text()
    first = (tmp_path / f"ddp-{job_id}.log").read_text()
    assert "the allocation wins over the spec: nodes: 4 -> 2; time_limit: 08:00:00 -> 00:05:00" in first
    assert first.endswith(f"the log goes on in {run.batch_log(job_id)}\n")
    assert "finished: all steps done" in log
    assert load_spec(run.spec, cwd=tmp_path).nodes == 2


@pytest.mark.long
def test_killed_job_resumed_by_hand_equals_the_undisturbed_one(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, environ: dict[str, str]
) -> None:
    kill_at = random.Random(7).randint(TOTAL_STEPS // 5, TOTAL_STEPS * 4 // 5)
    done = submit(write_spec(tmp_path, staged_data, FOUR_NODES), "--json", environ=environ)
    job_id = json.loads(done.stdout)["job_id"]
    run = training.wait_for_step(tmp_path, kill_at)
    alive = submit("--resume", run.path, environ=environ)
    assert (alive.returncode, alive.stderr.split(":")[0]) == (2, f"job {job_id} of this run is RUNNING")

    subprocess.run(["scancel", "--full", "--signal=KILL", job_id], env=environ, check=True)
    wait_until_gone(job_id, environ)
    training.wait_for("all processes to go", lambda: not training.processes_of(run))
    reached = max(training.last_step(run), json.loads(run.heartbeat.read_text())["step"])
    saved = max(int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("step_*.json"))
    assert TOTAL_STEPS / 5 <= reached <= TOTAL_STEPS * 0.9

    done = submit("--resume", job_id, "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    summary, straight = summary_of(run), summary_of(undisturbed)
    assert summary["weights_sha256"] == straight["weights_sha256"]
    assert summary["samples_sha256"] == straight["samples_sha256"]
    assert (summary["attempts"], summary["lost_steps"], summary["bit_exact"]) == (2, reached - saved, True)
    assert events_of(run, "first_step")[1]["step"] == saved + 1 > 1
    assert training.metrics_without_timing(run) == training.metrics_without_timing(undisturbed)


def test_usr2_to_one_rank_stops_and_saves_all_and_fewer_nodes_go_on_with_the_same_samples(
    tmp_path: Path, staged_data: Path, undisturbed: RunFolder, environ: dict[str, str]
) -> None:
    done = submit(write_spec(tmp_path, staged_data, FOUR_NODES), "--json", environ=environ)
    job_id = json.loads(done.stdout)["job_id"]
    run = training.wait_for_step(tmp_path, 8)
    write_json(run.stop_mark, {"requeue": False})  # the job is not to come back by itself
    (one,) = [pid for pid in training.processes_of(run) if has_rank(pid, 2)]
    os.kill(one, signal.SIGUSR2)
    wait_until_gone(job_id, environ)
    stopped = events_of(run, "stopped")[0]
    verdict = json.loads(run.verdict(1).read_text())
    assert (stopped["signal"], verdict["outcome"], verdict["exit_code"]) == ("SIGUSR2", "stopped", 75)
    assert run.checkpoints.joinpath(f"step_{stopped['step']:08d}.json").exists()
    assert job_field(job_id, "ExitCode", environ) == "75:0"

    done = submit("--resume", run.path, "nodes=2", "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    summary = summary_of(run)
    assert (summary["world_size"], summary["attempts"], summary["lost_steps"]) == (2, 2, 0)
    assert summary["samples_sha256"] == summary_of(undisturbed)["samples_sha256"]
    assert summary["bit_exact"] is False
    assert events_of(run, "environment_changed")[0]["world_size"] == [4, 2]


def has_rank(pid: int, rank: int) -> bool:
    """Whether a process is one rank's training program, and not the srun that started it."""
    folder = Path(f"/proc/{pid}")
    words = (folder / "cmdline").read_bytes().split(b"\0")
    return words[2:3] == [b"jobs.train"] and f"\0SLURM_PROCID={rank}\0".encode() in (folder / "environ").read_bytes()


def test_exception_in_one_rank_ends_the_job_within_seconds(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = load_spec(write_spec(tmp_path, staged_data, FOUR_NODES), cwd=tmp_path)
    run = RunFolder(spec.run_root / spec.name / "faulty")
    run.make()
    write_atomic(run.spec, dump_spec(spec))
    run.append_event("submitted", attempt=0, job_id="", route="slurm")
    write_plan(make_plan(spec, run, python=command("")[0]), run)
    plan = read_plan(run)
    write_plan(training.with_faulty_rank(plan, rank=1, at_step=5), run)
    wrapped = " ".join(plan.supervisor)
    job_id = sbatch("-N4", "--ntasks-per-node=1", f"--output={tmp_path}/log", f"--wrap=exec {wrapped}", environ=environ)
    wait_until_gone(job_id, environ)
    ended = time.time()

    record = json.loads((run.failures / "a0001_r00001.json").read_text())
    assert record["exception"] == "ArithmeticError: broken on purpose at step 5"
    assert ended - float(record["traceback"].rstrip().rpartition("second line, ")[2]) < 10
    assert job_field(job_id, "ExitCode", environ) == "1:0"
    failed = events_of(run, "attempt_failed")[0]
    assert (failed["rank"], failed["cause"]) == (1, "exception")
    assert failed["reason"].endswith(": ArithmeticError: broken on purpose at step 5")
    lines = run.attempt_log(1).read_text().splitlines()
    assert any(" r00001 E ArithmeticError: broken on purpose at step 5" in line for line in lines)


def test_variables_of_an_outer_job_do_not_reach_the_inner_one(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    outer = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "9",
        "SLURM_MEM_PER_CPU": "8192",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_ARRAY_JOB_ID": "5",
        "SBATCH_PARTITION": "nosuch",
        "PMI_RANK": "3",
        "RANK": "3",
        "WORLD_SIZE": "9",
        "MASTER_ADDR": "nosuch",
        "MASTER_PORT": "1",
    }
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 5")
    done = submit(spec, "train.max_steps=3", "--wait", environ={**environ, **outer})
    assert done.returncode == 0, done.stderr
    assert summary_of(training.newest_run(tmp_path))["world_size"] == 2


def test_refused_job_shows_slurms_words_and_leaves_nothing(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    done = submit(write_spec(tmp_path, staged_data, "time_limit: 5\nsbatch: {licenses: nosuch}"), environ=environ)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-2:] == [
        "sbatch: error: Batch job submission failed: Invalid license specification",
        "Slurm refused the job; it was asked for sbatch.licenses: nosuch; nothing was submitted",
    ]
    assert not list((tmp_path / "runs").glob("*/*"))


def test_slurm_that_is_not_there_gives_exit_code_4(tmp_path: Path, staged_data: Path, environ: dict[str, str]) -> None:
    conf = Path(environ["SLURM_CONF"]).read_text()
    dead = re.sub(r"(?m)^SlurmctldPort=.*$", "SlurmctldPort=1", conf) + "\nMessageTimeout=3\n"
    (tmp_path / "slurm.conf").write_text(dead)
    environ = {**environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    done = submit(write_spec(tmp_path, staged_data, FOUR_NODES), environ=environ)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1] == "Slurm was not reached; nothing was submitted. To find out: scontrol ping"
    assert not list((tmp_path / "runs").glob("*/*"))


def test_ctrl_c_in_salloc_stops_and_saves_and_the_next_start_goes_on(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 5")
    supervise = shlex.join(command("cluster.supervise", spec))
    words = ["salloc", "-N2", "--ntasks-per-node=1", "-t5", "sh", "-c", f"{supervise}; echo first $?; {supervise}"]
    shell = subprocess.Popen(words, env=environ, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    training.wait_for("a run folder", lambda: list((tmp_path / "runs").glob("*/*/plan.json")))
    run = training.newest_run(tmp_path)
    training.wait_for("step 5", lambda: training.last_step(run) >= 5)
    os.kill(run.read_attempt(1)["pid"], signal.SIGINT)
    output, _ = shell.communicate()
    assert (shell.returncode, "first 75" in output) == (0, True)
    summary = summary_of(run)
    assert (summary["world_size"], summary["attempts"], summary["lost_steps"]) == (2, 2, 0)
    assert events_of(run, "stopped")[0]["signal"] == "SIGUSR2"  # handed on by srun


def test_program_started_in_the_batch_shell_says_that_it_is_not_a_task(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, FOUR_NODES)
    wrapped = " ".join(command("jobs.train", spec))
    job_id = sbatch("-N2", "--ntasks-per-node=1", f"--output={tmp_path}/log", f"--wrap={wrapped}", environ=environ)
    wait_until_gone(job_id, environ)
    assert job_field(job_id, "ExitCode", environ) == "2:0"
    assert "srun" in (tmp_path / "log").read_text()


def test_setup_and_env_reach_the_ranks_and_a_failing_setup_line_ends_the_job(
    tmp_path: Path, staged_data: Path, environ: dict[str, str]
) -> None:
    setup = [r'export SECOND="$WORD"', f"printf '%s' \"$SECOND\" > {tmp_path}/word"]
    where = 'nodes: 2\ntime_limit: 5\nenv:\n  WORD: "it\'s $HOME"\nsetup:\n' + "".join(f"- {line}\n" for line in setup)
    good = write_spec(tmp_path, staged_data, where)
    done = submit(good, "train.max_steps=2", "--wait", environ=environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "word").read_text() == "it's $HOME"

    bad = write_spec(tmp_path, staged_data, "time_limit: 5\nsetup:\n- cd /nosuch")
    done = submit(bad, "--json", environ=environ)
    job_id = json.loads(done.stdout)["job_id"]
    wait_until_gone(job_id, environ)
    assert (job_field(job_id, "JobState", environ), job_field(job_id, "ExitCode", environ)) == ("FAILED", "2:0")
    run = training.newest_run(tmp_path)
    (failed,) = events_of(run, "setup_failed")
    assert (failed["job_id"], failed["line"], failed["number"], failed["exit_code"]) == (job_id, "cd /nosuch", 1, 1)
    assert run.batch_log(job_id).read_text().splitlines()[-1] == (
        "setup: line 1 of 1 (cd /nosuch) ended with exit code 1"
    )
    assert run.latest_attempt() == 0
