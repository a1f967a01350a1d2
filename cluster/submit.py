"""Submission: spec -> plan -> [submit] -> Slurm, or this machine.  The only file that imports submitit.

    python -m cluster.submit SPEC [section.key=value ...] [--dry-run] [--json] [--wait] [--follow]
    python -m cluster.submit --resume RUN [section.key=value ...]

What submitit pickles is os.execv and plain text: the job becomes `python -m cluster.supervise RUN_DIR` at once, and
nothing of submitit is left in it.
Sources: submitit 1.5, docs/structure.md; sbatch(1), Slurm 22.05.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster import index, preflight, slurm, successor
from cluster.environment import clean_environment
from cluster.follow import follow
from cluster.plan import SIGNALS_BLOCKED, LaunchPlan, make_plan, python_at, write_plan
from cluster.refusals import keys_to_look_at
from cluster.resume import prepare_resumption
from cluster.runs import (
    EXIT_FINISHED,
    EXIT_UNREACHED,
    EXIT_USAGE,
    RunFolder,
    UsageError,
    new_run_id,
    write_atomic,
)
from cluster.spec import JobSpec, dump_spec, faults_allowed, load_spec

EXIT_REFUSED = 3  # Slurm said no
YEAR_MIN = 365 * 24 * 60  # submitit's local executor ends a job after 2 minutes unless told otherwise


class SubmissionError(RuntimeError):
    """The job was not submitted, or nobody knows."""

    def __init__(self, message: str, exit_code: int) -> None:
        """exit_code: EXIT_USAGE, EXIT_REFUSED or EXIT_UNREACHED."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Submitted:
    """What --json prints."""

    run_dir: str
    run_id: str
    job_id: str | None  # None: nothing was submitted
    cluster: str
    script: str


