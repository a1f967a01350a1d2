"""Why: a run -> [why] -> why it waits, why it stopped, or what became of its attempts, in ten lines.

    python -m cluster.why RUN [--json]

RUN is a run folder, run id, run name (its newest) or job id.
Exit codes: as cluster.status: 0 answered; 1 the run has failed, was cancelled, or never starts; 2 usage or no such run;
4 Slurm was not reached, and the answer depends on it.  Standard library only.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from cluster.attempts import Attempt, read_attempts
from cluster.causes import BY_SLURM, RESUME, advise
from cluster.index import find_run
from cluster.reasons import explain
from cluster.run_state import BAD
from cluster.runs import EXIT_USAGE, RunFolder, UsageError, maybe_object
from cluster.slurm_word import slurm_word
from cluster.status_text import clock
from cluster.terminal import end_quietly_at_a_closed_pipe
from cluster.view import View, exit_code_of, look_at

NUM_LINES = 10
NUM_TRACEBACK_LINES = 4
FOR_GOOD = "submit it anew: cluster.cancel ends a run for good"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is where it is; texts may be empty."""

    head: str  # one line
    cause: str = ""
    traceback: tuple[str, ...] = ()  # all lines
    slurm: str = ""  # Slurm's own word about the last job
    kind: str = ""  # the class, and what it means
    to_do: str = ""
    look: str = ""  # the file to read
    cause_name: str = ""  # the class alone


def main(argv: Sequence[str] | None = None) -> int:
    """Answer about one run and return the exit code."""
    end_quietly_at_a_closed_pipe()
    return answer(argv, os.environ)


