"""Submission's own files and words: plan -> [submission] -> run folder, messages.  Knows nothing of submitit.

A submission is announced in the run folder before Slurm is asked, and every job's log goes into its run folder: so a
job that Slurm took while its answer was lost is found again, by that path, and nothing is submitted twice.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from cluster import slurm
from cluster.plan import LaunchPlan, write_plan
from cluster.refusals import keys_to_look_at
from cluster.runs import EXIT_UNREACHED, EXIT_USAGE, RunFolder, UsageError, write_atomic
from cluster.spec import JobSpec, dump_spec

EXIT_REFUSED = 3  # Slurm said no

UNKNOWN_OUTCOME = re.compile(
    r"Socket timed out|Unexpected message received|Zero Bytes were transmitted|[Mm]essage receive failure|^no job id"
)
# A refusal by a plugin of the site may say anything, so what may pass is listed here; slurm_errno.c.
UNREACHED = re.compile(
    r"Unable to contact slurm controller|configuration (file|source)|: 'sbatch'$|standby mode|Connection refused"
    r"|[Aa]uthentication (error|credential|agent)|[Mm]essage (connection|send) fail|[Cc]ommunication connection failure"
)


class SubmissionError(RuntimeError):
    """The job was not submitted, or nobody knows."""

    def __init__(self, message: str, exit_code: int) -> None:
        """exit_code: EXIT_USAGE, EXIT_REFUSED or EXIT_UNREACHED."""
        super().__init__(message)
        self.exit_code = exit_code


def write_files(
    run: RunFolder, plan: LaunchPlan, script: str, keep_code: Callable[[], None], *, maybe_new_spec: JobSpec | None
) -> None:
    """Put spec, code, plan and script into the run folder, which is made for a new spec.

    Raises SubmissionError: the storage refused.  Raises UsageError: keep_code does.
    """
    try:
        if maybe_new_spec is not None:
            run.make(maybe_new_spec.run_folder_mode)
        run.take_umask()  # Slurm hands it on to the job
        if maybe_new_spec is not None:
            write_atomic(run.spec, dump_spec(maybe_new_spec))
        keep_code()
        write_plan(plan, run)
        write_atomic(run.script, script)
    except UsageError:
        if maybe_new_spec is not None:
            shutil.rmtree(run.path)
        raise
    except OSError as error:
        message = f"run_root: {run.path} cannot be written: {error.strerror}; nothing was submitted"
        raise SubmissionError(message, EXIT_USAGE) from None


def stage_if_missing(spec: JobSpec, source: Path, overrides: Sequence[str]) -> None:
    """Fetch and convert the data set here, where there may be a network, before anything waits in a queue.

    Raises SubmissionError: it could not be staged; nothing was submitted.
    """
    staged = spec.dataset.staged_path
    if staged.exists():
        if spec.dataset.kind == "image_folder":  # the one kind whose source may have changed since
            when = datetime.fromtimestamp(staged.stat().st_mtime).isoformat(sep=" ", timespec="seconds")
            hint = f"after a change of the images: python -m jobs.stage {shlex.quote(str(source))} --force"
            print(f"using {staged}, staged at {when}; {hint}", file=sys.stderr)
        return
    command = [sys.executable, "-m", "jobs.stage", str(source.absolute()), *overrides]  # absolute: never an option
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SubmissionError(f"dataset: {spec.dataset.kind} could not be staged; nothing was submitted", EXIT_USAGE)


def removal_of(run: RunFolder) -> Callable[[], None]:
    """What undoes a new run when its job is refused."""
    return lambda: shutil.rmtree(run.path)


def undo_of(run: RunFolder) -> Callable[[], None]:
    """What gives an old run its files back when the job that was to go on with it is refused."""

    def files() -> set[Path]:
        return {
            run.spec,
            run.plan,
            run.script,
            run.code_record,
            run.stop_mark,
            run.summary,
            *run.path.glob("*.a????.*"),
        }

    before = {path: path.read_bytes() if path.exists() else None for path in files()}

    def undo() -> None:
        for path in files():
            content = before.get(path)
            if content is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                write_atomic(path, content)
        run.append_event("submission_refused", attempt=run.latest_attempt(), job_id="")

    return undo


def is_unknown(words: str) -> bool:
    """Whether sbatch failed in a way in which Slurm may have taken the job: it does so more often than not."""
    return UNKNOWN_OUTCOME.search(words.strip()) is not None


def maybe_taken(run: RunFolder, environ: Mapping[str, str], *, timeout_s: float) -> str | None:
    """The job that Slurm took although its answer was lost; None when it has none, or does not say."""
    try:
        found = slurm.jobs_of(run.path, environ, timeout_s=timeout_s)
    except slurm.SlurmError:
        return None
    alive = [job_id for job_id, state in found.items() if state not in slurm.ENDED_STATES]
    return alive[-1] if alive else None


def refusal(words: str, run: RunFolder, undo: Callable[[], None], flags: Mapping[str, object]) -> SubmissionError:
    """What to tell the user when sbatch failed; its own words are part of it.

    undo: called where nothing was submitted for sure.  flags: what sbatch was given.
    """
    words = words.strip()
    if is_unknown(words):
        return SubmissionError(
            f"{words}\nSlurm may have taken the job all the same. To find out: "
            f"squeue -a --me -t all -o '%i %T %o' | grep {run.run_id}\n"
            f"To go on, without a second job if there is one: "
            f"python -m cluster.submit --resume {shlex.quote(str(run.path))}",
            EXIT_UNREACHED,
        )
    undo()
    if UNREACHED.search(words):
        return SubmissionError(
            f"{words}\nSlurm was not reached; nothing was submitted. To find out: scontrol ping", EXIT_UNREACHED
        )
    keys = keys_to_look_at(words, flags)
    asked = f"; it was asked for {keys}" if keys else ""
    return SubmissionError(f"{words}\nSlurm refused the job{asked}; nothing was submitted", EXIT_REFUSED)
