"""Cancelling a run, as far as it goes without a controller."""

import signal
import socket
from pathlib import Path

import pytest

from cluster.cancel import cancel, main
from cluster.owner import Answer
from cluster.runs import write_json
from tests.conftest import StartSupervisor
from tests.executables import put_answer
from tests.test_stop import asked, make_run, put_chain, put_slurm


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_job_is_cancelled_in_whatever_state_it_is(tmp_path: Path, state: str) -> None:
    run = make_run(tmp_path)
    answer = cancel(run, put_slurm(tmp_path, state))
    assert answer == Answer("cancelled", f"job 17 was cancelled; run folder: {run.path}", 0, "17")
    assert asked(tmp_path) == ["17"]
    assert sorted(run.read_json(run.cancel_mark)) == ["format_version", "time"]


def test_successors_are_cancelled_before_the_job_that_they_wait_for(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = cancel(run, put_chain(tmp_path, run, "RUNNING"))
    assert answer == Answer("cancelled", f"job 17 was cancelled; run folder: {run.path}", 0, "17")
    assert asked(tmp_path) == ["19 18 17"]


def test_second_cancel_keeps_the_first_mark_and_asks_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    environ = put_slurm(tmp_path, "RUNNING")
    cancel(run, environ)
    mark = run.cancel_mark.read_bytes()
    assert cancel(run, environ).exit_code == 0
    assert (run.cancel_mark.read_bytes(), asked(tmp_path)) == (mark, ["17", "17"])
    answer = cancel(run, put_slurm(tmp_path, "CANCELLED"))
    assert answer == Answer("marked", f"{run.path}: was cancelled before", 0)


def test_run_that_nobody_runs_stays_ended_by_the_mark(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = cancel(run, put_slurm(tmp_path, ""))
    assert answer == Answer("marked", f"{run.path}: nobody runs it; it stays ended", 0)
    assert (asked(tmp_path), run.cancel_mark.exists()) == ([], True)


def test_finished_run_gets_no_mark(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, {})
    answer = cancel(run, {})
    assert answer == Answer("none", f"{run.path} is finished; nothing to cancel", 1)
    assert not run.cancel_mark.exists()


@pytest.mark.parametrize("command", ["squeue", "scancel"])
def test_slurm_that_does_not_answer_leaves_the_mark_and_says_so(tmp_path: Path, command: str) -> None:
    run = make_run(tmp_path)
    environ = put_slurm(tmp_path, "RUNNING")
    put_answer(tmp_path / "bin", command, errors="no controller", exit_code=1)
    answer = cancel(run, environ)
    assert (answer.action, answer.exit_code, answer.job_id) == ("marked", 4, "17")
    words = "exit code 1: no controller; the mark cancelled.json stands, and the run stays ended once its job is gone: "
    assert answer.text.endswith(f"{words}scancel 17")
    assert run.cancel_mark.exists()


def test_supervisor_of_this_machine_gets_sigterm(tmp_path: Path, start_supervisor: StartSupervisor) -> None:
    run = make_run(tmp_path, "local")
    supervisor = start_supervisor(run.path)
    run.claim_attempt({"pid": supervisor.pid, "host": socket.gethostname()})
    answer = cancel(run, {})
    assert answer == Answer("cancelled", f"process {supervisor.pid} was ended; run folder: {run.path}", 0, "17")
    assert supervisor.wait() == -signal.SIGTERM
    assert run.cancel_mark.exists()


def test_answer_goes_to_standard_output_and_a_wrong_name_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    for name, value in put_slurm(tmp_path, "RUNNING").items():
        monkeypatch.setenv(name, value)
    assert main([str(run.path)]) == 0
    assert capsys.readouterr() == (f"job 17 was cancelled; run folder: {run.path}\n", "")
    assert main(["nosuch"]) == 2
    assert capsys.readouterr().out == ""
