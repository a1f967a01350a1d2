"""Run folder: [runs] is what submit, supervisor, ranks and every verb know of a run.  Standard library only.

`<run_root>/<name>/<run_id>/` on storage that all nodes see.  Files are published by a rename or claimed by O_EXCL;
events.jsonl and metrics.jsonl only grow, one write per line.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.secret_names import secret_values, without_secrets

RELEASE = "0.1.0"  # of this package, as in pyproject.toml
FORMAT_VERSION = 1  # of all files of a run folder
READERS: Mapping[int, str] = {1: "0.1.0"}  # format_version -> the last release that reads it

SPEC_VERSION = re.compile(r"^format_version: (\d+)$", re.MULTILINE)  # as spec.dump_spec writes it
READ_BYTES = 1 << 22

# Keys of a line of metrics.jsonl that say how it was come by; the others are the training's, and equal for equal runs.
MEASURED = ("time", "attempt", "images_per_s", "step_ms_p50", "step_ms_p95", "slowest_rank", "memory_mib")

MANIFEST_NAME = re.compile(r"step_(\d{8,})\.json")

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # spec or environment wrong; never retried
EXIT_UNREACHED = 4  # Slurm did not answer
EXIT_STOPPED = 75  # stopped and saved, resumable; EX_TEMPFAIL of sysexits.h
EXIT_HANG = 76  # nothing moved for longer than it may; the watchdog ended the ranks
EXIT_INTERRUPTED = 130


class UsageError(ValueError):
    """Something that the user can mend: exit code 2, and no traceback."""


class RunError(UsageError):
    """A run folder that is not there or does not hold what it should."""


class FormatError(UsageError):
    """A file in a form of another release.  It is no damage, and nothing of its run may be changed."""


class SupersededError(RuntimeError):
    """A later attempt owns the run folder; this one must write nothing more."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; makes nothing by itself."""

    path: Path  # absolute

    @property
    def run_id(self) -> str:
        """UTC time and four hexadecimal digits, or the job id on the raw sbatch route."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """The frozen spec with every default written out."""
        return self.path / "spec.yaml"

    @property
    def plan(self) -> Path:
        """What was asked of Slurm and what the supervisor starts."""
        return self.path / "plan.json"

    @property
    def script(self) -> Path:
        """The batch script, word for word."""
        return self.path / "job.sbatch"

    @property
    def successor_script(self) -> Path:
        """The batch script of the jobs that go on where Slurm does not requeue."""
        return self.path / "successor.sbatch"

    @property
    def code(self) -> Path:
        """The snapshot of the project that holds the packages; not there with code: live."""
        return self.path / "code"

    @property
    def code_record(self) -> Path:
        """Commit, versions and interpreter of the submission."""
        return self.path / "code.json"

    @property
    def code_sums(self) -> Path:
        """Digests of the code at submission, as sha256sum prints them."""
        return self.path / "code.sha256"

    @property
    def code_diff(self) -> Path:
        """What the code had that its commit has not."""
        return self.path / "code.diff"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / "submitit"

    @property
    def attempts(self) -> Path:
        """One file per start of the ranks; the highest number owns the folder."""
        return self.path / "attempts"

    @property
    def events(self) -> Path:
        """Append-only history, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files that say what metrics.jsonl says, where the spec asks for them."""
        return self.path / "tensorboard"

    @property
    def heartbeat(self) -> Path:
        """Step, phase and time, rewritten every few seconds by rank 0."""
        return self.path / "heartbeat.json"

    @property
    def grace(self) -> Path:
        """When the grace period of a preempted attempt ends."""
        return self.path / "grace.json"

    @property
    def failures(self) -> Path:
        """Records that failing ranks leave."""
        return self.path / "failures"

    @property
    def checkpoints(self) -> Path:
        """step_NNNNNNNN.pt with their manifests."""
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        """What the ranks were doing when a deadline passed."""
        return self.path / "stacks"

    @property
    def logs(self) -> Path:
        """attempt_NNNN.log and batch_<job id>.log."""
        return self.path / "logs"

    @property
    def model_final(self) -> Path:
        """The last weights as a plain state dict."""
        return self.path / "model_final.pt"

    @property
    def stop_mark(self) -> Path:
        """Save, leave, and do not come back by yourself: written by cluster.stop, removed by --resume."""
        return self.path / "stop.json"

    @property
    def cancel_mark(self) -> Path:
        """Ended by its user for good."""
        return self.path / "cancelled.json"

    @property
    def summary(self) -> Path:
        """Written once, when the run has finished."""
        return self.path / "summary.json"

    def attempt_log(self, attempt: int) -> Path:
        """The log of all ranks of one attempt."""
        return self.logs / f"attempt_{attempt:04d}.log"

    def batch_log(self, job_id: str) -> Path:
        """The supervisor's own log; `%j` stands for the job id in sbatch's --output."""
        return self.logs / f"batch_{job_id}.log"

    def stacks_of(self, attempt: int, maybe_rank: int | None = None) -> Path:
        """The stacks of all ranks, or those of a rank that could not reach rank 0."""
        return self.stacks / f"a{attempt:04d}{'' if maybe_rank is None else f'_r{maybe_rank:05d}'}.txt"

    def verdict(self, attempt: int) -> Path:
        """How one attempt ended."""
        return self.path / f"verdict_a{attempt:04d}.json"

    def make(self, mode: int = 0o700) -> None:
        """Make the folder and those inside it; what exists stays as it is.

        mode: permissions of what is made, whatever the umask; those above get what the umask gives.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        inner = (self.attempts, self.failures, self.checkpoints, self.stacks, self.logs, self.submitit)
        for folder in (self.path, *inner):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o777 | mode)  # keeps setgid of shared storage

    def take_umask(self) -> None:
        """Let what this process and its children write from now on be as readable as this folder is."""
        os.umask(0o777 & ~self.path.stat().st_mode)

    def latest_attempt(self) -> int:
        """Number of the last attempt that was claimed; 0 before the first."""
        return max((int(entry.name) for entry in self.attempts.iterdir() if entry.name.isdigit()), default=0)

    def claim_attempt(self, owner: dict[str, Any]) -> int:
        """Claim the next attempt by exclusive creation and return its number, counted from 1.

        owner: who claims it (job id, host, process id), written into the file.
        """
        while True:
            look_afresh(self.attempts)
            attempt = self.latest_attempt() + 1
            with contextlib.suppress(FileExistsError), (self.attempts / f"{attempt:04d}").open("x") as file:
                head = {"format_version": FORMAT_VERSION, "release": RELEASE}
                claim = {**head, "attempt": attempt, "time": utc_now(), **owner}
                file.write(json.dumps(claim) + "\n")
                file.flush()
                os.fsync(file.fileno())
                return attempt

    def read_attempt(self, attempt: int) -> dict[str, Any]:
        """Who claimed an attempt; empty while its owner is still writing."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return dict(json.loads((self.attempts / f"{attempt:04d}").read_text()))
        return {}

    def look_afresh(self) -> None:
        """Let what is read of this folder next be what others have made of it by now; before a decision hangs on it."""
        for folder in (self.path, self.attempts, self.failures, self.checkpoints):
            look_afresh(folder)

    def check_owner(self, attempt: int, *, afresh: bool = False) -> None:
        """Raises SupersededError: a later attempt was claimed.

        afresh: costs two operations on the storage; else the news may be a minute old.
        """
        if afresh:
            look_afresh(self.attempts)
        latest = self.latest_attempt()
        if latest > attempt:
            raise SupersededError(f"attempt {latest} owns {self.path}; attempt {attempt} writes nothing more")

    def append_event(self, event: str, *, attempt: int, job_id: str, **fields: Any) -> None:  # noqa: ANN401
        """Add one line to events.jsonl; those of a submission say in which form the file goes on."""
        head = {"time": utc_now(), "event": event, "attempt": attempt, "job_id": job_id}
        form = {"format_version": FORMAT_VERSION, "release": RELEASE} if event == "submitted" else {}
        append_line(self.events, {**head, **fields, **form})

    def note_event(self, event: str, *, attempt: int, job_id: str, **fields: Any) -> None:  # noqa: ANN401
        """append_event() where what comes next must not fail with a full disk: then the log has the event."""
        try:
            self.append_event(event, attempt=attempt, job_id=job_id, **fields)
        except OSError as error:
            logging.getLogger("run").error("event %s not written (%s): %s", event, error.strerror, json.dumps(fields))

    def maybe_grace_end(self, attempt: int) -> str | None:
        """When the grace period of an attempt ends, UTC; None while the supervisor has not said that it has one."""
        said = maybe_object(self.grace)
        return str(said["end"]) if said.get("attempt") == attempt and "end" in said else None

    def read_events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        return list(read_lines(self.events))

    def read_json(self, path: Path) -> dict[str, Any]:
        """A JSON file of this folder; empty when it is not there yet.

        Raises FormatError: another release wrote it.
        """
        with contextlib.suppress(FileNotFoundError):
            content = dict(json.loads(path.read_text()))
            check_format(path, content)
            return content
        return {}

    def check_formats(self) -> None:
        """Look at every file that says its form, before anything of the run is changed.

        Left out are records of failures, of which there may be one for each rank: only their own attempt reads them.

        Raises FormatError: another release wrote one.
        """
        claims = [maybe_object(path) for path in sorted(self.attempts.glob("*"))]
        submissions = [event for event in self.read_events() if event.get("event") == "submitted"]
        releases = [str(said["release"]) for said in [*submissions, *claims] if said.get("release", RELEASE) != RELEASE]
        maybe_writer = releases[-1] if releases else None
        if self.spec.is_file() and (match := SPEC_VERSION.search(self.spec.read_text(errors="replace"))):
            check_format(self.spec, {"format_version": int(match[1])}, maybe_writer)
        for said in submissions:
            check_format(self.events, said, maybe_writer)
        for pattern in ("*.json", "attempts/*", "checkpoints/*.json"):
            for path in sorted(self.path.glob(pattern)):
                check_format(path, maybe_object(path), maybe_writer)


def check_format(path: Path, content: Mapping[str, Any], maybe_writer: str | None = None) -> None:
    """Compare a file's format_version with ours; one that says none, or something odd, is left to its reader.

    maybe_writer: the release that wrote it, where that is known.

    Raises FormatError: it is in another form; the text names the release to install.
    """
    version = content.get("format_version", FORMAT_VERSION)
    if type(version) is not int or version == FORMAT_VERSION:
        return
    others = [release for release in (content.get("release"), maybe_writer) if release not in (None, RELEASE)]
    release = READERS.get(version) or next(iter(others), None)
    to_install = f"slurm-ddp {release}" if release else "the release of slurm-ddp that wrote it"
    raise FormatError(
        f"{path}: format_version {version}, and this is slurm-ddp {RELEASE}, which reads {FORMAT_VERSION}: "
        f"install {to_install}; nothing was changed"
    )


def maybe_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is not there, is no file, or is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def look_afresh(folder: Path) -> None:
    """Have this machine ask the storage what is in a folder.

    NFS keeps listings, and that a name is not there, for 30 to 60 s; a change of one's own makes it ask again.
    Source: nfs(5), acdirmin, acdirmax, lookupcache.
    """
    with contextlib.suppress(OSError):  # a storage that is full, or not ours to write to, is read as it is
        path = folder / f".look.{socket.gethostname()}.{os.getpid()}.tmp"
        path.touch()
        path.unlink()


def manifest_steps(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint, oldest first; a checkpoint exists when its manifest does."""
    found = (MANIFEST_NAME.fullmatch(entry.name) for entry in checkpoints.iterdir())
    return sorted(int(match[1]) for match in found if match)


