"""Provenance: [provenance] is what code and environment a run was submitted with, and whether a start still has them.

Written to code.json by every route, with code.diff and code.sha256 beside it; compared by the supervisor at each start.
Nothing is imported to learn its version.  Standard library only.
"""

import json
import logging
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cluster import code
from cluster.code import CodeError, Project
from cluster.runs import EXIT_FINISHED, EXIT_USAGE, RunFolder, UsageError, utc_now, write_atomic, write_json
from cluster.worktree import WorkTreeError, maybe_commit, maybe_diff

log = logging.getLogger("run")

DISTRIBUTIONS = ("torch", "torchvision", "numpy", "submitit", "pydantic", "pydantic-core", "pyyaml", "rich")
VERSION = re.compile(r"^Version: *(\S+)$", re.MULTILINE)  # core metadata specification
PROBE_S = 60.0  # for an interpreter on a slow file system
NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and what is installed for it."""

    executable: str
    version: str | None  # such as 3.11.7; None where it could not be asked
    packages: Mapping[str, str]  # installed ones alone
    host: str


def own_environment() -> Environment:
    """This process's."""
    found = {name: maybe_version(name) for name in DISTRIBUTIONS}
    packages = {name: version for name, version in found.items() if version}
    return Environment(sys.executable, sys.version.split()[0], packages, socket.gethostname())


def maybe_version(distribution: str) -> str | None:
    """Version of an installed package; None where it is not.

    metadata.version() parses all of a package's description as a mail: 1 ms each, and 4 ms for the parser.
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    match = VERSION.search(installed.read_text("METADATA") or "")
    return match[1] if match else installed.version


def environment_of(python: str, environ: Mapping[str, str], *, needs_torch: bool) -> Environment:
    """Another interpreter's; one that is not on this machine may be on the nodes, and is not asked.

    Raises UsageError: it is too old, lacks a package, or does not run.
    """
    if not Path(python).exists():
        return Environment(python, None, {}, socket.gethostname())
    starter = [python, str(code.packages_folder() / code.STARTER)]
    ask(
        python, [*starter, "--check", "/", "submitit", "pydantic", "yaml", *(["torch"] if needs_torch else [])], environ
    )
    answer = ask(python, [*starter, "cluster.provenance"], environ)
    return Environment(**{**json.loads(answer), "executable": python})


def ask(python: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What another interpreter prints.

    Raises UsageError: it does not run, or has something to complain about.
    """
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"python: {python} does not run: {error}; nothing was submitted") from None
    if done.returncode == EXIT_USAGE:
        raise UsageError(f"{done.stderr.strip()}; nothing was submitted")
    if done.returncode:
        said = next(iter(reversed(done.stderr.splitlines())), "")
        raise UsageError(f"python: {python} does not run: {said}; nothing was submitted")
    return done.stdout


def record(
    run: RunFolder,
    project: Project,
    environment: Environment,
    environ: Mapping[str, str],
    *,
    is_snapshot: bool,
) -> tuple[str, ...]:
    """Keep the code, or what it is, in a run folder; returns the files that differ from what the run was trained with.

    Raises CodeError: a file cannot be read, or git did not answer.  Raises OSError: the storage refused.
    """
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(git_state, run, project, environ)
        sums = copy_code(project, run) if is_snapshot else code.live_sums(project.root)
    changed = note_other_code(run, sums)
    write_sums(run, sums)
    told = {
        "time": utc_now(),
        "mode": "snapshot" if is_snapshot else "live",
        "folder": str(run.code if is_snapshot else project.root),
        "source": str(project.root),
        **asked.result(),
        "files": len(sums),
        "bytes": project.num_bytes if is_snapshot else None,
        "left_out": dict(project.left_out) if is_snapshot else {},
        "rerun_of": None,
    }
    write_record(run, told, environment)
    return changed