def main(argv: Sequence[str] | None = None) -> int:
    """Submit one run and return the exit code."""
    args = parse_arguments(argv)
    environ = clean_environment(os.environ)
    # submitit hands this process's environment on to sbatch and to local tasks; there is no other way to choose it.
    os.environ.clear()
    os.environ.update(environ)
    try:
        return submit(args, environ)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except SubmissionError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cluster.submit", description="Submit a training run.")
    parser.add_argument(
        "words", nargs="*", metavar="SPEC | section.key=value", help="the spec, then values in its place"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run: its folder, id, name or job id")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    parser.add_argument("--force", action="store_true", help="submit what the cluster, as it is, can't run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--wait", action="store_true", help="return when the run has ended, with its result")
    parser.add_argument("--follow", action="store_true", help="as --wait, and show the ranks' log")
    args = parser.parse_intermixed_args(argv)
    if args.resume is None and not args.words:
        parser.error("a SPEC is needed, or --resume RUN")
    args.spec, args.overrides = (None, args.words) if args.resume else (Path(args.words[0]), args.words[1:])
    return args


def submit(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Plan, then print or submit, then follow if asked."""
    if args.resume is not None:
        resumption = prepare_resumption(index.find_run(args.resume, environ), args.overrides, environ)
        if resumption.is_done:
            print(f"{resumption.run.path} is finished; nothing to do", file=sys.stderr)
            return EXIT_FINISHED
        run, spec, commit = resumption.run, resumption.spec, resumption.commit
    else:
        spec = load_spec(args.spec, args.overrides, cwd=Path.cwd(), allow_faults=faults_allowed(environ))
        run, commit = RunFolder(spec.run_root / spec.name / new_run_id(datetime.now(timezone.utc))), None
    check = preflight.begin(spec, environ)
    plan = make_plan(
        spec, run, python=python_at(sys.executable), maybe_visible_gpus=environ.get("CUDA_VISIBLE_DEVICES")
    )
    script = script_text(plan, run)
    source, overrides = (args.spec, args.overrides) if args.spec else (run.spec, args.overrides)
    preflight.conclude(check, source, overrides, cwd=Path.cwd(), force=args.force, is_dry=args.dry_run)
    if args.dry_run:
        announce(Submitted(str(run.path), run.run_id, None, plan.cluster, script), as_json=args.json, is_dry=True)
        return EXIT_FINISHED
    stage_if_missing(spec, args.spec or run.spec, args.overrides if args.spec else ())
    write_files(run, plan, script, maybe_new_spec=None if commit else spec)
    previous_attempt = run.latest_attempt()
    job_id = start(plan, run, environ, maybe_commit=commit)
    announce(Submitted(str(run.path), run.run_id, job_id, plan.cluster, script), as_json=args.json, is_dry=False)
    if plan.cluster == "local" or args.wait or args.follow:
        return follow(
            run, plan, job_id, environ, previous_attempt=previous_attempt, show_log=args.follow, quiet=args.json
        )
    return EXIT_FINISHED


def write_files(run: RunFolder, plan: LaunchPlan, script: str, *, maybe_new_spec: JobSpec | None) -> None:
    """Put spec, plan and script into the run folder, which is made for a new spec.

    Raises SubmissionError: the storage refused.
    """
    try:
        if maybe_new_spec is not None:
            run.make()
            write_atomic(run.spec, dump_spec(maybe_new_spec))
        write_plan(plan, run)
        write_atomic(run.script, script)
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
            hint = f"after a change of the images: python -m jobs.stage {source} --force"
            print(f"using {staged}, staged at {when}; {hint}", file=sys.stderr)
        return
    done = subprocess.run([sys.executable, "-m", "jobs.stage", str(source), *overrides], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SubmissionError(f"dataset: {spec.dataset.kind} could not be staged; nothing was submitted", EXIT_USAGE)


def script_text(plan: LaunchPlan, run: RunFolder) -> str:
    """The script that is submitted, or that the local route runs."""
    if plan.cluster == "slurm":
        executor = make_executor(plan, run, lambda job_id: None)
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
        return text
    return local_script(plan)


def local_script(plan: LaunchPlan) -> str:
    """The local route's script: the same preamble and supervisor as on Slurm, in a session of its own."""
    return "\n".join(
        ["#!/bin/bash", *plan.preamble, f"exec {shlex.join((*SIGNALS_BLOCKED, *plan.supervisor))} --detach", ""]
    )


def start(
    plan: LaunchPlan, run: RunFolder, environ: Mapping[str, str], *, maybe_commit: Callable[[], None] | None
) -> str:
    """Submit; returns the job id.  A new run folder that nothing was submitted for is removed again.

    maybe_commit: for a run that goes on: puts its changed spec into the folder, once the job is sure.

    Raises SubmissionError: refused, or no answer.
    """
    import submitit

    def enter(job_id: str) -> None:
        # Before submitit gives the job its pickle: until then the job waits, so nobody else reads or writes the folder.
        if maybe_commit is not None:
            maybe_commit()
        run.append_event("submitted", attempt=run.latest_attempt(), job_id=job_id, route=plan.cluster)
        index.register(run, job_id, environ)
        if plan.submit_from == "login" and plan.cluster == "slurm":
            put_in_beforehand(run, plan, job_id, environ)

    command = list(plan.supervisor) if plan.cluster == "slurm" else ["/bin/bash", str(run.script)]
    is_new = maybe_commit is None
    try:
        executor = make_executor(plan, run, enter)
        # submitit prints sbatch's words as well as raising them.  Its local controller inherits that INT is ignored:
        # a terminal's Ctrl-C is for us, and the supervisor gets it from us.
        with contextlib.redirect_stderr(io.StringIO()), ignored(signal.SIGINT):
            return str(executor.submit(os.execv, command[0], command).job_id)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise refusal(str(error), plan, run, is_new=is_new) from None
    except OSError as error:
        if error.filename != "sbatch":  # a full disk, say: the job may be in the queue, and its folder is left alone
            raise
        raise refusal(str(error), plan, run, is_new=is_new) from None


def put_in_beforehand(run: RunFolder, plan: LaunchPlan, job_id: str, environ: Mapping[str, str]) -> None:
    """Submit the job's successors; the job itself is in the queue, and stays there when they are refused."""
    try:
        successor.submit_beforehand(run, plan, job_id, environ)
    except slurm.SlurmError as error:
        print(f"not all of {plan.num_successors} successors were submitted: {error}", file=sys.__stderr__)


@contextlib.contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal here, and in processes started meanwhile until they handle it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def refusal(words: str, plan: LaunchPlan, run: RunFolder, *, is_new: bool) -> SubmissionError:
    """What to tell the user when sbatch failed; its own words are part of it."""
    words = words.strip()
    if re.search(r"Socket timed out|Unexpected message received|Zero Bytes were transmitted|^no job id", words):
        # Slurm takes the job in this case more often than not; the run id is in its output path.
        return SubmissionError(
            f"{words}\nSlurm may have taken the job all the same. To find out: "
            f"squeue --name={shlex.quote(plan.name)} -o '%i %T %o', and look for {run.run_id}; run folder: {run.path}",
            EXIT_UNREACHED,
        )
    if is_new:
        shutil.rmtree(run.path)
    if re.search(r"Unable to contact slurm controller|configuration (file|source)|: 'sbatch'$", words):
        return SubmissionError(
            f"{words}\nSlurm was not reached; nothing was submitted. To find out: scontrol ping", EXIT_UNREACHED
        )
    keys = keys_to_look_at(words, plan.sbatch)
    asked = f"; it was asked for {keys}" if keys else ""
    return SubmissionError(f"{words}\nSlurm refused the job{asked}; nothing was submitted", EXIT_REFUSED)


def make_executor(plan: LaunchPlan, run: RunFolder, on_submitted: Callable[[str], None]) -> Any:  # noqa: ANN401
    """submitit's executor for a plan.

    on_submitted: called with the job id as soon as it is known, before the job can begin its work.
    """
    return (local_executor if plan.cluster == "local" else slurm_executor)(plan, run, on_submitted)


def local_executor(plan: LaunchPlan, run: RunFolder, on_submitted: Callable[[str], None]) -> Any:  # noqa: ANN401
    """The executor of the local route; makes its folder at once."""
    import submitit

    class Local(submitit.LocalExecutor):
        def _submit_command(self, command: str) -> Any:  # noqa: ANN401
            job: Any = super()._submit_command(command)
            on_submitted(job.job_id)
            return job

    executor = Local(str(run.submitit))
    minutes = YEAR_MIN if plan.time_limit_s is None else plan.time_limit_s / 60
    executor.update_parameters(timeout_min=minutes, signal_delay_s=plan.signal_lead_s, stderr_to_stdout=True)
    return executor


def slurm_executor(plan: LaunchPlan, run: RunFolder, on_submitted: Callable[[str], None]) -> Any:  # noqa: ANN401
    """The executor for Slurm; makes nothing before it submits."""
    import submitit

    class Slurm(submitit.SlurmExecutor):
        """Asks sbatch for a bare job id, and writes a script also where srun is not installed."""

        @classmethod
        def affinity(cls) -> int:
            return 2

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return ["sbatch", "--parsable", str(submission_file_path)]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            answer = string if isinstance(string, str) else string.decode()
            job_id = slurm.maybe_submitted_id(answer)
            if job_id is None:
                raise submitit.core.utils.FailedSubmissionError(f"no job id in what sbatch printed: {answer!r}")
            return job_id

        def _submit_command(self, command: str) -> Any:  # noqa: ANN401
            job: Any = super()._submit_command(command)
            on_submitted(job.job_id)
            return job

    executor = Slurm(str(run.submitit), python=shlex.join((*SIGNALS_BLOCKED, plan.supervisor[0])))
    executor.update_parameters(**submitit_parameters(plan))
    return executor


def submitit_parameters(plan: LaunchPlan) -> dict[str, Any]:
    """The plan's flags as submitit takes them.

    submitit always writes job name, nodes, time, signal, output and open mode; the plan's values replace its own.
    `time` is given twice: submitit also counts with it, in minutes.
    """
    return {
        "additional_parameters": {
            name if name == "open-mode" else name.replace("-", "_"): value for name, value in plan.sbatch.items()
        },
        "time": math.ceil((plan.time_limit_s or 60) / 60),
        "nodes": plan.num_nodes,
        "setup": list(plan.preamble) or None,
        "use_srun": False,
        "wckey": None,
        "stderr_to_stdout": True,
    }


def announce(submitted: Submitted, *, as_json: bool, is_dry: bool) -> None:
    """Tell the user, or the program that asked for JSON."""
    if as_json:
        print(json.dumps(asdict(submitted)), flush=True)
    elif is_dry:
        print(submitted.script, end="")
    else:
        where = f"job {submitted.job_id}" if submitted.cluster == "slurm" else "this machine"
        print(f"submitted to {where}; run folder: {submitted.run_dir}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