def digest_of(path: Path) -> tuple[int, str]:
    """Size in bytes and hexadecimal SHA-256 of a file, read from the storage and not from this machine's cache."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def new_run_id(now: datetime, suffix: str | None = None) -> str:
    """UTC time to the second and four hexadecimal digits: sorts by time, and two in one second differ."""
    return f"{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{suffix or secrets.token_hex(2)}"


def utc_now() -> str:
    """Now as ISO 8601 in UTC, to the millisecond: 2026-01-02T03:04:05.678Z."""
    return utc_text(datetime.now(timezone.utc))


def utc_text(moment: datetime) -> str:
    """A moment as ISO 8601 in UTC, to the millisecond."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(earlier: str, later: str) -> float:
    """Seconds between two texts that utc_now() made."""
    first, second = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (earlier, later))
    return (second - first).total_seconds()


def write_atomic(path: Path, content: str | bytes, *, before_rename: Callable[[], None] | None = None) -> None:
    """Publish a whole file by one rename: readers see the old content or the new, never a part.

    The file is fsynced before the rename and the folder after it, so a published file survives a power cut.

    before_rename: may raise, and then nothing is published.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: dict[str, Any], *, before_rename: Callable[[], None] | None = None) -> None:
    """Publish a JSON object by one rename; before_rename as in write_atomic."""
    text = json.dumps({"format_version": FORMAT_VERSION, **value}, indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, text, before_rename=before_rename)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add one JSON object as a line with a single write; a line that a kill cut short is closed first.

    Raises OSError: the storage failed or took only a part; nothing was added.
    """
    data = (json.dumps(value, ensure_ascii=False) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; a line that a kill cut short is left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
                yield json.loads(line)


class LineHandler(logging.Handler):
    """Writes each log line with one write, so that lines of many ranks in one file stay whole.

    `2026-01-02T03:04:05.678Z r00017 I text`
    """

    def __init__(self, label: str, descriptor: int = 2, *, environ: Mapping[str, str] | None = None) -> None:
        """label: who speaks, such as r00017.  descriptor: where to, standard error by default.

        environ: whose secrets are never written.
        """
        super().__init__()
        self._secrets = secret_values(environ or {})
        self._label = label
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a text of several lines repeats the head on each."""
        moment = utc_text(datetime.fromtimestamp(record.created, timezone.utc))
        head = f"{moment} {self._label} {record.levelname[0]} "
        message = without_secrets(record.getMessage(), self._secrets)
        text = "".join(f"{head}{line}\n" for line in message.splitlines() or [""])
        # A closed pipe or a full disk must not end the training that wanted to speak.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode(errors="backslashreplace"))


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """Text without the values of variables whose names look like those of secrets."""
    return without_secrets(text, secret_values(environ))


def make_logger(label: str, environ: Mapping[str, str], *, level: int = logging.INFO) -> logging.Logger:
    """The process's logger, one line format for supervisor and ranks.  environ: whose secrets are never written."""
    logger = logging.getLogger("run")
    logger.handlers[:] = [LineHandler(label, environ=environ)]
    logger.setLevel(level)
    logger.propagate = False
    return logger