def note_other_code(run: RunFolder, sums: Mapping[str, str]) -> tuple[str, ...]:
    """Compare the code that a run goes on with to what it has been trained with, and keep the record of that.

    sums: of the code from now on.  Returns the files of the packages that differ; none in a run without an attempt.
    """
    attempt = run.latest_attempt()
    changed = code.changed_files(of_packages(read_sums(run)), of_packages(sums)) if run.code_sums.exists() else ()
    if attempt == 0 or not changed:
        return ()
    for path in (run.code_record, run.code_sums):
        write_atomic(path.with_name(f"{path.stem}.a{attempt:04d}{path.suffix}"), path.read_bytes())
    run.append_event("code_drift", attempt=attempt + 1, job_id="", files=list(changed))
    return changed


def of_packages(sums: Mapping[str, str]) -> dict[str, str]:
    """The part of digests that a job's program consists of."""
    return {path: digest for path, digest in sums.items() if path.partition("/")[0] in code.PACKAGES}


def copy_code(project: Project, run: RunFolder) -> dict[str, str]:
    """Make the snapshot, in place of an older one; a copy that was cut short is none."""
    unfinished = run.path / ".code.tmp"
    for folder in (unfinished, run.code):
        shutil.rmtree(folder, ignore_errors=True)
    sums = code.copy_project(project, unfinished)
    unfinished.rename(run.code)
    return sums


def has_snapshot(run: RunFolder) -> bool:
    """Whether a run has a whole snapshot, and runs it; cluster.prune leaves an empty folder."""
    return (run.code / code.STARTER).is_file() and run.read_json(run.code_record).get("mode") == "snapshot"


def write_record(run: RunFolder, told: Mapping[str, Any], environment: Environment) -> None:
    """Publish code.json."""
    python = {"executable": environment.executable, "version": environment.version}
    write_json(run.code_record, {**told, "python": python, "packages": environment.packages, "host": environment.host})


def write_sums(run: RunFolder, sums: Mapping[str, str]) -> None:
    """Write code.sha256."""
    run.code_sums.write_bytes(code.sums_text(sums).encode(errors="surrogateescape"))


def git_state(run: RunFolder, project: Project, environ: Mapping[str, str]) -> dict[str, Any]:
    """Commit, whether the code differs from it, and how; writes code.diff where it does.

    Raises CodeError: git did not answer in time.
    """
    if not project.is_work_tree:
        return {"commit": None, "dirty": None, "diff": None}
    secrets = [path for path, why in project.left_out.items() if why == code.IS_SECRET]
    try:
        commit = maybe_commit(project.root, environ)
        diff = maybe_diff(project.root, environ, secrets)
    except WorkTreeError as error:
        raise CodeError(f"code: {error}") from None
    if diff is None or diff.num_bytes == 0:
        run.code_diff.unlink(missing_ok=True)  # an earlier submission's
        return {"commit": commit, "dirty": project.has_untracked or commit is None, "diff": None}
    run.code_diff.write_bytes(diff.kept)
    about = {"file": run.code_diff.name, "bytes": diff.num_bytes, "kept": len(diff.kept), "sha256": diff.sha256}
    return {"commit": commit, "dirty": True, "diff": about}


def copy_record(old: RunFolder, run: RunFolder, environment: Environment) -> None:
    """Give a run the snapshot and the record of another one.

    Raises CodeError: the other run has no snapshot, or it was changed.
    """
    check_snapshot(old)
    sizes = {path: size for path in code.file_sums(old.code) if (size := code.maybe_size(old.code / path)) is not None}
    write_sums(run, copy_code(Project(old.code, False, False, sizes, {}), run))
    if old.code_diff.exists():
        run.code_diff.write_bytes(old.code_diff.read_bytes())
    told = {key: value for key, value in old.read_json(old.code_record).items() if key != "format_version"}
    write_record(run, {**told, "time": utc_now(), "folder": str(run.code), "rerun_of": str(old.path)}, environment)


def renew_record(run: RunFolder, environment: Environment) -> None:
    """Note the environment of a run that goes on with the snapshot it has."""
    told = {key: value for key, value in run.read_json(run.code_record).items() if key != "format_version"}
    write_record(run, {**told, "time": utc_now()}, environment)


