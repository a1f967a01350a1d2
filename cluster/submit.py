"""Submission: spec -> plan -> [submit] -> Slurm, or this machine.  The only file that imports submitit.

    python -m cluster.submit SPEC [section.key=value ...] [--dry-run] [--json] [--wait] [--follow]
    python -m cluster.submit --resume RUN [section.key=value ...]
    python -m cluster.submit --rerun RUN [section.key=value ...]
    python -m cluster.submit --schema

What submitit pickles is os.execv and plain text: the job becomes `python -m cluster.supervise RUN_DIR` at once, and
nothing of submitit is left in it.
Sources: submitit 1.5, docs/structure.md; sbatch(1), Slurm 22.05.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster import index, keep, preflight, slurm
from cluster.clusters import cluster_name
from cluster.environment import clean_environment
from cluster.plan import LaunchPlan, make_plan, python_at
from cluster.runs import EXIT_FINISHED, EXIT_USAGE, RunFolder, UsageError, new_run_id
from cluster.spec import SourcedSpec, check_packages, faults_allowed, read_spec
from cluster.submission import (
    EXIT_REFUSED,
    SubmissionError,
    is_unknown,
    maybe_taken,
    refusal,
    removal_of,
    stage_if_missing,
    undo_of,
    write_files,
)

LOOK_UP_S = 5.0  # for Slurm to say whether it took a job, after sbatch gave up
PICKLE_LOOKS = 20  # of half a second
YEAR_MIN = 365 * 24 * 60  # submitit's local executor ends a job after 2 minutes unless told otherwise


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
    if args.schema:
        from cluster.schema import schema

        print(json.dumps(schema(), indent=2))
        return EXIT_FINISHED
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
    parser.add_argument("--rerun", metavar="RUN", help="a new run with the spec and the code of another one")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    force = "submit what the cluster, as it is, can't run; resume a run whose job is of another cluster"
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a spec, for editors")
    parser.add_argument("--wait", action="store_true", help="return when the run has ended, with its result")
    parser.add_argument("--follow", action="store_true", help="as --wait, and show the ranks' log")
    args = parser.parse_intermixed_args(argv)
    if args.schema:
        return args
    if args.resume is None and args.rerun is None and not args.words:
        parser.error("a SPEC is needed, or --resume RUN, or --rerun RUN")
    if args.resume is not None and args.rerun is not None:
        parser.error("--resume goes on with a run and --rerun makes a new one; give one of them")
    is_from_run = args.resume is not None or args.rerun is not None
    args.spec, args.overrides = (None, args.words) if is_from_run else (Path(args.words[0]), args.words[1:])
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def submit(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Plan, then print or submit, then follow if asked."""
    request = maybe_request(args, environ)
    if request is None:
        return EXIT_FINISHED
    run, spec = request.run, request.sourced.spec
    if spec.python is None and spec.container.image is None:
        check_packages(spec)  # the interpreter of this process is the job's
    check = preflight.begin(spec, environ)
    kept = keep.look(spec, run, environ, maybe_source=request.maybe_source)
    plan = make_plan(
        spec,
        run,
        python=python_at(sys.executable),
        maybe_code_root=kept.code_root(run),
        maybe_visible_gpus=environ.get("CUDA_VISIBLE_DEVICES"),
    )
    script = script_text(plan, run)
    preflight.conclude(check, request.sourced, force=args.force, is_dry=args.dry_run)
    if args.dry_run:
        return tell_dry_run(request, plan, script, environ, as_json=args.json)
    stage_if_missing(spec, args.spec or run.spec, args.overrides if args.spec else ())
    undo = request.make_undo()
    maybe_new_spec = None if args.resume else spec
    write_files(run, plan, script, lambda: keep.keep(kept, run, environ), maybe_new_spec=maybe_new_spec)
    keep.tell_left_out(kept)
    previous_attempt = run.latest_attempt()
    job_id = start(request, plan, environ, undo)
    announce(Submitted(str(run.path), run.run_id, job_id, plan.cluster, script), as_json=args.json)
    if plan.cluster == "local" or args.wait or args.follow:
        from cluster.follow import follow

        return follow(
            run, plan, job_id, environ, previous_attempt=previous_attempt, show_log=args.follow, quiet=args.json
        )
    return EXIT_FINISHED


