"""Pruning: what goes, what stays, and which runs are left alone."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from cluster import index
from cluster.disk import empty, find_removal, shown_size
from cluster.prune import HEAD, main
from cluster.resume import ResumeError, check_not_pruned
from cluster.runs import RunFolder, digest_of, write_json
from tests.conftest import StartSupervisor
from tests.executables import put_answer, put_executable

DAY_S = 86_400
OLD_S = 40 * DAY_S
ALL = ("attempts/0001", "checkpoints/best.json", "events.jsonl", "heartbeat.json", "metrics.jsonl", "spec.yaml")
STAYS = (*ALL, "logs/attempt_0001.log", "tensorboard/events", "verdict_a0001.json")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index below tmp_path, and a Slurm that knows no job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    put_answer(tmp_path / "bin", "squeue")
    return tmp_path


def make_run(
    folder: Path, run_id: str = "a", *, route: str = "slurm", job_id: str = "17", name: str = "demo", best: int = 14
) -> RunFolder:
    """A run whose only attempt has saved steps 7, 14 and 21, with something in every corner; forty days old."""
    run = RunFolder(folder / "runs" / name / run_id)
    run.make()
    run.spec.write_text(f"name: {name}\n")
    run.append_event("submitted", attempt=0, job_id=job_id, route=route)
    run.claim_attempt({"host": socket.gethostname(), "pid": 1, "job_id": job_id})
    for step in (7, 14, 21):
        save(run, step)
    write_json(run.checkpoints / "best.json", {"step": best, "test_accuracy": 0.5})
    write_json(run.heartbeat, {"step": 21})
    write_json(run.verdict(1), {"outcome": "failed", "cause": "exception"})
    for path, size in (
        (run.metrics, 100),
        (run.attempt_log(1), 3000),
        (run.submitit / "17_submitted.pkl", 500),
        (run.stacks_of(1), 200),
        (run.path / "code" / "jobs" / "loop.py", 4000),
        (run.path / "tensorboard" / "events", 50),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    index.register(run, job_id, os.environ)
    age(run)
    return run


def save(run: RunFolder, step: int) -> None:
    data = run.checkpoints / f"step_{step:08d}.pt"
    data.write_bytes(bytes([step]) * 10_000)
    size, digest = digest_of(data)
    write_json(data.with_suffix(".json"), {"step": step, "size": size, "sha256": digest})


def age(run: RunFolder, seconds: float = OLD_S) -> None:
    for path in run.path.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


def finish(run: RunFolder, steps: int = 21) -> RunFolder:
    write_json(run.summary, {"steps": steps, "status": "finished"})
    run.model_final.write_bytes(b"weights")
    age(run)
    return run


def ask(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the verb, in this process."""
    code = main([*map(str, words), "--json"])
    return code, dict(json.loads(capsys.readouterr().out))


