"""Stopping a run, as far as it goes without a controller; test_cancel.py uses what is here too."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from cluster.owner import Answer, Owner, jobs_since_submission, maybe_owner
from cluster.runs import RunFolder, write_json
from cluster.stop import StopError, main, stop
from tests.conftest import StartSupervisor
from tests.executables import put_answer, put_executable, shown_job

TO_GO_ON = "to go on: python -m cluster.submit --resume"


def make_run(folder: Path, route: str = "slurm", job_id: str = "17") -> RunFolder:
    """A submitted run; nobody has claimed an attempt."""
    run = RunFolder(folder / "demo" / "a")
    run.make()
    run.spec.write_text("name: demo\n")
    run.append_event("submitted", attempt=0, job_id=job_id, route=route)
    return run


def put_slurm(folder: Path, state: str, *, steps: str = "17.batch\n17.0\n", then: str = "") -> dict[str, str]:
    """An environment with a squeue that knows every job in a state, and a scancel that notes its words.

    state: "" for no job.  then: the state after scancel.
    """
    lines = [f"17|17|{word}|None|n1|10:00\n" if word else "" for word in (state, then or state)]
    (folder / "state").write_text(lines[0])
    (folder / "then").write_text(lines[1])
    change = f"cp {folder}/then {folder}/state" if then else ":"
    squeue = f'case "$*" in *--steps*) printf "{steps}"; exit;; esac; while read line; do echo "$line"; done'
    put_executable(folder / "bin", "squeue", f"{squeue} < {folder}/state")
    put_executable(folder / "bin", "scontrol", shown_job(folder / "demo" / "a"))
    put_executable(folder / "bin", "scancel", f'echo "$*" >> {folder}/asked; PATH=/usr/bin:/bin; {change}')
    return {"PATH": str(folder / "bin"), "XDG_STATE_HOME": str(folder)}


def put_chain(folder: Path, run: RunFolder, state: str) -> dict[str, str]:
    """As put_slurm, with jobs 18 and 19 behind the run's job 17."""
    for job_id, predecessor in (("18", "17"), ("19", "18")):
        run.append_event("submitted", attempt=0, job_id=job_id, route="successor", predecessor=predecessor)
    environ = put_slurm(folder, state)
    put_states(folder, f"17|{state} 18|PENDING 19|PENDING")
    return environ


def put_states(folder: Path, states: str) -> None:
    """What squeue says of several jobs, such as `17|RUNNING 18|PENDING`."""
    pairs = (state.split("|") for state in states.split())
    (folder / "state").write_text("".join(f"{job}|{job}|{word}|None|n1|10:00\n" for job, word in pairs))


def asked(folder: Path) -> list[str]:
    """The words of every scancel."""
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_running_job_gets_the_signal_that_slurm_sends_before_a_time_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "RUNNING"), requeue=False)
    assert answer == Answer("signalled", f"job 17 was asked to save and leave; {TO_GO_ON} {run.path}", 0, "17")
    assert asked(tmp_path) == ["--signal=USR2 17"]
    mark = run.read_json(run.stop_mark)
    assert sorted(mark) == ["format_version", "requeue", "time"]
    assert mark["requeue"] is False


def test_requeue_is_in_the_mark_for_the_supervisor_to_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "RUNNING"), requeue=True)
    assert answer.text == "job 17 was asked to save and leave; then the job goes back into the queue"
    assert run.read_json(run.stop_mark)["requeue"] is True


def test_job_that_leaves_before_its_ranks_start_needs_no_signal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    environ = put_slurm(tmp_path, "RUNNING", steps="17.batch\n")
    leave = f"PATH=/usr/bin:/bin; echo '17.batch'; echo '17|17|COMPLETED|None||0:00' > {tmp_path}/state; exit"
    answering = (tmp_path / "bin/squeue").read_text()
    (tmp_path / "bin/squeue").write_text(answering.replace('printf "17.batch\n"; exit', leave))
    answer = stop(run, environ, requeue=False)
    words = f"job 17 leaves by itself, by the mark stop.json; {TO_GO_ON} {run.path}"
    assert (answer, asked(tmp_path)) == (Answer("marked", words, 0, "17"), [])