@dataclass(frozen=True, slots=True)
class Request:
    """What the user wants to run, new or going on."""

    run: RunFolder
    sourced: SourcedSpec
    make_undo: Callable[[], Callable[[], None]]  # called before a file is written; its result undoes all of it
    commit: Callable[[], None] = lambda: None  # changes an old run's files, before its job is submitted
    maybe_source: RunFolder | None = None  # the run that is done again


def maybe_request(args: argparse.Namespace, environ: Mapping[str, str]) -> Request | None:
    """The command line's wish; None for a finished run that nothing would be added to."""
    if args.resume is None:
        source = index.find_run(args.rerun, environ) if args.rerun is not None else None
        if source is not None:
            keep.become_submit_of(source, args.argv, environ)
            args.spec = source.spec
        sourced = read_spec(args.spec, args.overrides, cwd=Path.cwd(), allow_faults=faults_allowed(environ))
        run = RunFolder(sourced.spec.run_root / sourced.spec.name / new_run_id(datetime.now(timezone.utc)))
        return Request(run, sourced, lambda: removal_of(run), maybe_source=source)
    from cluster.resume import prepare_resumption

    found = index.find_run(args.resume, environ)
    resumption = prepare_resumption(found, args.overrides, environ, force=args.force)
    run = resumption.run
    if resumption.is_done:
        print(f"{run.path} is finished; nothing to do", file=sys.stderr)
        return None
    return Request(run, resumption.sourced, lambda: undo_of(run), resumption.commit)


def tell_dry_run(request: Request, plan: LaunchPlan, script: str, environ: Mapping[str, str], *, as_json: bool) -> int:
    """The script on standard output, the rest on standard error; returns the exit code."""
    from cluster.dry_run import dry_run, report

    found = dry_run(request.sourced, plan, script, environ)
    if as_json:
        head = Submitted(str(request.run.path), request.run.run_id, None, plan.cluster, script)
        print(json.dumps(asdict(head) | asdict(found)))
    else:
        print(script, end="", flush=True)
        for line in report(found, request.sourced):
            print(line, file=sys.stderr)
    return EXIT_REFUSED if found.is_refused else EXIT_FINISHED


def script_text(plan: LaunchPlan, run: RunFolder) -> str:
    """The script that is submitted, or that the local route runs."""
    if plan.cluster == "slurm":
        executor = make_executor(plan, run, lambda job_id: None, {})
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
        return text
    return local_script(plan)


def local_script(plan: LaunchPlan) -> str:
    """The local route's script: the same preamble and supervisor as on Slurm, in a session of its own."""
    return "\n".join(["#!/bin/bash", *plan.shell_lines, f"begin_blocked {shlex.join(plan.supervisor)} --detach", ""])


def start(request: Request, plan: LaunchPlan, environ: Mapping[str, str], undo: Callable[[], None]) -> str:
    """Submit; returns the job id.

    undo: called when Slurm refuses.  A new run folder is removed then, an old one gets its files back.

    Raises SubmissionError: refused, or no answer.
    """
    import submitit

    run = request.run

    cluster = cluster_name(environ) if plan.cluster == "slurm" else ""
    told = {"route": plan.cluster} | ({"cluster": cluster} if plan.cluster == "slurm" else {})

    def enter(job_id: str) -> None:
        run.append_event("submitted", attempt=run.latest_attempt(), job_id=job_id, **told)
        index.register(run, job_id, environ, plan.cluster, cluster)
        if plan.submit_from == "login" and plan.cluster == "slurm":
            put_in_beforehand(run, plan, job_id, environ)

    command = list(plan.supervisor) if plan.cluster == "slurm" else ["/bin/bash", str(run.script)]
    request.commit()
    run.append_event("submitting", attempt=run.latest_attempt(), job_id="", **told)
    index.register(run, "", environ, plan.cluster, cluster)
    try:
        executor = make_executor(plan, run, enter, environ)
        # submitit prints sbatch's words as well as raising them.  Its local controller inherits that INT is ignored:
        # a terminal's Ctrl-C is for us, and the supervisor gets it from us.
        with contextlib.redirect_stderr(io.StringIO()), ignored(signal.SIGINT):
            return str(executor.submit(os.execv, command[0], command).job_id)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise refusal(str(error), run, undo, plan.sbatch) from None
    except OSError as error:
        if error.filename != "sbatch":  # a full disk, say: the job may be in the queue, and its folder is left alone
            raise
        raise refusal(str(error), run, undo, plan.sbatch) from None


