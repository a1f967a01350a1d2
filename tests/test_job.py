"""The supervisor's job: its ids, its time, and what Slurm writes about its end."""

import dataclasses
import time
from pathlib import Path

import pytest

from cluster.identity import RunJob
from cluster.job import Job, find_job, insist
from cluster.job_end import JobRecord
from cluster.plan import LaunchPlan
from cluster.runs import RunFolder
from cluster.slurm import JobState, SlurmError
from tests.executables import put_answer, put_executable, shown_job
from tests.test_job_end import shown
from tests.test_launch import make_plan


@pytest.fixture
def plan() -> LaunchPlan:
    return dataclasses.replace(make_plan("true"), cluster="slurm")


def test_member_of_an_array_is_known_by_its_own_name(tmp_path: Path, plan: LaunchPlan) -> None:
    member = "JobId=23 ArrayJobId=22 ArrayTaskId=1 JobName=demo\n   StdErr=/shared/log\n"
    put_answer(tmp_path, "scontrol", member)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "23", "SLURM_ARRAY_JOB_ID": "22", "SLURM_ARRAY_TASK_ID": "1"}
    job = find_job(plan, environ)
    assert (job.job_id, job.maybe_error_path) == ("22_1", Path("/shared/log"))


def test_job_that_was_submitted_inside_an_array_member_is_no_member_of_it(tmp_path: Path, plan: LaunchPlan) -> None:
    put_answer(tmp_path, "scontrol", "JobId=24 JobName=demo\n   StdErr=/shared/log\n")
    inherited = {"SLURM_ARRAY_JOB_ID": "22", "SLURM_ARRAY_TASK_ID": "1"}
    assert find_job(plan, {"PATH": str(tmp_path), "SLURM_JOB_ID": "24", **inherited}).job_id == "24"


def test_only_new_lines_of_the_jobs_error_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("of the run before\n")
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={}, maybe_error_path=path)
    assert job.new_error_lines() == ("of the run before",)
    assert job.new_error_lines() == ()
    with path.open("a") as file:
        file.write("new\n")
    assert job.new_error_lines() == ("new",)


def test_what_the_run_before_a_requeue_left_in_the_error_file_is_skipped(tmp_path: Path, plan: LaunchPlan) -> None:
    path = tmp_path / "log"
    path.write_text("slurmstepd: error: *** JOB 23 ON n1 CANCELLED AT 2026-11-30T04:43:05 DUE TO PREEMPTION ***\n")
    put_answer(tmp_path, "scontrol", f"JobId=23\n   StdErr={path}\n   StdIn=/dev/null\n")
    job = find_job(plan, {"PATH": str(tmp_path), "SLURM_JOB_ID": "23"})
    with path.open("ab") as file:
        file.write(b"gr\xf6\xdfer\n")
    assert job.new_error_lines() == ("gr\ufffd\ufffder",)


def test_log_that_scontrol_shows_with_one_percent_too_few_is_looked_for_where_it_is(
    tmp_path: Path, plan: LaunchPlan
) -> None:
    run = RunFolder(tmp_path / "100%j" / "demo" / "1")
    run.make()
    run.batch_log("23").write_text("")
    put_answer(tmp_path, "scontrol", f"JobId=23\n   StdErr={tmp_path}/100%23/demo/1/logs/batch_23.log\n")
    job = find_job(dataclasses.replace(plan, run_dir=str(run.path)), {"PATH": str(tmp_path), "SLURM_JOB_ID": "23"})
    assert job.maybe_error_path == run.batch_log("23")


def test_job_whose_id_another_has_is_one_that_slurm_no_longer_knows(tmp_path: Path) -> None:
    put_answer(tmp_path, "squeue", "5|5|RUNNING|None|n1|0:30\n")
    put_answer(tmp_path, "scontrol", "JobId=5\n   Command=/home/you/job.sh\n")
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"PATH": str(tmp_path)})
    assert (job.ask(), job.maybe_time_left_s()) == (None, None)


def test_job_that_slurm_says_nothing_about_is_supervised_without_its_words(tmp_path: Path, plan: LaunchPlan) -> None:
    put_answer(tmp_path, "scontrol", errors="slurm_load_jobs error: Socket timed out\n", exit_code=1)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "23"}
    job = find_job(plan, environ)
    assert job == Job(RunJob("23", Path(plan.run_dir)), is_on_slurm=True, environ=environ)
    assert job.new_error_lines() == ()