def files_of(run: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def checkpoint_files(*steps: int) -> list[str]:
    return [f"checkpoints/step_{step:08d}{suffix}" for step in steps for suffix in (".json", ".pt")]


def test_finished_run_keeps_its_model_its_best_checkpoint_and_all_that_tells_of_it(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finish(make_run(environ))
    before = files_of(run)
    code, shown = ask(run.path, capsys=capsys)
    assert (code, shown["removed"], files_of(run)) == (0, False, before)
    (one,) = shown["runs"]
    assert (one["state"], one["steps"], one["kept_steps"]) == ("finished", [7, 21], [14])
    manifests = sum((run.checkpoints / f"step_{step:08d}.json").stat().st_size for step in (7, 21))
    assert one["bytes"] == {"checkpoints": 20_000 + manifests, "stacks": 200, "submitit": 500, "code": 4000}
    code, done = ask(run.path, "--yes", capsys=capsys)
    assert (code, done["removed"], done["bytes"]) == (0, True, shown["bytes"])
    assert files_of(run) == sorted([*STAYS, *checkpoint_files(14), "model_final.pt", "summary.json"])
    event = run.read_events()[-1]
    assert (event["event"], event["bytes"], event["steps"], event["kept_steps"]) == (
        "pruned",
        shown["bytes"],
        [7, 21],
        [14],
    )


def test_best_checkpoint_of_a_finished_run_that_is_the_final_model_goes(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finish(make_run(environ, best=21))
    assert ask(run.path, capsys=capsys)[1]["runs"][0]["steps"] == [7, 14, 21]


@pytest.mark.parametrize("mark", ["stop.json", ""])
def test_run_that_can_go_on_keeps_the_checkpoint_and_the_code_for_it(
    environ: Path, capsys: pytest.CaptureFixture[str], mark: str
) -> None:
    run = make_run(environ, best=7)
    if mark:
        write_json(run.stop_mark, {})
    _, done = ask(run.path, "--yes", capsys=capsys)
    assert done["runs"][0]["state"] == ("stopped" if mark else "failed")
    assert done["runs"][0]["kept_steps"] == [7, 21]
    kept = [*STAYS, *checkpoint_files(7, 21), "code/jobs/loop.py", *([mark] if mark else [])]
    assert files_of(run) == sorted(kept)


def test_newest_checkpoint_that_is_bad_is_not_the_one_that_is_kept_for_going_on(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ, best=21)
    (run.checkpoints / "step_00000021.pt").write_bytes(b"?" * 10_000)
    _, done = ask(run.path, "--yes", capsys=capsys)
    assert (done["runs"][0]["steps"], done["runs"][0]["kept_steps"]) == ([7], [14, 21])


def test_nothing_is_taken_of_a_run_whose_checkpoints_are_all_bad(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ)
    for step in (7, 14, 21):
        (run.checkpoints / f"step_{step:08d}.pt").write_bytes(b"?")
    assert ask(run.path, "--yes", capsys=capsys)[1]["runs"][0]["kept_steps"] == [7, 14, 21]


def test_cancelled_run_keeps_its_best_checkpoint_only(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(environ)
    write_json(run.cancel_mark, {})
    (one,) = ask(run.path, "--yes", capsys=capsys)[1]["runs"]
    assert (one["state"], one["kept_steps"], one["bytes"]["code"]) == ("cancelled", [14], 4000)


def test_all_checkpoints_and_the_logs_go_when_asked_and_the_run_cannot_go_on_then(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ)
    check_not_pruned(run)
    ask(run.path, "--checkpoints", "all", "--logs", "--yes", capsys=capsys)
    assert files_of(run) == sorted({*STAYS, "code/jobs/loop.py"} - {"logs/attempt_0001.log"})
    with pytest.raises(ResumeError) as caught:
        check_not_pruned(run)
    assert str(caught.value) == (
        f"{run.path} has no checkpoint any more, cluster.prune has removed them: submit it anew"
    )


def test_finished_run_whose_last_checkpoint_was_removed_cannot_be_made_longer(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finish(make_run(environ))
    check_not_pruned(run)
    ask(run.path, "--yes", capsys=capsys)
    with pytest.raises(ResumeError) as caught:
        check_not_pruned(run)
    assert str(caught.value) == (
        f"cluster.prune has removed the checkpoint of step 21 of {run.path}, and the newest that is left is of "
        "step 14: submit it anew"
    )


def test_what_killed_saves_left_and_bad_checkpoints_are_counted_and_go(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ)
    (run.checkpoints / "bad").mkdir()
    garbage = ("step_00000028.pt", "step_00000028.json.a0001.tmp", "trial.a0001.tmp", "bad/step_00000003.a0001.pt")
    for name in garbage:
        (run.checkpoints / name).write_bytes(b"x" * 100)
    (run.checkpoints / "notes.txt").write_text("mine")
    before = ask(run.path, capsys=capsys)[1]["runs"][0]["bytes"]["checkpoints"]
    manifest = (run.checkpoints / "step_00000007.json").stat().st_size
    assert before == 10_000 + manifest + 400
    ask(run.path, "--yes", capsys=capsys)
    assert [name for name in garbage if (run.checkpoints / name).exists()] == []
    assert (run.checkpoints / "notes.txt").exists()


def test_second_time_there_is_nothing_left_to_do(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finish(make_run(environ))
    ask(run.path, "--yes", capsys=capsys)
    events = run.read_events()
    assert ask(run.path, "--yes", capsys=capsys) == (
        0,
        ask(run.path, capsys=capsys)[1] | {"removed": True},
    )
    assert run.read_events() == events


@pytest.mark.parametrize("killed_at", range(5))
def test_removal_that_is_killed_leaves_no_manifest_without_its_data(
    environ: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    run = finish(make_run(environ, best=21))
    whole, done = Path.unlink, [0]

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if done[0] == killed_at:
            raise KeyboardInterrupt
        done[0] += 1
        whole(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        main([str(run.path), "--yes"])
    monkeypatch.undo()
    manifests = {path.stem for path in run.checkpoints.glob("step_*.json")}
    assert manifests <= {path.stem for path in run.checkpoints.glob("step_*.pt")}
    removal = find_removal(run, "finished", all_checkpoints=False, logs=False, verify=True)
    assert len(removal.steps) == len(manifests)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "SUSPENDED"])
def test_run_whose_job_slurm_has_is_left_alone(environ: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    run = finish(make_run(environ))
    put_answer(environ / "bin", "squeue", f"17|17|{state}|None|n1|10:00\n")
    before = files_of(run)
    code, shown = ask(run.path, "--yes", capsys=capsys)
    (one,) = shown["runs"]
    assert (code, one["state"], one["reason"], files_of(run)) == (1, "alive", "job 17 is in the queue, or runs", before)


def test_run_whose_waiting_successor_slurm_has_is_left_alone(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(environ)
    run.append_event("submitted", attempt=1, job_id="18", route="successor", predecessor="17")
    put_answer(environ / "bin", "squeue", "18|18|PENDING|Dependency||10:00\n")
    assert ask(run.path, "--yes", capsys=capsys)[1]["runs"][0]["reason"] == "job 18 is in the queue, or runs"


def test_job_that_starts_while_others_are_removed_is_left_alone(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ)
    put_executable(
        environ / "bin",
        "squeue",
        f"[ -e {environ}/asked ] && echo '17|17|RUNNING|None|n1|10:00'; : > {environ}/asked",
    )
    before = files_of(run)
    code, shown = ask(run.path, "--yes", capsys=capsys)
    assert (code, shown["runs"][0]["state"], files_of(run)) == (1, "alive", before)


@pytest.mark.parametrize("is_finished", [False, True])
def test_run_is_left_alone_when_slurm_does_not_answer(
    environ: Path, capsys: pytest.CaptureFixture[str], is_finished: bool
) -> None:
    run = make_run(environ)
    if is_finished:
        finish(run)
    put_answer(
        environ / "bin", "squeue", errors="slurm_load_jobs error: Unable to contact slurm controller", exit_code=1
    )
    before = files_of(run)
    code, shown = ask(run.path, "--yes", capsys=capsys)
    (one,) = shown["runs"]
    assert (code, one["state"], files_of(run)) == (4, "unknown", before)
    assert one["reason"].startswith("Slurm was not reached: squeue ")


def test_local_run_needs_no_slurm(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finish(make_run(environ, route="local"))
    (environ / "bin" / "squeue").unlink()
    assert ask(run.path, "--yes", capsys=capsys)[0] == 0
    assert files_of(run) == sorted([*STAYS, *checkpoint_files(14), "model_final.pt", "summary.json"])


def test_run_with_a_supervisor_on_this_machine_is_left_alone(
    environ: Path, capsys: pytest.CaptureFixture[str], start_supervisor: StartSupervisor
) -> None:
    run = make_run(environ, route="local")
    pid = start_supervisor(run.path).pid
    run.claim_attempt({"host": socket.gethostname(), "pid": pid, "job_id": "17"})
    code, shown = ask(run.path, "--yes", capsys=capsys)
    assert (code, shown["runs"][0]["reason"]) == (1, "its process is alive on this machine")


def test_run_with_a_fresh_heartbeat_and_no_verdict_is_left_alone(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ)
    run.verdict(1).unlink()
    os.utime(run.heartbeat)
    assert ask(run.path, "--yes", capsys=capsys)[1]["runs"][0]["reason"] == "its heartbeat is younger than 10 minutes"


def test_local_run_of_another_machine_that_left_no_end_is_left_alone(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(environ, route="local")
    run.claim_attempt({"host": "elsewhere", "pid": 1, "job_id": "17"})
    told = ask(run.path, "--yes", capsys=capsys)[1]["runs"][0]["reason"]
    assert told == "its last attempt was on elsewhere and left no end: ask there"


def test_run_that_is_being_submitted_is_left_alone(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(environ)
    run.events.unlink()
    os.utime(run.spec)
    assert ask(run.path, "--yes", capsys=capsys)[1]["runs"][0]["reason"] == "it is being submitted"


def test_name_means_all_its_runs_and_filters_choose_among_them(
    environ: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(make_run(environ, "a"))
    make_run(environ, "b")
    age(finish(make_run(environ, "c")), DAY_S)
    finish(make_run(environ, "d", name="other"))

    def chosen(*words: str) -> list[str]:
        return [one["run_id"] for one in ask(*words, capsys=capsys)[1]["runs"]]

    assert chosen("demo") == ["a", "b", "c"]
    assert chosen("demo", "--state", "finished") == ["a", "c"]
    assert chosen("--older-than", "30d") == ["a", "b", "d"]
    assert chosen("--older-than", "30d", "--state", "failed", "--state", "finished") == ["a", "b", "d"]
    assert chosen("--state", "failed") == ["b"]
    assert chosen("b", "d") == ["b", "d"]
    assert chosen() == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--yes"], "--yes: say which runs: RUN, --older-than or --state\n"),
        (["nothing"], "'nothing' is no run folder, and {index} knows no run id, job id or name like it\n"),
    ],
)
def test_what_is_not_clear_ends_with_2(
    environ: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    make_run(environ)
    assert main(words) == 2
    assert capsys.readouterr().err == expected.format(index=index.index_folder(os.environ) / index.ALL_HOSTS)


def test_run_of_another_release_is_not_touched(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finish(make_run(environ))
    write_json(run.verdict(2), {"format_version": 2})
    code, shown = ask("demo", "--yes", capsys=capsys)
    assert (code, shown["runs"][0]["state"]) == (1, "unreadable")


def test_table_fits_80_columns_and_says_what_was_left_alone(environ: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(make_run(environ, "20261130-000000-aaaa", job_id="16"))
    make_run(environ, "20261130-000001-bbbb", job_id="17")
    put_answer(environ / "bin", "squeue", "17|17|RUNNING|None|n1|10:00\n")
    assert main(["demo"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        HEAD,
        "20261130-000000-aaaa finished   19.8 KiB    200 B    500 B  3.9 KiB         -",
        "20261130-000001-bbbb alive             -        -        -        -         -",
        "20261130-000001-bbbb was left alone: job 17 is in the queue, or runs",
        "after it a finished or cancelled run cannot be extended or repeated (--rerun)",
        "would free: 24.4 KiB; with --yes it is done",
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "-"), (1, "1 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (150 << 20, "150 MiB"), (3 << 40, "3.0 TiB")],
)
def test_size_is_short(num_bytes: int, text: str) -> None:
    assert shown_size(num_bytes) == text


def test_what_a_link_leads_to_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "data.pt").write_text("data")
    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "staged")
    empty(folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "code").symlink_to(tmp_path / "staged")
    empty(tmp_path / "code")
    assert (tmp_path / "staged" / "data.pt").read_text() == "data"