def put_in_beforehand(run: RunFolder, plan: LaunchPlan, job_id: str, environ: Mapping[str, str]) -> None:
    """Submit the job's successors; the job itself is in the queue, and stays there when they are refused."""
    from cluster import successor

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


def make_executor(
    plan: LaunchPlan, run: RunFolder, on_submitted: Callable[[str], None], environ: Mapping[str, str]
) -> Any:  # noqa: ANN401
    """submitit's executor for a plan.

    on_submitted: called with the job id as soon as it is known, before the job can begin its work.
    """
    if plan.cluster == "local":
        return local_executor(plan, run, on_submitted)
    return slurm_executor(plan, run, on_submitted, environ)


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


def slurm_executor(
    plan: LaunchPlan, run: RunFolder, on_submitted: Callable[[str], None], environ: Mapping[str, str]
) -> Any:  # noqa: ANN401
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
            try:
                job: Any = super()._submit_command(command)
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                job_id = maybe_taken(run, environ, timeout_s=LOOK_UP_S) if is_unknown(str(error)) else None
                if job_id is None:
                    raise
                job = self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
            on_submitted(job.job_id)
            return job

    executor = Slurm(str(run.submitit), python=f"begin_blocked {shlex.quote(plan.supervisor[0])}")
    executor.update_parameters(**submitit_parameters(plan))
    return executor


def submitit_parameters(plan: LaunchPlan) -> dict[str, Any]:
    """The plan's flags as submitit takes them.

    submitit always writes job name, nodes, time, signal, output and open mode; the plan's values replace its own.
    `time` is given twice: submitit also counts with it, in minutes.
    """
    return {
        "additional_parameters": {
            name if name == "open-mode" else name.replace("-", "_"): slurm.in_directive(value)
            for name, value in plan.sbatch.items()
        },
        "time": math.ceil((plan.time_limit_s or 60) / 60),
        "nodes": plan.num_nodes,
        "setup": [*plan.shell_lines, *begin_without_pickle(plan)],
        "use_srun": False,
        "wckey": None,
        "stderr_to_stdout": True,
    }


def begin_without_pickle(plan: LaunchPlan) -> tuple[str, ...]:
    """Shell lines that start the supervisor where submitit's pickle does not come.

    The process that submits puts it in place once it knows the job id; it may be killed before, or never hear of the
    job that Slurm took.
    """
    pickle = f"{shlex.quote(str(RunFolder(Path(plan.run_dir)).submitit))}/${{SLURM_JOB_ID}}_submitted.pkl"
    return (
        f"for _ in {{1..{PICKLE_LOOKS}}}; do if [ -e {pickle} ]; then break; fi; sleep 0.5; done",
        f"if [ ! -e {pickle} ]; then begin_blocked {shlex.join(plan.supervisor)}; fi",
    )


def announce(submitted: Submitted, *, as_json: bool) -> None:
    """Tell the user, or the program that asked for JSON."""
    if as_json:
        print(json.dumps(asdict(submitted)), flush=True)
    else:
        where = f"job {submitted.job_id}" if submitted.cluster == "slurm" else "this machine"
        print(f"submitted to {where}; run folder: {submitted.run_dir}", flush=True)


if __name__ == "__main__":
    exit_code = main()
    gc.freeze()  # else Python's end looks through all that was imported, several times: 30 ms of 320
    sys.exit(exit_code)
