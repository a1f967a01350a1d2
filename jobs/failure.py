"""Failure: an exception in a rank -> [failure] -> its traceback, its record, and an exit at once.

No clean-up: destroying a process group, or waiting for another rank, can hang for ever after an error, and then nobody
ends the job.
"""

import contextlib
import errno
import json
import logging
import os
import re
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cluster.runs import (
    EXIT_FAILED,
    EXIT_USAGE,
    FORMAT_VERSION,
    RunFolder,
    SupersededError,
    UsageError,
    redacted,
    utc_now,
)

if TYPE_CHECKING:
    from jobs.loop import Loop
    from jobs.stacks import Accused

log = logging.getLogger("run")

ENDING_S = 60.0  # the watch needs less

# Errors that the death of another rank causes in this one; gloo's and NCCL's texts, torch 2.6 to 2.14.
CONNECTION = re.compile(
    r"gloo.*(Connection (closed|reset|refused)|Broken pipe|Timed out)|Connection (closed|reset) by peer|"
    r"NCCL (error|communicator)|remote process has terminated|Broken pipe|failed to recv|recvValue|DistNetworkError",
    re.IGNORECASE | re.DOTALL,
)


STORAGE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE))


def kind_of(error: BaseException) -> str:
    """What the supervisor's policy goes by; an exception may name its own by `failure_kind`.

    Imports nothing: what failed may be the import of torch.
    """
    if hasattr(error, "failure_kind"):
        return str(error.failure_kind)
    if isinstance(error, UsageError):
        return "usage"
    if isinstance(error, ConnectionError):  # RendezvousError is one
        return "connection"
    if isinstance(error, RuntimeError) and CONNECTION.search(f"{type(error).__name__}: {error}"):
        return "connection"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's has this name
        return "out of memory"
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        return "disk"
    return "exception"


@dataclass
class Whereabouts:
    """What a failing rank can say of itself; filled in as it becomes known."""

    rank: int = 0
    attempt: int = 0  # 0: none is known yet
    maybe_run_dir: Path | None = None
    maybe_loop: "Loop | None" = None
    environ: Mapping[str, str] = field(default_factory=dict)  # whose secrets are never written
    is_being_ended: bool = False  # by the watch, which has found a hang: what fails meanwhile is a consequence

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.maybe_loop.state.step if self.maybe_loop is not None else 0


def leave(error: BaseException, where: Whereabouts) -> NoReturn:
    """Say what happened, record it, and end this process without waiting for anybody."""
    if where.is_being_ended:
        time.sleep(ENDING_S)
    superseded = maybe_superseded(error, where)
    if superseded is not None:  # the folder belongs to others: not even a record is written
        log.error("%s", superseded)
        os._exit(EXIT_FAILED)
    kind = kind_of(error)
    exit_code = EXIT_USAGE if kind == "usage" else EXIT_FAILED
    text = str(error) if kind == "usage" else "".join(traceback.format_exception(error))
    log.error("%s", text.rstrip("\n"))
    if where.maybe_run_dir is not None and where.attempt > 0:
        try:
            record(error, kind, exit_code, where)
        except OSError as unwritten:
            log.error("no record of this failure could be written: %s", unwritten)
    os._exit(exit_code)


def maybe_superseded(error: BaseException, where: Whereabouts) -> BaseException | None:
    """The news that a later attempt owns the run, whatever this rank failed of."""
    if isinstance(error, SupersededError):
        return error
    if where.maybe_run_dir is None or where.attempt == 0:
        return None
    try:
        RunFolder(where.maybe_run_dir).check_owner(where.attempt)
    except SupersededError as news:
        return news
    except OSError:  # no folder to look into, so none to harm
        return None
    return None


def record(
    error: BaseException, kind: str, exit_code: int, where: Whereabouts, *, maybe_accused: "Accused | None" = None
) -> None:
    """Leave failures/aNNNN_rNNNNN.json; made by exclusive creation, so a rank's first failure stays.

    maybe_accused: the rank at fault, where this one speaks of another.
    """
    assert where.maybe_run_dir is not None
    path = where.maybe_run_dir / "failures" / f"a{where.attempt:04d}_r{where.rank:05d}.json"
    content = {
        "format_version": FORMAT_VERSION,
        "time": utc_now(),
        "attempt": where.attempt,
        "rank": where.rank,
        "host": socket.gethostname(),
        "step": where.step,
        "kind": kind,
        "exit_code": exit_code,
        "exception": redacted(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", where.environ),
        "traceback": redacted("".join(traceback.format_exception(error)), where.environ),
    }
    if maybe_accused is not None:
        content |= {"rank": maybe_accused.maybe_rank, "host": maybe_accused.host, "reporter": where.rank}
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(json.dumps(content, indent=2) + "\n")
