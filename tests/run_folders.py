"""Run folders as they lie about after many submissions, their index, and a squeue that answers as told."""

import json
import re
from pathlib import Path

from cluster.index import index_path
from cluster.runs import RunFolder, append_line
from tests.executables import put_answer, put_executable

SUMMARY = {"attempts": 1, "steps": 9, "epochs": 1, "images_per_s": 1.0, "train_loss": 1.0, "test_accuracy": 0.5}


def answer_with(folder: Path, lines: str) -> None:
    """lines: of squeue, without the number of the job, which comes after its id."""
    numbered = re.sub(r"(?m)^([^|\n]+\|)", r"\1\1", lines)
    put_executable(folder / "bin", "squeue", f'echo "$@" >> {folder}/asked\ncat <<"E"\n{numbered}E')


def asked(folder: Path) -> list[str]:
    """The arguments of each squeue."""
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def make_run(
    folder: Path, environ: dict[str, str], number: int, kind: str = "finished", route: str = "slurm", **also: str
) -> RunFolder:
    """A run of job `number`, submitted in that order."""
    run = RunFolder(folder / "runs" / "demo" / f"run-{number:04d}")
    run.make()
    run.spec.write_text("name: demo\n")
    run.append_event("submitted", attempt=0, job_id=str(number), route=route)
    line = {"run_dir": str(run.path), "run_id": run.run_id, "name": "demo", "job_id": str(number), "route": route}
    index_path(environ).parent.mkdir(parents=True, exist_ok=True)
    append_line(index_path(environ), {"time": f"2026-01-02T03:04:05.{number:03d}Z", **line, **also})
    if kind == "finished":
        run.summary.write_text(json.dumps(SUMMARY | {"goodput": 0.5}))
    elif kind != "pending":
        (run.attempts / "0001").write_text(json.dumps({"job_id": str(number), "host": "n1", "pid": 1}))  # not synced
        run.heartbeat.write_text(json.dumps({"attempt": 1, "phase": "training", "step": 3, "total_steps": 9}))
    if kind == "failed":
        run.verdict(1).write_text(json.dumps({"outcome": "failed", "cause": "exception", "reason": "boom"}))
    return run


def environment(folder: Path) -> dict[str, str]:
    """An index of its own, a squeue that knows no job and counts how often it is asked; no accounting."""
    answer_with(folder, "")
    put_answer(folder / "bin", "scontrol", errors="slurm_load_jobs error: Invalid job id specified\n", exit_code=1)
    put_answer(folder / "bin", "sacct", errors="Slurm accounting storage is disabled\n", exit_code=1)
    return {"XDG_STATE_HOME": str(folder / "state"), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_CONF": "/no"}
