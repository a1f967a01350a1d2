"""The queue: squeue's lines as 22.05.8 prints them, in one question, and accounting where squeue has forgotten."""

import logging
from datetime import datetime
from pathlib import Path

import pytest

from cluster.queue import KINDS, QueueJob, ask_queue, kind_of, read_job, recorded_ends, word_of
from cluster.runs import utc_text
from cluster.slurm import ENDED_STATES, SlurmError
from tests.executables import put_answer, put_executable

# Recorded on Slurm 22.05.8: `squeue --noheader --states=all --user=0 --format=%i|%A|%T|%S|%L|%N|%x|%r|%o`.
RECORDED = """\
7|7|RUNNING|2026-11-30T09:51:01|0:56|n[1-4]||None|/runs/a/1/submitit/.submission_file_3f.sh
1|1|PENDING|2026-11-30T09:52:01|1:00|||Resources|/runs/b/2/submitit/.submission_file_77.sh
2|2|PENDING|N/A|UNLIMITED|||PartitionNodeLimit|/tmp/j.sh
5|5|PENDING|2026-11-30T10:50:59|UNLIMITED|||BeginTime|(null)
11|11|PENDING|N/A|UNLIMITED||n[2-3]|Dependency|/tmp/a | b.sh
"""


def local(text: str) -> str:
    return utc_text(datetime.fromisoformat(text))


def test_jobs_are_read_from_one_answer(tmp_path: Path) -> None:
    put_executable(
        tmp_path, "squeue", f'printf "%s " "$@" $SLURM_TIME_FORMAT > {tmp_path}/asked\ncat <<"E"\n{RECORDED}E'
    )
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_TIME_FORMAT": "relative", "SQUEUE_PARTITION": "gpu"}
    assert ask_queue(environ, user="0") == {
        "7": QueueJob(
            "7",
            "RUNNING",
            "",
            local("2026-11-30T09:51:01"),
            56,
            "n[1-4]",
            "",
            "/runs/a/1/submitit/.submission_file_3f.sh",
        ),
        "1": QueueJob(
            "1",
            "PENDING",
            "Resources",
            local("2026-11-30T09:52:01"),
            60,
            "",
            "",
            "/runs/b/2/submitit/.submission_file_77.sh",
        ),
        "2": QueueJob("2", "PENDING", "PartitionNodeLimit", None, None, "", "", "/tmp/j.sh"),
        "5": QueueJob("5", "PENDING", "BeginTime", local("2026-11-30T10:50:59"), None, "", "", "(null)"),
        "11": QueueJob("11", "PENDING", "Dependency", None, None, "", "n[2-3]", "/tmp/a | b.sh"),
    }
    asked = "--noheader --states=all --user=0 --format=%i|%A|%T|%S|%L|%N|%x|%r|%o standard "
    assert (tmp_path / "asked").read_text() == asked


def test_job_that_slurm_has_forgotten_is_in_no_answer(tmp_path: Path) -> None:
    put_answer(tmp_path, "squeue", errors="slurm_load_jobs error: Invalid job id specified\n", exit_code=1)
    assert ask_queue({"PATH": str(tmp_path)}, job_ids=["17"]) == {}


def test_silence_is_an_error_within_the_time_that_was_given(tmp_path: Path) -> None:
    put_executable(tmp_path, "squeue", "exec /bin/sleep 600")
    with pytest.raises(SlurmError, match=r"no answer within 0\.1 s$"):
        ask_queue({"PATH": str(tmp_path)}, user="0", timeout_s=0.1)


# Field report 23: states with more than their word.
@pytest.mark.parametrize(
    ("text", "word", "kind"),
    [
        ("CANCELLED by 54321", "CANCELLED", "failed"),
        ("CANCELLED+", "CANCELLED", "failed"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", "failed"),
        ("OUT_OF_ME+", "OUT_OF_ME", "unknown"),
        ("NODE_FAIL", "NODE_FAIL", "failed"),
        ("BOOT_FAIL", "BOOT_FAIL", "failed"),
        ("DEADLINE", "DEADLINE", "failed"),
        ("PREEMPTED", "PREEMPTED", "failed"),
        ("TIMEOUT", "TIMEOUT", "failed"),
        ("REQUEUED", "REQUEUED", "pending"),
        ("COMPLETED", "COMPLETED", "done"),
        ("COMPLETING", "COMPLETING", "running"),
        ("", "", "unknown"),
    ],
)
def test_word_of_a_state_and_what_it_means(text: str, word: str, kind: str) -> None:
    assert (word_of(text), kind_of(text)) == (word, kind)


def test_every_state_in_which_a_job_has_ended_is_no_live_one() -> None:
    assert {word for word, kind in KINDS.items() if kind in ("done", "failed")} - ENDED_STATES == {
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
    }
    assert {kind_of(word) for word in ENDED_STATES} == {"done", "failed"}


def test_unknown_state_is_a_warning_and_counts_as_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_answer(tmp_path, "squeue", "1|1|DREAMING|N/A|1:00|||None|x\n2|2|DREAMING|N/A|1:00|||None|x\n")
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)
    jobs = ask_queue({"PATH": str(tmp_path)}, user="0")
    assert [(job.kind, job.is_alive) for job in jobs.values()] == [("unknown", True)] * 2
    assert caplog.messages == ["'DREAMING' is a job state that this release does not know"]


# Field report 24: accounting keeps a row for each time a job ran; the newest counts.
def test_newest_record_of_a_job_counts(tmp_path: Path) -> None:
    put_answer(tmp_path, "sacct", "17|17|PREEMPTED\n17|17|COMPLETED\n22_3|24|CANCELLED by 54321\n")
    assert recorded_ends(["17", "22_3"], {"PATH": str(tmp_path)}) == {
        "17": "COMPLETED",
        "22_3": "CANCELLED",
        "24": "CANCELLED",
    }


# Field report 25: accounting that is off is no error.
@pytest.mark.parametrize("is_installed", [True, False])
def test_accounting_that_is_off_or_not_there_says_nothing(tmp_path: Path, is_installed: bool) -> None:
    if is_installed:
        put_answer(tmp_path, "sacct", errors="Slurm accounting storage is disabled\n", exit_code=1)
    assert recorded_ends(["17"], {"PATH": str(tmp_path)}) == {}


def test_accounting_is_not_asked_about_nothing(tmp_path: Path) -> None:
    put_executable(tmp_path, "sacct", f"touch {tmp_path}/asked")
    assert recorded_ends([], {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == {}
    assert not (tmp_path / "asked").exists()


def test_line_with_a_null_host_list_has_none() -> None:
    assert read_job("1|1|PENDING|N/A|1:00|(null)|(null)|None|x")[1].nodes == ""
