"""A run under its supervisor on this machine, for benchmarks: made as cluster.submit makes it, started, watched."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.start_up import REPOSITORY
from cluster.keep import record_live
from cluster.plan import LaunchPlan, make_plan, write_plan
from cluster.runs import RunFolder, read_lines, write_atomic
from cluster.spec import JobSpec, dump_spec

POLL_S = 0.02
PATIENCE_S = 300.0

Event = dict[str, Any]


def make_run(spec: JobSpec, name: str, environ: Mapping[str, str]) -> tuple[RunFolder, LaunchPlan]:
    """A run folder with all that a supervisor looks for."""
    run = RunFolder(spec.run_root / spec.name / name)
    run.make()
    write_atomic(run.spec, dump_spec(spec))
    record_live(spec, run, environ)
    plan = make_plan(spec, run, python=sys.executable, maybe_code_root=REPOSITORY)
    write_plan(plan, run)
    run.append_event("submitted", attempt=0, job_id="", route="local")
    return run, plan


def start_supervisor(run: RunFolder, plan: LaunchPlan, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The supervisor as a child of this process; what it says goes to the run's own batch log."""
    with run.batch_log("benchmark").open("ab") as log:
        return subprocess.Popen(
            plan.supervisor,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def events_of(run: RunFolder, name: str, attempt: int) -> list[Event]:
    """All events of one kind and attempt."""
    return [event for event in read_lines(run.events) if event["event"] == name and event["attempt"] == attempt]


def wait_for_event(run: RunFolder, name: str, attempt: int) -> Event:
    """The first event of a kind and attempt."""
    wait_for(f"{name} of attempt {attempt}", run, lambda: bool(events_of(run, name, attempt)))
    return events_of(run, name, attempt)[0]


def wait_for_steps(run: RunFolder, attempt: int, num_steps: int) -> None:
    """Return once an attempt has logged so many steps."""
    wait_for(f"{num_steps} steps of attempt {attempt}", run, lambda: num_logged(run, attempt) >= num_steps)


def num_logged(run: RunFolder, attempt: int) -> int:
    """Lines of metrics.jsonl that an attempt has written."""
    return sum(line["attempt"] == attempt for line in read_lines(run.metrics))


def wait_for(what: str, run: RunFolder, is_there: Callable[[], bool]) -> None:
    """Poll until something is there.

    Raises TimeoutError: it was not within PATIENCE_S.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}; see {run.path}")
        time.sleep(POLL_S)


def pid_of_rank(run: RunFolder, rank: int) -> int:
    """The process of one rank."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(run.path).encode() in (entry / "cmdline").read_bytes():
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return int(entry.name)
    raise ProcessLookupError(f"rank {rank} of {run.path} is not there")


def kill_rank(run: RunFolder, rank: int) -> None:
    """kill -9 of one rank."""
    os.kill(pid_of_rank(run, rank), signal.SIGKILL)
