"""Index of runs: how a name, a run id or a job id leads to a run folder."""

import logging
import os
import socket
from pathlib import Path

import pytest

from cluster.index import find_run, index_folder, index_path, read_index, rebuild, register
from cluster.runs import RunError, RunFolder, append_line, read_lines

HOST = socket.gethostname()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": "/home/me"}


def make_run(folder: Path, name: str, run_id: str) -> RunFolder:
    """A run folder with a spec in it."""
    run = RunFolder(folder / "runs" / name / run_id)
    run.make()
    run.spec.write_text("name: demo\n")
    return run


def test_index_lies_where_the_xdg_specification_says() -> None:
    assert index_path({"HOME": "/home/me"}) == Path(f"/home/me/.local/state/slurm-ddp/runs-{HOST}.jsonl")
    assert index_path({"HOME": "/home/me", "XDG_STATE_HOME": ""}) == index_path({"HOME": "/home/me"})
    assert index_path({"XDG_STATE_HOME": "/state"}) == Path(f"/state/slurm-ddp/runs-{HOST}.jsonl")


def test_run_is_found_by_folder_id_job_and_name(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, "demo", "20260102-030405-0a1b")
    register(run, "17", environ)
    for reference in (str(run.path), os.path.relpath(run.path), "20260102-030405-0a1b", "17", "demo"):
        assert RunFolder(find_run(reference, environ).path.resolve()) == run


def test_name_and_job_id_mean_the_run_submitted_last(tmp_path: Path, environ: dict[str, str]) -> None:
    runs = [make_run(tmp_path, "demo", run_id) for run_id in ("b", "a")]
    for number, run in enumerate(runs):
        line = {"run_dir": str(run.path), "run_id": run.run_id, "name": "demo", "job_id": "17"}
        append_line_at(index_path(environ), {"time": f"2026-01-02T03:04:0{number}.000Z", **line})
    assert find_run("demo", environ) == find_run("17", environ) == runs[1]
    assert find_run("b", environ) == runs[0]


def test_files_of_all_hosts_and_of_older_releases_are_one_index(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, "demo", "a")
    line = {"run_dir": str(run.path), "run_id": "a", "name": "demo"}
    for file, second in (("runs-login2.jsonl", 2), ("runs.jsonl", 1), ("runs-login1.jsonl", 3)):
        told = {"time": f"2026-01-02T03:04:0{second}.000Z", **line, "job_id": str(second)}
        append_line_at(index_folder(environ) / file, told)
    register(run, "4", environ)
    assert [line["job_id"] for line in read_index(environ)] == ["1", "2", "3", "4"]
    assert [line["job_id"] for line in read_lines(index_path(environ))] == ["4"]


def append_line_at(path: Path, line: dict[str, str]) -> None:
    """A line of an index that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, line)


def test_run_whose_folder_was_removed_is_not_found(tmp_path: Path, environ: dict[str, str]) -> None:
    run = make_run(tmp_path, "demo", "a")
    register(run, "17", environ)
    run.spec.unlink()
    with pytest.raises(RunError) as caught:
        find_run("demo", environ)
    expected = (
        f"'demo' is no run folder, and {index_folder(environ)}/runs*.jsonl knows no run id, job id or name like it"
    )
    assert str(caught.value) == expected


def test_lost_index_is_rebuilt_from_the_runs_and_only_once(tmp_path: Path, environ: dict[str, str]) -> None:
    first, second = make_run(tmp_path, "demo", "a"), make_run(tmp_path, "other", "b")
    for run, job_id in ((first, "17"), (first, "18"), (second, "19")):
        run.append_event("submitted", attempt=0, job_id=job_id)
        run.append_event("attempt_started", attempt=1, job_id=job_id)
        register(run, job_id, environ)
    expected = [{**line, "time": ""} for line in read_lines(index_path(environ))]
    index_path(environ).unlink()
    assert (rebuild(tmp_path / "runs", environ), rebuild(tmp_path / "runs", environ)) == (3, 0)
    assert [{**line, "time": ""} for line in read_lines(index_path(environ))] == expected


def test_index_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    monkeypatch.setattr(logging.getLogger("run"), "propagate", True)  # a supervisor's logger does not
    register(RunFolder(tmp_path / "demo" / "a"), "17", {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert caplog.messages == [
        f"{tmp_path}/state/slurm-ddp/runs-{HOST}.jsonl cannot be written (Not a directory): name this run by its folder"
    ]
