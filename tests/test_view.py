"""Many runs at once: one squeue, few reads, and no job of another cluster or user taken for a run's."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.index import index_path, register
from cluster.runs import RunError, append_line
from cluster.view import look_at, look_at_all
from tests.executables import put_answer, put_executable
from tests.run_folders import answer_with, asked, environment, make_run
from tests.training import REPOSITORY


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def seen(environ: dict[str, str], newest: int | None = None) -> dict[str, str]:
    """State of each run that is shown, by its number."""
    sight = look_at_all(environ, newest=newest)
    return {view.facts.run.run_id.removeprefix("run-"): view.state.word for view in sight.views}


# Field report 26: one question for all runs.
def test_squeue_is_asked_once_for_all_runs_of_the_user(tmp_path: Path, environ: dict[str, str]) -> None:
    runs = [
        make_run(tmp_path, environ, number, kind) for number, kind in enumerate(("failed", "training", "pending"), 1)
    ]
    lines = [f"{job}|{state}|N/A|1:00|||None|{runs[job - 1].path}/s" for job, state in ((2, "RUNNING"), (3, "PENDING"))]
    answer_with(tmp_path, "\n".join(lines) + "\n")
    assert seen(environ) == {"0003": "pending", "0002": "training", "0001": "failed"}
    assert len(asked(tmp_path)) == 1


def test_squeue_is_not_asked_where_no_run_had_a_job(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1, "failed", route="local")
    assert (seen(environ), asked(tmp_path)) == ({"0001": "failed"}, [])


def test_live_runs_are_shown_however_old_they_are(tmp_path: Path, environ: dict[str, str]) -> None:
    runs = [make_run(tmp_path, environ, number, kind) for number, kind in enumerate(["training", *["finished"] * 4], 1)]
    answer_with(tmp_path, f"1|RUNNING|N/A|1:00|n1||None|{runs[0].path}/s\n")
    assert seen(environ, newest=2) == {"0005": "finished", "0004": "finished", "0001": "training"}


def test_without_slurm_live_runs_are_found_in_their_folders(tmp_path: Path, environ: dict[str, str]) -> None:
    for number, kind in enumerate(["training", "failed", *["finished"] * 4], 1):
        make_run(tmp_path, environ, number, kind)
    put_answer(tmp_path / "bin", "squeue", errors="Unable to contact slurm controller\n", exit_code=1)
    sight = look_at_all(environ, newest=1)
    assert [(view.facts.run.run_id, view.state.word) for view in sight.views] == [
        ("run-0006", "finished"),
        ("run-0001", "training"),
    ]
    assert (sight.slurm_error, sight.is_short_of_slurm) == ("exit code 1: Unable to contact slurm controller", True)


def test_slurms_silence_does_not_matter_to_runs_that_have_ended(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1, "finished")
    put_answer(tmp_path / "bin", "squeue", errors="Unable to contact slurm controller\n", exit_code=1)
    assert not look_at_all(environ, newest=1).is_short_of_slurm


def test_job_id_of_another_cluster_is_not_looked_up_in_this_one(tmp_path: Path, environ: dict[str, str]) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=no\nclustername = here\n")
    environ = {**environ, "SLURM_CONF": str(conf)}
    answer_with(tmp_path, "".join(f"{job}|RUNNING|N/A|1:00|n1||None|run-000{job}\n" for job in (1, 2, 3)))
    runs = [
        make_run(tmp_path, environ, job, "pending", cluster=name) for job, name in ((1, "here"), (2, "there"), (3, ""))
    ]
    assert seen(environ) == {"0003": "starting", "0002": "pending", "0001": "starting"}
    away = look_at_all(environ, newest=None).views[1].state
    assert (away.because, away.source) == ("as of its submission; its job is of cluster there", "run folder")
    sight = look_at(runs[1], environ)
    assert (sight.views[0].state.word, sight.slurm_error) == ("pending", "its job is of cluster there: ask there")


def test_index_line_says_which_cluster_it_is_of(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1)
    index_path(environ).unlink()
    register(run, "1", environ, "slurm", "here")
    assert '"route": "slurm", "cluster": "here"' in index_path(environ).read_text()


def test_old_line_without_route_or_cluster_is_understood(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, environ, 1, "pending")
    index_path(environ).unlink()
    line = {"run_dir": str(run.path), "run_id": run.run_id, "name": "demo", "job_id": "1"}
    append_line(index_path(environ), {"time": "2026-01-02T03:04:05.000Z", **line})
    answer_with(tmp_path, f"1|RUNNING|N/A|1:00|n1||None|{run.path}/s\n")
    assert seen(environ) == {"0001": "starting"}


def test_damaged_lines_and_lost_folders_are_passed_over(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1)
    lost = make_run(tmp_path, environ, 2, "pending")
    subprocess.run(["rm", "-r", str(lost.path)], check=True)
    with index_path(environ).open("a") as index:
        index.write('{"run_dir": 5}\n[]\nnull\nnonsense\n{"run_dir": "/x"}\n')
    assert seen(environ) == {"0001": "finished"}


def test_run_of_another_release_is_told_and_hides_no_other(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1)
    strange = make_run(tmp_path, environ, 2)
    strange.summary.write_text('{"format_version": 99, "release": "9.9"}')
    sight = look_at_all(environ, newest=None)
    assert [view.facts.run.run_id for view in sight.views] == ["run-0001"]
    assert len(sight.unreadable) == 1


def test_run_with_a_damaged_file_is_told_and_hides_no_other(tmp_path: Path, environ: dict[str, str]) -> None:
    make_run(tmp_path, environ, 1)
    damaged = make_run(tmp_path, environ, 2, "failed")
    damaged.verdict(1).write_text('{"outcome": "fai')
    sight = look_at_all(environ, newest=None)
    assert [view.facts.run.run_id for view in sight.views] == ["run-0001"]
    error = "Unterminated string starting at: line 1 column 13 (char 12)"
    assert sight.unreadable == (f"{damaged.path} holds a damaged file: {error}",)
    with pytest.raises(RunError):
        look_at(damaged, environ)


# Field report 25: squeue, then accounting, then our own files.
def test_accounting_is_asked_once_and_only_for_what_nobody_else_knows(tmp_path: Path, environ: dict[str, str]) -> None:
    for number, kind in enumerate(("finished", "failed", "training", "pending", "pending"), 1):
        make_run(tmp_path, environ, number, kind)
    answer = "3|3|OUT_OF_MEMORY\\n4|4|CANCELLED by 0\\n"
    put_executable(tmp_path / "bin", "sacct", f"echo $* >> {tmp_path}/recorded; printf '{answer}'")
    assert seen(environ) == {
        "0005": "failed",
        "0004": "cancelled",
        "0003": "failed",
        "0002": "failed",
        "0001": "finished",
    }
    words = (tmp_path / "recorded").read_text().split()
    assert words == ["--noheader", "--allocations", "--parsable2", "--format=JobID,JobIDRaw,State", "--jobs=5,4,3"]


COUNT_OPENS = """
import sys
root, opened = sys.argv[1], []
def note(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(root):
        opened.append(str(args[0]))
sys.addaudithook(note)
from cluster.status import main
code = main(["--all", "--json"])
print(code, len(opened), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("kind", "opens"),
    [
        ("finished", 1),  # the summary
        ("pending", 3),  # summary, attempts, stop mark
        ("failed", 7),  # and claim, checkpoints, verdict, heartbeat
    ],
)
def test_five_hundred_runs_cost_one_squeue_and_a_handful_of_reads_each(
    tmp_path: Path, environ: dict[str, str], kind: str, opens: int
) -> None:
    for number in range(500):
        make_run(tmp_path, environ, number, kind)
    if kind == "pending":
        answer_with(tmp_path, "".join(f"{job}|PENDING|N/A|1:00|||None|run-{job:04d}\n" for job in range(500)))
    command = [sys.executable, "-c", COUNT_OPENS, str(tmp_path / "runs")]
    done = subprocess.run(command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout.count('"run_dir"')) == (f"0 {500 * opens}\n", 500)
    assert len(asked(tmp_path)) == 1
