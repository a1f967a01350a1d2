"""Attempt: rank, spec -> [attempt] -> the run folder and the number under which this start of the ranks writes.

A supervisor has claimed the attempt before it starts the ranks.  Without one (torchrun, plain srun, one process) rank 0
makes the run folder, claims the attempt and tells the others through the store.
"""

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.keep import record_live, tell_other_code
from cluster.rank import ATTEMPT_VARIABLE, RankEnv
from cluster.runs import RunError, RunFolder, UsageError, new_run_id, write_atomic
from cluster.spec import JobSpec, changed_keys, dump_spec, load_spec

STORE_KEY = "attempt"
RUN_DIR_KEY = "run_dir"  # in torchrun's own store, which outlives a restart of its workers


def own_job_id(environ: Mapping[str, str]) -> str:
    """Slurm's job id, submitit's for a local run, or this process's id."""
    return environ.get("SLURM_JOB_ID") or environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())


def join_attempt(
    spec: JobSpec, maybe_run_dir: Path | None, env: RankEnv, store: Store, environ: Mapping[str, str]
) -> tuple[RunFolder, int]:
    """The run folder and attempt of all ranks.

    Raises RunError: the run folder that was given holds another run.
    """
    if ATTEMPT_VARIABLE in environ and maybe_run_dir is not None:
        return RunFolder(maybe_run_dir), int(environ[ATTEMPT_VARIABLE])
    if env.rank == 0:
        store.set(STORE_KEY, json.dumps(begin(spec, maybe_run_dir, env, store, environ)))
    told = json.loads(store.get(STORE_KEY))
    if "error" in told:
        raise RunError(told["error"])
    return RunFolder(Path(told["run_dir"])), told["attempt"]


def begin(
    spec: JobSpec, maybe_run_dir: Path | None, env: RankEnv, store: Store, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Rank 0's part: what it tells the others, an error included, so that none of them waits in vain.

    Workers that torchrun restarts go on with the run of those before them.  A finished run gets no further attempt.
    """
    maybe_agents_store = store.underlying_store if isinstance(store, PrefixStore) else None
    if maybe_run_dir is None and maybe_agents_store is not None and maybe_agents_store.check([RUN_DIR_KEY]):
        maybe_run_dir = Path(maybe_agents_store.get(RUN_DIR_KEY).decode())
    try:
        run = open_run(spec, maybe_run_dir, environ)
    except UsageError as error:
        return {"error": str(error)}
    if maybe_agents_store is not None:
        maybe_agents_store.set(RUN_DIR_KEY, str(run.path))
    attempt = run.latest_attempt() if run.summary.exists() else claim(run, env, own_job_id(environ))
    return {"run_dir": str(run.path), "attempt": attempt}


def open_run(spec: JobSpec, maybe_run_dir: Path | None, environ: Mapping[str, str]) -> RunFolder:
    """Make a run folder, or open the one to go on with.

    Raises RunError: the folder's frozen spec is another.  Raises FormatError: another release wrote a file of it.
    """
    if maybe_run_dir is None:
        maybe_run_dir = spec.run_root / spec.name / new_run_id(datetime.now(timezone.utc))
    run = RunFolder(maybe_run_dir)
    if run.spec.exists():
        run.check_formats()
        differing = changed_keys(load_spec(run.spec, cwd=run.path, allow_faults=True), spec)
        if differing:
            raise RunError(
                f"{run.path} holds a run with another spec ({', '.join(differing)}): resume it with {run.spec}"
            )
        run.make(spec.run_folder_mode)
        return run
    try:
        run.make(spec.run_folder_mode)
        write_atomic(run.spec, dump_spec(spec))
    except OSError as error:
        raise RunError(f"run_root: {run.path} cannot be written: {error.strerror}") from None
    record_live(spec, run, environ)
    run.append_event("submitted", attempt=0, job_id=own_job_id(environ), route="direct")
    return run


def claim(run: RunFolder, env: RankEnv, job_id: str) -> int:
    """Claim the next attempt for all ranks."""
    attempt = run.claim_attempt({"job_id": job_id, "host": socket.gethostname(), "pid": os.getpid()})
    run.append_event(
        "attempt_started", attempt=attempt, job_id=job_id, nodes=[socket.gethostname()], world_size=env.world_size
    )
    tell_other_code(run, attempt, job_id)
    return attempt