def answer(argv: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    """Print the answer to a command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.why", description="Say why a run is where it is.")
    parser.add_argument("run", help="its folder, id, name or job id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        run = find_run(args.run, environ)
        sight = look_at(run, environ)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    view, attempts = sight.views[0], read_attempts(run)
    reason = find_reason(view, attempts, environ, datetime.now().astimezone())
    if args.json:
        print(json.dumps(as_object(view, reason, attempts), ensure_ascii=False))
    else:
        print("\n".join(lines_of(view, reason, attempts)))
        if sight.slurm_error:
            print(f"Slurm was not reached, and this is what the run folder says: {sight.slurm_error}", file=sys.stderr)
    return exit_code_of(sight)


def find_reason(view: View, attempts: Sequence[Attempt], environ: Mapping[str, str], now: datetime) -> Reason:
    """Why the run is where it is.  now: with a time zone."""
    facts, state = view.facts, view.state
    run = facts.run
    count = f", attempt {facts.attempt}" if facts.attempt else ""
    head = f"{run.path.parent.name} {run.run_id}: {state.word}{count}"
    if state.maybe_job is not None and state.maybe_job.kind == "pending" and not facts.is_cancelled:
        return waiting(view, head, now)
    if state.word not in ("failed", "cancelled", "stopped"):
        return Reason(head, state.because)
    word = "" if facts.is_local else slurm_word(state.job_id, run, environ)
    if facts.verdict and facts.has_begun:
        return of_verdict(view, head, word)
    return without_verdict(view, head, word)


def without_verdict(view: View, head: str, slurm: str) -> Reason:
    """Why a run has ended whose last job left no verdict; Slurm's word is then all there is."""
    facts, state = view.facts, view.state
    cause = BY_SLURM.get(state.ended_as, "lost") if facts.has_begun else ""
    kind = f"{cause}: {advise(cause).text}" if cause else ""
    to_do = filled(early_to_do(view, cause), facts.run)
    return Reason(head, state.because, (), slurm, kind, to_do, last_log(facts.run, facts.attempt), cause)


def waiting(view: View, head: str, now: datetime) -> Reason:
    """Why a job waits, whether that ends, and what to do."""
    job = view.state.maybe_job
    assert job is not None
    reason = explain(job.reason)
    ends = {"itself": "that ends by itself", "user": "that ends when you act", "admin": "that ends when others act"}
    kind = ends.get(reason.ended_by, "that does not end as the job and the cluster are now")
    if job.maybe_start and not reason.never_ends:
        kind += f"; {'may start' if job.reason == 'BeginTime' else 'start expected'} at {clock(job.maybe_start, now)}"
    to_do = reason.to_do.replace("JOB_ID", job.job_id)
    if reason.never_ends:
        to_do = f"scancel {job.job_id}, and {to_do}"
    before = f"before that: {view.facts.verdict.get('reason')}" if view.facts.verdict else ""
    return Reason(
        head, view.state.because, slurm=f"job {job.job_id} is {job.state}", kind=kind, to_do=to_do, look=before
    )


def of_verdict(view: View, head: str, slurm: str) -> Reason:
    """Why the latest attempt was the last one."""
    run, verdict, attempt = view.facts.run, view.facts.verdict, view.facts.attempt
    cause = str(verdict.get("cause"))
    advice = advise(cause)
    why = f"; {verdict['why']}" if verdict.get("why") else ""
    stacks = run.stacks_of(attempt)
    look = str(stacks) if stacks.exists() else last_log(run, attempt)
    said = view.state.because if view.state.because.startswith(verdict["reason"]) else verdict["reason"]
    return Reason(
        head,
        said.removesuffix(f" ({verdict.get('why')})"),
        traceback_of(run, attempt, verdict),
        slurm,
        f"{cause}: {advice.text}{why}",
        FOR_GOOD if view.facts.is_cancelled else filled(advice.to_do, run),
        look,
        cause,
    )


def early_to_do(view: View, cause: str) -> str:
    """What to do about a run whose last job left no verdict.  cause: its class; empty where no rank was started."""
    if view.facts.is_cancelled:
        return FOR_GOOD
    if cause:
        return advise(cause).to_do
    if "left no log" in view.state.because:
        return f"is {view.facts.run.logs} on storage that the nodes see? then submit it anew"
    return f"correct it; then {RESUME}" if view.state.word == "failed" else RESUME


def traceback_of(run: RunFolder, attempt: int, verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """The traceback of the rank that failed first; empty where it left none."""
    if verdict.get("outcome") != "failed":
        return ()
    own = run.failures / f"a{attempt:04d}_r{verdict.get('rank') or 0:05d}.json"
    for path in [own, *sorted(run.failures.glob(f"a{attempt:04d}_r*.json"))]:
        said = maybe_object(path)
        if said.get("exception") and str(said["exception"]) in str(verdict["reason"]):
            return tuple(str(said.get("traceback", "")).rstrip("\n").splitlines())
    return ()


def last_log(run: RunFolder, attempt: int) -> str:
    """The log to read: the last attempt's, or else the last job's."""
    path = run.attempt_log(attempt)
    if attempt and path.exists():
        return str(path)
    logs = sorted(run.logs.glob("batch_*.log"), key=lambda path: path.stat().st_mtime)
    return str(logs[-1]) if logs else ""


def filled(text: str, run: RunFolder) -> str:
    """A text with the run folder in its place."""
    return text.replace("RUN_DIR", str(run.path))


def lines_of(view: View, reason: Reason, attempts: Sequence[Attempt]) -> list[str]:
    """What is printed: the reason in at most ten lines, or the story of a run that needs none."""
    labelled = (
        ("why", reason.cause),
        *(("", line) for line in reason.traceback[-NUM_TRACEBACK_LINES:]),
        ("Slurm", reason.slurm),
        ("class", reason.kind),
        ("to do", reason.to_do),
        ("see", reason.look),
    )
    lines = [reason.head, *(f"{label:<6} {text}" for label, text in labelled if text)]
    room = NUM_LINES - len(lines)
    if view.state.word in (*BAD, "stopped"):
        attempts = attempts[-room:] if room > 0 and len(attempts) > 1 else ()
    return [*lines, *(attempt.text() for attempt in attempts)]


def as_object(view: View, reason: Reason, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """What --json prints."""
    facts, state = view.facts, view.state
    verdict = facts.verdict if facts.has_begun else {}
    return {
        "run_dir": str(facts.run.path),
        "run_id": facts.run.run_id,
        "job_id": state.job_id or None,
        "state": state.word,
        "cause": reason.cause or None,
        "class": reason.cause_name or None,
        "rank": verdict.get("rank"),
        "node": verdict.get("node"),
        "traceback": list(reason.traceback),
        "slurm": reason.slurm or None,
        "never_starts": state.never_starts,
        "to_do": reason.to_do or None,
        "see": reason.look or None,
        "attempts": [asdict(attempt) for attempt in attempts],
    }


if __name__ == "__main__":
    sys.exit(main())
