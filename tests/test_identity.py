"""Which job of an id is the run's: answers of `scontrol show job` from Slurm 22.05.8."""

from pathlib import Path
from typing import Any

import pytest

from cluster.identity import RunJob, ShownJob, find_shown, is_own, run_job
from cluster.runs import RunFolder

FOLDER = Path("/runs/100%j/demo/a")
MEMBERS = """\
JobId=22 ArrayJobId=22 ArrayTaskId=3 JobName=ddp
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-01-02T03:04:05 EndTime=2026-01-02T04:04:05 Deadline=N/A
   Command=/home/me/my jobs/ddp.sbatch --after 21
   StdOut=/home/me/ddp-22_3.log

JobId=23 ArrayJobId=22 ArrayTaskId=4-9%2 JobName=ddp
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=Unknown EndTime=Unknown Deadline=N/A
   Command=(null)

"""
RECORD = {"command": "/home/me/ddp.sbatch", "start": "2026-01-02T03:04:05.000Z", "restarts": 1}


def test_member_is_found_by_both_of_its_names_among_the_members_that_scontrol_shows() -> None:
    found = find_shown(MEMBERS, "22")
    assert found is not None
    assert (found.job_id, found.restarts) == ("22_3", 0)
    assert (found.command, found.log) == ("/home/me/my jobs/ddp.sbatch --after 21", "/home/me/ddp-22_3.log")
    assert find_shown(MEMBERS, "22_3") == found
    waiting = find_shown(MEMBERS, "23")
    assert waiting == ShownJob("23", "(null)", "", None, 0)
    assert find_shown(MEMBERS, "24") is None


@pytest.mark.parametrize(
    ("command", "log", "own"),
    [
        (f"{FOLDER}/submitit/submission.sh", "", True),
        ("(null)", f"{FOLDER}/logs/batch_7.log", True),
        ("(null)", "/runs/100%%j/demo/a/logs/batch_%j.log", True),
        (f"{FOLDER}2/job.sbatch", f"{FOLDER}2/logs/x", False),
        ("/home/me/ddp.sbatch", "/home/me/ddp-7.log", False),
    ],
    ids=["script", "log", "log as sbatch was given it", "another folder", "elsewhere"],
)
def test_job_is_the_runs_when_its_script_or_log_lies_in_the_run_folder(command: str, log: str, own: bool) -> None:
    assert is_own(ShownJob("7", command, log, None, 0), RunJob("7", FOLDER)) is own


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, True),
        ({"restarts": 2, "maybe_start": None}, True),
        ({"restarts": 2, "command": "/home/me/other.sbatch"}, False),
        ({"maybe_start": "2026-01-02T05:04:05.000Z"}, False),
        ({"restarts": 0, "maybe_start": None}, False),
    ],
    ids=["same start", "requeued since", "another script", "started later", "waits, and was never requeued"],
)
def test_job_with_a_script_elsewhere_is_the_runs_by_what_it_has_told_of_itself(
    changes: dict[str, Any], own: bool
) -> None:
    seen = {"command": RECORD["command"], "maybe_start": RECORD["start"], "restarts": 1, **changes}
    shown = ShownJob("7", str(seen["command"]), "/dev/null", seen["maybe_start"], seen["restarts"])
    assert is_own(shown, RunJob("7", FOLDER, RECORD)) is own


@pytest.mark.parametrize(("hour", "own"), [("03", True), ("05", False)])
def test_raw_job_of_an_older_release_began_before_it_entered_itself(tmp_path: Path, hour: str, own: bool) -> None:
    run = RunFolder(tmp_path / "demo" / "7")
    run.make()
    run.append_event("submitted", attempt=0, job_id="7", route="sbatch")
    job = run_job(run, "7")
    assert job.noted == run.read_events()[0]["time"]
    job = RunJob("7", run.path, noted="2026-01-02T04:04:05.000Z")
    assert is_own(ShownJob("7", "/home/me/x", "", f"2026-01-02T{hour}:04:05.000Z", 0), job) is own