def check_snapshot(run: RunFolder) -> None:
    """Raises CodeError: a run has no snapshot of its code, or it is not what was submitted."""
    if not has_snapshot(run):
        raise CodeError(
            f"{run.path} has no snapshot of its code (code: live, not by cluster.submit, or pruned): what ran is not "
            f"kept; to run its spec with today's code: python -m cluster.submit {run.spec}"
        )
    changed = code.changed_files(read_sums(run), code.file_sums(run.code))
    if changed:
        raise CodeError(f"{run.code} is not what was submitted any more: {named(changed)}")


def read_sums(run: RunFolder) -> dict[str, str]:
    """The digests of the code at submission; empty where there are none."""
    if not run.code_sums.exists():
        return {}
    return code.read_sums(run.code_sums.read_bytes().decode(errors="surrogateescape"))


def named(paths: tuple[str, ...]) -> str:
    """Some files by name."""
    more = f" and {len(paths) - NUM_NAMED} more" if len(paths) > NUM_NAMED else ""
    return ", ".join(paths[:NUM_NAMED]) + more


def changed_environment(before: Mapping[str, Any], now: Environment) -> dict[str, list[str | None]]:
    """Item -> value at submission and now, for those that differ; Python itself first.  Pure.

    before: code.json's content.  An interpreter that could not be asked at submission is compared with nothing.
    """
    then = before.get("python", {}).get("version")
    if then is None:
        return {}
    packages = before.get("packages", {})
    pairs = [("python", then, now.version)]
    pairs += [(name, packages.get(name), now.packages.get(name)) for name in DISTRIBUTIONS]
    return {name: [old, new] for name, old, new in pairs if old != new}


def changed_code(run: RunFolder, before: Mapping[str, Any], maybe_running: Path | None) -> tuple[str, ...]:
    """Files that differ from those at submission, in the snapshot or, with code: live, where the packages lie.

    before: code.json's content.  maybe_running: the folder of the packages that run, where they may be others.
    """
    if maybe_running is not None:
        return code.changed_files(of_packages(read_sums(run)), code.live_sums(maybe_running))
    folder = Path(before["folder"])
    now = code.file_sums(folder) if before["mode"] == "snapshot" else code.live_sums(folder)
    return code.changed_files(read_sums(run), now)


def tell_drift(run: RunFolder, attempt: int, job_id: str, *, maybe_running: Path | None = None) -> None:
    """Compare this start with the submission; what differs is one event and one warning, and is not repeated.

    maybe_running: as of changed_code.
    """
    before = run.read_json(run.code_record)
    if not before:
        return
    files = changed_code(run, before, maybe_running)
    if files and is_news(run, "code_drift", {"files": list(files)}):
        run.append_event("code_drift", attempt=attempt, job_id=job_id, files=list(files))
        folder = maybe_running or before["folder"]
        log.warning("the code in %s differs from what was submitted: %s", folder, named(files))
    changed = changed_environment(before, own_environment())
    if changed and is_news(run, "environment_drift", {"changed": changed}):
        run.append_event("environment_drift", attempt=attempt, job_id=job_id, changed=changed)
        listed = "; ".join(f"{name}: {old} -> {new}" for name, (old, new) in changed.items())
        log.warning("the environment differs from the submission's: %s", listed)


def maybe_version_at_submission(run: RunFolder) -> str | None:
    """The Python that the run was submitted with, where that is known."""
    version: str | None = run.read_json(run.code_record).get("python", {}).get("version")
    return version


def prepare_code(run: RunFolder) -> None:
    """Compile a snapshot's packages, so that not every rank does it and writes the result; 0.13 s the first time."""
    import compileall  # of the supervisor alone

    for package in code.PACKAGES:
        if (run.code / package).is_dir():
            compileall.compile_dir(run.code / package, quiet=2)


def is_news(run: RunFolder, event: str, fields: Mapping[str, Any]) -> bool:
    """Whether the last event of this kind said something else."""
    told = [line for line in run.read_events() if line["event"] == event]
    return not told or any(told[-1].get(key) != value for key, value in fields.items())


def main() -> int:
    """Print this interpreter's environment as JSON."""
    print(json.dumps(asdict(own_environment())))
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