def test_waiting_job_leaves_the_queue(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "PENDING", then="CANCELLED"), requeue=False)
    words = f"job 17 was taken out of the queue; {TO_GO_ON} {run.path}"
    assert (answer, asked(tmp_path)) == (Answer("dequeued", words, 0, "17"), ["--state=PENDING 17"])
    assert run.stop_mark.exists()


def test_waiting_job_that_has_just_started_is_signalled_instead(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "PENDING", then="RUNNING"), requeue=False)
    assert (answer.action, asked(tmp_path)) == ("signalled", ["--state=PENDING 17", "--signal=USR2 17"])


def test_waiting_job_that_is_to_be_requeued_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "PENDING"), requeue=True)
    assert answer == Answer("left", "job 17 waits in the queue already; it was left alone", 0, "17")
    assert (asked(tmp_path), run.stop_mark.exists()) == ([], False)


def test_successors_leave_the_queue_before_the_job_that_they_wait_for_is_signalled(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_chain(tmp_path, run, "RUNNING"), requeue=False)
    assert (answer.action, answer.job_id) == ("signalled", "17")
    assert asked(tmp_path) == ["--state=PENDING 19 18", "--signal=USR2 17"]


def test_successors_stay_when_the_run_is_to_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_chain(tmp_path, run, "RUNNING"), requeue=True)
    assert (answer.action, asked(tmp_path)) == ("signalled", ["--signal=USR2 17"])


@pytest.mark.parametrize(
    ("states", "owner"),
    [
        ("17|RUNNING 18|PENDING 19|PENDING", Owner("17", "RUNNING", reason="None", behind=("18", "19"))),
        ("17|PREEMPTED 18|RUNNING 19|PENDING", Owner("18", "RUNNING", reason="None", behind=("19",))),
        ("17|PREEMPTED 18|PENDING 19|PENDING", Owner("18", "PENDING", reason="None", behind=("19",))),
        ("18|CANCELLED 17|RUNNING", Owner("17", "RUNNING", reason="None")),
        ("17|COMPLETED 18|CANCELLED", None),
    ],
    ids=["first runs", "second runs", "between two", "one taken away", "over"],
)
def test_newest_job_that_has_started_owns_a_run(tmp_path: Path, states: str, owner: Owner | None) -> None:
    run = make_run(tmp_path)
    environ = put_chain(tmp_path, run, "RUNNING")
    put_states(tmp_path, states)
    assert maybe_owner(run, environ) == owner


def test_jobs_of_an_earlier_submission_own_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    put_chain(tmp_path, run, "RUNNING")
    run.append_event("submitted", attempt=1, job_id="25", route="slurm")
    assert [event["job_id"] for event in jobs_since_submission(run)] == ["25"]


@pytest.mark.parametrize(
    "state", ["COMPLETING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "REVOKED", "NEW_WORD"]
)
def test_job_that_takes_no_signal_keeps_the_mark_and_gets_none(tmp_path: Path, state: str) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, state), requeue=False)
    assert (answer.action, answer.exit_code, asked(tmp_path), run.stop_mark.exists()) == ("marked", 0, [], True)


@pytest.mark.parametrize("state", ["", "COMPLETED", "CANCELLED"])
def test_run_that_nobody_runs_leaves_no_mark(tmp_path: Path, state: str) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, state), requeue=False)
    assert answer == Answer("none", f"nobody runs {run.path}; nothing to stop", 1)
    assert (asked(tmp_path), run.stop_mark.exists()) == ([], False)


def test_finished_run_has_nothing_to_stop_even_while_its_job_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, {})
    answer = stop(run, put_slurm(tmp_path, "RUNNING"), requeue=False)
    assert answer == Answer("none", f"{run.path} is finished; nothing to stop", 1)
    assert (asked(tmp_path), run.stop_mark.exists()) == ([], False)


def test_slurm_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, {"PATH": str(tmp_path)}, requeue=False)
    words = "nothing was changed: Slurm was not reached: squeue is not on PATH: is this a machine of the cluster?"
    assert (answer, run.stop_mark.exists()) == (Answer("none", words, 4), False)


