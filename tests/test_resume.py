"""Resumption by hand: what may change, who may still be at work, and what is kept of a finished run."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.owner import is_alive
from cluster.resume import ResumeError, Resumption, prepare_resumption
from cluster.runs import RunFolder, write_json
from cluster.spec import SpecError, dump_spec, load_spec
from tests.executables import put_answer, put_executable, shown_job

SLURM = "name: demo\ntime_limit: 60\n"
LOCAL = "name: demo\ncluster: local\n"


def make_run(folder: Path, text: str = SLURM, route: str = "slurm") -> RunFolder:
    """A run as submit leaves it, with one attempt."""
    (folder / "source.yaml").write_text(text)
    run = RunFolder(folder / "demo" / "a")
    run.make()
    run.spec.write_text(dump_spec(load_spec(Path("source.yaml"), cwd=folder)))
    run.append_event("submitted", attempt=0, job_id="17", route=route)
    run.claim_attempt({"job_id": "17", "host": socket.gethostname(), "pid": 2**22})  # no such process
    return run


def slurm_says(folder: Path, state: str) -> dict[str, str]:
    """An environment whose squeue knows every job in this state; "" for none."""
    put_executable(folder / "bin", "scontrol", shown_job(folder / "demo" / "a"))
    put_answer(folder / "bin", "squeue", f"17|17|{state}|None|n1|10:00\n" if state else "")
    return {"PATH": str(folder / "bin")}


def refused(run: RunFolder, overrides: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(ResumeError) as caught:
        prepare_resumption(run, overrides, environ)
    return str(caught.value)


def test_free_keys_change_the_frozen_spec_only_when_committed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "stop.json").write_text("{}")
    before = run.spec.read_text()
    changes = ["time_limit=2:00:00", "partition=gpu", "checkpoint.every_steps=50", "checkpoint.every_minutes=5"]
    resumption = prepare_resumption(run, changes, slurm_says(tmp_path, "TIMEOUT"))
    assert (resumption.run, resumption.is_done, run.spec.read_text()) == (run, False, before)
    resumption.commit()
    assert load_spec(run.spec, cwd=run.path) == resumption.sourced.spec
    assert resumption.sourced.spec.time_limit == "2:00:00"
    assert sorted(path.name for path in run.path.iterdir() if path.is_file()) == ["events.jsonl", "spec.yaml"]


@pytest.mark.parametrize(
    ("batch", "override", "said"),
    [
        (
            "batch_size_per_rank: 32",
            "nodes=2",
            "nodes: fixed since the run began (nodes may change in a run with train.global_batch_size); a resumption "
            "may change checkpoint.every_minutes, checkpoint.every_steps, checkpoint.save_timeout_s, code, partition, "
            "python, time_limit, train.epochs, train.start_timeout_s, train.step_timeout_s, train.tensorboard",
        ),
        (
            "global_batch_size: 32",
            "train.lr=0.5",
            "train.lr: fixed since the run began; a resumption may change checkpoint.every_minutes, "
            "checkpoint.every_steps, checkpoint.save_timeout_s, code, nodes, partition, python, time_limit, "
            "train.epochs, train.start_timeout_s, train.step_timeout_s, train.tensorboard",
        ),
    ],
)
def test_key_that_is_part_of_the_run_is_fixed(tmp_path: Path, batch: str, override: str, said: str) -> None:
    run = make_run(tmp_path, f"{SLURM}train: {{{batch}}}\n")
    assert refused(run, [override], {}) == said


def test_nodes_may_change_where_the_global_batch_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, f"{SLURM}train: {{global_batch_size: 32}}\n")
    assert prepare_resumption(run, ["nodes=2"], slurm_says(tmp_path, "")).sourced.spec.nodes == 2


def test_wrong_value_is_the_specs_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        prepare_resumption(make_run(tmp_path), ["time_limit=soon"], {})


def test_run_in_progress_can_only_be_made_longer(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    environ = slurm_says(tmp_path, "")
    assert prepare_resumption(run, ["train.epochs=2"], environ).sourced.spec.train.epochs == 2
    run.append_event("checkpoint_saved", attempt=1, job_id="17", step=40)
    assert refused(run, ["train.epochs=2"], environ) == (
        "train.epochs: 2 is less than the run's 30, and 40 steps are done; a run in progress can only be made longer"
    )


def test_run_that_ended_by_max_steps_cannot_be_made_longer_by_epochs(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLURM + "train:\n  max_steps: 5\n")
    write_json(run.summary, {"steps": 5})
    said = "train.epochs: the run ended by train.max_steps=5, which is fixed"
    assert refused(run, ["train.epochs=60"], slurm_says(tmp_path, "")) == said


def test_cancelled_run_stays_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "cancelled.json").write_text("{}")
    assert refused(run, [], {}) == f"{run.path} was cancelled by its user and stays ended"


def test_finished_run_has_nothing_to_do_unless_it_is_made_longer(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, {"steps": 40})
    kept = {"summary.a0001.json": run.summary.read_text(), "spec.a0001.yaml": run.spec.read_text()}
    assert prepare_resumption(run, ["time_limit=2:00:00"], {}).is_done
    resumption = prepare_resumption(run, ["train.epochs=60"], slurm_says(tmp_path, "COMPLETED"))
    assert not resumption.is_done
    resumption.commit()
    assert {name: (run.path / name).read_text() for name in kept} == kept
    assert not run.summary.exists()
    assert load_spec(run.spec, cwd=run.path).train.epochs == 60
    event = run.read_events()[-1]
    assert {**event, "time": ""} == {"time": "", "event": "extended", "attempt": 1, "job_id": "", "epochs": 60}


def test_job_that_is_in_the_queue_is_left_to_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    said = refused(run, [], slurm_says(tmp_path, "PENDING"))
    assert said == "job 17 of this run is PENDING: it goes on by itself; to end it: scancel 17"


def test_no_answer_says_nothing_about_a_job(tmp_path: Path) -> None:
    said = refused(make_run(tmp_path), [], {"PATH": str(tmp_path)})
    assert said == (
        "Slurm did not say whether job 17 of this run is alive: "
        "squeue is not on PATH: is this a machine of the cluster?"
    )


@pytest.fixture
def supervisor() -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose command line is a supervisor's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "-m", "cluster.supervise"])
    while not is_alive(process.pid, socket.gethostname()):  # between fork and exec it has our command line
        pass
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(("text", "route"), [(LOCAL, "local"), (SLURM, "direct")])
def test_run_outside_slurm_is_alive_as_long_as_the_process_that_claimed_it(
    tmp_path: Path, text: str, route: str, supervisor: "subprocess.Popen[bytes]"
) -> None:
    run = make_run(tmp_path, text, route)
    assert isinstance(prepare_resumption(run, [], {}), Resumption)
    run.claim_attempt({"pid": supervisor.pid, "host": socket.gethostname()})
    said = f"{run.path} is being trained by process {supervisor.pid} on {socket.gethostname()}"
    assert refused(run, [], {}) == said
    supervisor.kill()
    supervisor.wait()
    assert isinstance(prepare_resumption(run, [], {}), Resumption)


def test_other_processes_and_other_hosts_are_no_supervisor_of_ours(supervisor: "subprocess.Popen[bytes]") -> None:
    assert not is_alive(os.getppid(), socket.gethostname())
    assert not is_alive(supervisor.pid, "another-host")
