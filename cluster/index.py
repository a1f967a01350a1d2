"""Index of runs: submit, supervise -> [index] -> every verb that is given a run's name, run id or job id.

One line per submission in `$XDG_STATE_HOME/slurm-ddp/runs.jsonl` (XDG Base Directory Specification; the default is
~/.local/state).  It only saves a search: a lost index is rebuilt from a run_root.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.runs import RunError, RunFolder, append_line, read_lines, utc_now

log = logging.getLogger("run")


def index_path(environ: Mapping[str, str]) -> Path:
    """Where the index lies; environ: HOME and, if set, XDG_STATE_HOME."""
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/')}/.local/state"
    return Path(state) / "slurm-ddp" / "runs.jsonl"


def register(run: RunFolder, job_id: str, environ: Mapping[str, str]) -> None:
    """Enter one submission; an index that cannot be written is no reason to lose a job."""
    path = index_path(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, entry(run, job_id, utc_now()))
    except OSError as error:
        log.warning("%s cannot be written (%s): name this run by its folder", path, error.strerror)


def entry(run: RunFolder, job_id: str, time: str) -> dict[str, Any]:
    """One line of the index."""
    return {
        "time": time,
        "run_dir": str(run.path),
        "run_id": run.run_id,
        "name": run.path.parent.name,
        "job_id": job_id,
    }


def find_run(reference: str, environ: Mapping[str, str]) -> RunFolder:
    """The run that a run folder, run id, job id or run name (its newest run) means.

    Raises RunError: there is none.  Raises FormatError: another release wrote it in a form that this one cannot read.
    """
    run = look_up(reference, environ)
    run.check_formats()
    return run


def look_up(reference: str, environ: Mapping[str, str]) -> RunFolder:
    """The run that is meant, whoever wrote it.

    Raises RunError: there is none.
    """
    path = Path(reference)
    if (path / "spec.yaml").is_file():
        return RunFolder(path.absolute())
    entries = [line for line in read_lines(index_path(environ)) if (Path(line["run_dir"]) / "spec.yaml").is_file()]
    for key in ("run_id", "job_id", "name"):
        found = [line for line in entries if line[key] == reference]
        if found:
            return RunFolder(Path(max(found, key=lambda line: str(line["time"]))["run_dir"]))
    raise RunError(f"{reference!r} is no run folder, and {index_path(environ)} knows no run id, job id or name like it")


def rebuild(run_root: Path, environ: Mapping[str, str]) -> int:
    """Enter every submission found below a run_root that the index does not hold; returns how many."""
    known = {(line["run_dir"], line["job_id"]) for line in read_lines(index_path(environ))}
    missing = [line for line in submissions(run_root) if (line["run_dir"], line["job_id"]) not in known]
    path = index_path(environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    for line in missing:
        append_line(path, line)
    return len(missing)


def submissions(run_root: Path) -> Iterator[dict[str, Any]]:
    """The index lines that the events of all runs below a run_root give."""
    for spec in sorted(run_root.absolute().glob("*/*/spec.yaml")):
        run = RunFolder(spec.parent)
        for event in run.read_events():
            if event["event"] == "submitted":
                yield entry(run, event["job_id"], event["time"])
