"""Index of runs: submit, supervise -> [index] -> every verb that is given a run's name, run id or job id.

One line per submission in `$XDG_STATE_HOME/slurm-ddp/runs-<host>.jsonl` (XDG Base Directory Specification; the default
is ~/.local/state), one file per host, since lines that several hosts add to one file of an NFS get lost; all are read,
and runs.jsonl of older releases.  It only saves a search: a lost index is rebuilt from a run_root.  One home folder may
be shared by several clusters, so a line says which one its job id belongs to.
"""

import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.clusters import cluster_name
from cluster.runs import RunError, RunFolder, append_line, read_lines, utc_now

log = logging.getLogger("run")

ALL_HOSTS = "runs*.jsonl"


def index_folder(environ: Mapping[str, str]) -> Path:
    """Where the index lies; environ: HOME and, if set, XDG_STATE_HOME."""
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/')}/.local/state"
    return Path(state) / "slurm-ddp"


def index_path(environ: Mapping[str, str]) -> Path:
    """The file of the index to which this host adds its lines."""
    return index_folder(environ) / f"runs-{socket.gethostname()}.jsonl"


def register(run: RunFolder, job_id: str, environ: Mapping[str, str], route: str = "", cluster: str = "") -> None:
    """Enter one submission; an index that cannot be written is no reason to lose a job.

    route, cluster: as in the event `submitted`.
    """
    path = index_path(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, entry(run, job_id, utc_now(), route, cluster))
    except OSError as error:
        log.warning("%s cannot be written (%s): name this run by its folder", path, error.strerror)


def entry(run: RunFolder, job_id: str, time: str, route: str, cluster: str = "") -> dict[str, Any]:
    """One line of the index; older ones have neither route nor cluster."""
    return {
        "time": time,
        "run_dir": str(run.path),
        "run_id": run.run_id,
        "name": run.path.parent.name,
        "job_id": job_id,
        "route": route,
        "cluster": cluster,
    }


def read_index(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The lines of the index, oldest first, without those that are no submission of ours."""
    keys = ("time", "run_dir", "run_id", "name", "job_id")
    files = sorted(index_folder(environ).glob(ALL_HOSTS))
    lines = [line for path in files for line in read_lines(path) if isinstance(line, dict)]
    found = [line for line in lines if all(isinstance(line.get(key), str) for key in keys)]
    return sorted(found, key=lambda line: str(line["time"]))


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
    if is_run(path):
        return RunFolder(path.absolute())
    entries = read_index(environ)
    for keys in (("run_id", "job_id"), ("name",)):  # by raw sbatch the one is the other
        meant = [line for line in entries if reference in [line[key] for key in keys]]
        found = [line for line in meant if is_run(Path(line["run_dir"]))]
        if "job_id" in keys and found:  # another cluster counts its jobs anew
            here = cluster_name(environ)
            found = [line for line in found if is_of(here, line)] or found
        if found:
            return RunFolder(Path(max(found, key=lambda line: str(line["time"]))["run_dir"]))
    index = index_folder(environ) / ALL_HOSTS
    raise RunError(f"{reference!r} is no run folder, and {index} knows no run id, job id or name like it")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / "spec.yaml").is_file()


def is_of(cluster: str, line: Mapping[str, Any]) -> bool:
    """Whether a line's job id may belong to a cluster; a line or a machine that names none contradicts nothing.

    cluster: as cluster_name() gives it.
    """
    return cluster in ("", str(line.get("cluster") or cluster).lower())


def rebuild(run_root: Path, environ: Mapping[str, str]) -> int:
    """Enter every submission found below a run_root that the index does not hold; returns how many."""
    known = {(line["run_dir"], line["job_id"]) for line in read_index(environ)}
    missing = [line for line in submissions(run_root) if (line["run_dir"], line["job_id"]) not in known]
    path = index_path(environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    for line in missing:
        append_line(path, line)
    return len(missing)


def submissions(run_root: Path) -> Iterator[dict[str, Any]]:
    """The index lines that the events of all runs below a run_root give."""
    for run in runs_below(run_root):
        for event in run.read_events():
            if event["event"] == "submitted":
                yield entry(run, event["job_id"], event["time"], event.get("route", ""), event.get("cluster", ""))


def runs_below(folder: Path) -> list[RunFolder]:
    """All runs of a run_root, or of one name below it."""
    found = {spec.parent for depth in ("*", "*/*") for spec in folder.absolute().glob(f"{depth}/spec.yaml")}
    return [RunFolder(path) for path in sorted(found)]