def test_local_run_is_known_by_the_number_that_submitit_gave_it(plan: LaunchPlan) -> None:
    environ = {"SUBMITIT_LOCAL_JOB_ID": "17", "SLURM_JOB_ID": "5"}  # submitted from inside a job
    job = find_job(dataclasses.replace(plan, cluster="local"), environ)
    assert job == Job(RunJob("17", Path(plan.run_dir)), is_on_slurm=False, environ=environ)


def test_slurm_is_asked_again_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.job.ASK_AGAIN_S", 0.0)
    first = f"[ -e {tmp_path}/asked ] || {{ : > {tmp_path}/asked; exit 1; }}"
    put_executable(tmp_path, "scontrol", shown_job(Path("/runs/demo/a")))
    put_executable(tmp_path, "squeue", f"{first}\necho '5|5|RUNNING|None|n1|0:30'")
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"PATH": str(tmp_path)})
    assert job.ask() == JobState("RUNNING", "None", "n1", 30)


def test_slurm_that_is_not_there_is_asked_once(tmp_path: Path) -> None:
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"PATH": str(tmp_path)})
    with pytest.raises(SlurmError, match=r"^squeue is not on PATH: is this a machine of the cluster\?$"):
        job.ask()


def test_patience_with_slurm_ends_unless_its_answer_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.job.ASK_AGAIN_S", 0.0)
    is_asked_again = f"echo >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) -lt 4 ]"
    count = f"{is_asked_again} || {{ echo '5|5|RUNNING|None|n1|0:30'; exit; }}"
    put_executable(tmp_path, "scontrol", shown_job(Path("/runs/demo/a")))
    put_executable(tmp_path, "squeue", f"{count}\necho 'Slurm backup controller in standby mode' >&2; exit 1")
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    with pytest.raises(SlurmError, match=r"standby mode$"):
        job.ask(patience_s=0)
    assert job.ask(patience_s=0, is_urgent=lambda: True) == JobState("RUNNING", "None", "n1", 30)


def test_job_that_is_suspended_is_asked_about_until_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.job.ASK_AGAIN_S", 0.0)
    put_executable(tmp_path, "scontrol", shown_job(Path("/runs/demo/a")))
    first = f"[ -e {tmp_path}/asked ] || {{ : > {tmp_path}/asked; echo '5|5|SUSPENDED|None|n1|0:30'; exit; }}"
    put_executable(tmp_path, "squeue", f"{first}\necho '5|5|RUNNING|None|n1|0:30'")
    job = Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"PATH": str(tmp_path)})
    assert job.ask() == JobState("RUNNING", "None", "n1", 30)


def test_record_of_the_job_is_what_scontrol_shows_of_it_and_its_restarts_are_those_since_it_began(
    tmp_path: Path,
) -> None:
    job = Job(
        RunJob("22_1", Path("/runs/demo/a")),
        is_on_slurm=True,
        environ={"PATH": str(tmp_path), "SLURM_RESTART_COUNT": "1"},
    )
    assert job.maybe_record() is None  # no scontrol, no answer
    put_executable(tmp_path, "scontrol", f"[ \"$*\" = 'show job 22_1' ] && echo '{shown(restarts=1)}'")
    assert job.maybe_record() == JobRecord("RUNNING", "None", is_preempted=False, is_requeued=False, time_left_s=590)
    put_answer(tmp_path, "scontrol", shown(restarts=2))
    assert job.maybe_record() == JobRecord("RUNNING", "None", is_preempted=False, is_requeued=True, time_left_s=590)
    assert (
        Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=False, environ={"PATH": str(tmp_path)}).maybe_record()
        is None
    )


def test_end_of_the_allocation_is_taken_from_the_environment_where_slurm_says_it() -> None:
    job = Job(
        RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={"SLURM_JOB_END_TIME": str(int(time.time()) + 500)}
    )
    left = job.maybe_time_left_s()
    assert left is not None
    assert 400 < left <= 500
    assert (
        Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=True, environ={}).maybe_time_left_s() is None
    )  # before 23.02
    assert Job(RunJob("5", Path("/runs/demo/a")), is_on_slurm=False, environ=job.environ).maybe_time_left_s() is None


def test_slurm_is_asked_again_while_it_does_not_answer_and_a_refusal_is_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.job.ASK_AGAIN_S", 0.0)
    answers = iter([SlurmError("Unable to contact slurm controller (connect failure)"), SlurmError("access denied")])

    def ask() -> None:
        raise next(answers)

    with pytest.raises(SlurmError, match="access denied"):
        insist(ask)
    assert list(answers) == []