def test_suspended_job_is_said_to_stop_as_soon_as_it_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answer = stop(run, put_slurm(tmp_path, "SUSPENDED"), requeue=False)
    words = "job 17 is suspended, and leaves as soon as it goes on, by the mark stop.json"
    assert answer == Answer("marked", f"{words}; {TO_GO_ON} {run.path}", 0, "17")


def test_signal_that_slurm_does_not_pass_on_leaves_the_mark_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    environ = put_slurm(tmp_path, "RUNNING")
    put_answer(tmp_path / "bin", "scancel", errors="scancel: error: Unable to contact slurm controller", exit_code=1)
    answer = stop(run, environ, requeue=False)
    words = (
        "Slurm did not pass the request on: scancel --signal=USR2 17: exit code 1: scancel: error: Unable to contact "
        "slurm controller; the mark stop.json stands: a job of this run that ends or starts from now on obeys it"
    )
    assert (answer, run.stop_mark.exists()) == (Answer("marked", words, 4, "17"), True)


@pytest.mark.parametrize("route", ["local", "direct"])
def test_supervisor_of_this_machine_gets_sigterm(tmp_path: Path, route: str, start_supervisor: StartSupervisor) -> None:
    run = make_run(tmp_path, route)
    supervisor = start_supervisor(run.path)
    run.claim_attempt({"pid": supervisor.pid, "host": socket.gethostname()})
    answer = stop(run, {}, requeue=False)
    words = f"process {supervisor.pid} was asked to save and leave; {TO_GO_ON} {run.path}"
    assert answer == Answer("signalled", words, 0, "17")
    assert supervisor.wait() == -signal.SIGTERM
    assert run.stop_mark.exists()
    run.stop_mark.unlink()
    assert stop(run, {}, requeue=False).text == f"nobody runs {run.path}; nothing to stop"


def test_local_run_that_has_not_claimed_an_attempt_yet_is_found_by_its_submission(
    tmp_path: Path, start_supervisor: StartSupervisor
) -> None:
    starting = start_supervisor(RunFolder(tmp_path / "demo" / "a").submitit)
    run = make_run(tmp_path, "local", str(starting.pid))
    assert stop(run, {}, requeue=False).action == "signalled"
    assert starting.wait() == -signal.SIGTERM


def test_process_that_is_not_the_submission_any_more_gets_no_signal(tmp_path: Path) -> None:
    run = make_run(tmp_path, "local", str(os.getpid()))
    assert stop(run, {}, requeue=False).action == "none"


def test_run_of_another_machine_is_asked_for_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, "local")
    run.claim_attempt({"pid": os.getpid(), "host": "another-host"})
    words = f"nobody runs {run.path} on this machine, and its last attempt was on another-host: ask there"
    assert stop(run, {}, requeue=False) == Answer("none", f"{words}; nothing to stop", 1)


def test_machine_without_a_queue_cannot_requeue(tmp_path: Path, start_supervisor: StartSupervisor) -> None:
    run = make_run(tmp_path, "local")
    run.claim_attempt({"pid": start_supervisor(run.path).pid, "host": socket.gethostname()})
    with pytest.raises(StopError) as caught:
        stop(run, {}, requeue=True)
    assert str(caught.value) == f"--requeue: {run.path} runs on this machine, which has no queue; leave it out"
    assert not run.stop_mark.exists()


def test_json_is_one_object_and_a_bad_answer_is_told_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    for name, value in put_slurm(tmp_path, "RUNNING").items():
        monkeypatch.setenv(name, value)
    told = {"run_dir": str(run.path), "run_id": "a", "job_id": "17", "action": "signalled"}
    assert main([str(run.path), "--json"]) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == (told, "")

    put_slurm(tmp_path, "")
    assert main([str(run.path), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == told | {"job_id": None, "action": "none"}
    assert printed.err == f"nobody runs {run.path}; nothing to stop\n"


def test_run_that_does_not_exist_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["nosuch"]) == 2
    words = f"'nosuch' is no run folder, and {tmp_path}/slurm-ddp/runs*.jsonl knows no run id, job id or name like it\n"
    assert capsys.readouterr() == ("", words)
