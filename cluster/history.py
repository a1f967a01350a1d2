"""History of a run's attempts: ranks, Slurm -> [history] -> evidence for a verdict; verdicts -> history for the policy.

Standard library only.
"""

import contextlib
import json
import logging
from typing import Any

from cluster.job import Job
from cluster.launch import Ranks
from cluster.plan import LaunchPlan
from cluster.requeue import Decision, Past
from cluster.runs import EXIT_FAILED, RunFolder, manifest_steps, read_lines, utc_now, write_json
from cluster.signals import StopFlag
from cluster.verdict import Evidence, Verdict

log = logging.getLogger("run")


def gather(run: RunFolder, plan: LaunchPlan, attempt: int, ranks: Ranks, stop: StopFlag, job: Job) -> Evidence:
    """Collect what the attempt left behind."""
    records = []
    for path in sorted(run.failures.glob(f"a{attempt:04d}_r*.json")):
        with contextlib.suppress(json.JSONDecodeError):  # its rank was killed while it wrote
            records.append(json.loads(path.read_text()))
    stops: list[dict[str, Any]] = [
        event for event in read_lines(run.events) if event["event"] == "stopped" and event["attempt"] == attempt
    ]
    return Evidence(
        is_finished=run.summary.exists(),
        maybe_stop=stops[-1] if stops else None,
        failures=records,
        end=ranks.end(),
        job_lines=job.new_error_lines(),
        time_left_s=job.maybe_time_left_s(),
        lead_s=plan.signal_lead_s,
        is_on_slurm=job.is_on_slurm,
        asked_by_user=run.stop_mark.exists() or stop.name() == "SIGINT",
    )


def record_end(run: RunFolder, verdict: Verdict, decision: Decision, past: Past, attempt: int, job_id: str) -> None:
    """Write the verdict, and the events that rank 0 could not."""
    write_json(
        run.verdict(attempt),
        {
            "time": utc_now(),
            "attempt": attempt,
            "job_id": job_id,
            "outcome": verdict.outcome,
            "cause": verdict.cause,
            "reason": verdict.reason,
            "rank": verdict.rank,
            "node": verdict.node,
            "exit_code": verdict.exit_code,
            "action": decision.action,
            "why": decision.why,
            "checkpoint_step": past.checkpoint_step,
        },
    )
    told = {"cause": verdict.cause, "rank": verdict.rank, "reason": verdict.reason}
    if verdict.outcome == "failed":
        run.append_event("attempt_failed", attempt=attempt, job_id=job_id, **told)
    if decision.action == "restart":
        run.append_event("restarted", attempt=attempt, job_id=job_id, cause=verdict.cause)
    level = logging.ERROR if verdict.outcome == "failed" else logging.INFO
    log.log(level, "attempt %d %s: %s", attempt, verdict.outcome, verdict.reason)
    log.info("next: %s%s", decision.action, f" ({decision.why})" if decision.why else "")


def read_history(run: RunFolder, last: int) -> list[Past]:
    """The attempts up to a number, oldest first."""
    verdicts = [run.read_json(run.verdict(number)) for number in range(1, last + 1)]
    return [Past(verdict.get("cause", "lost"), verdict.get("checkpoint_step", 0)) for verdict in verdicts]


def note_lost_attempts(run: RunFolder) -> None:
    """Give a verdict to earlier attempts whose supervisor died with its node, or was killed."""
    newest = max(manifest_steps(run.checkpoints), default=0)
    for number in range(1, run.latest_attempt() + 1):
        if not run.verdict(number).exists():
            verdict = Verdict("failed", "lost", "it left no verdict: its node or its supervisor died", EXIT_FAILED)
            job_id = run.read_attempt(number).get("job_id", "")
            record_end(run, verdict, Decision("leave"), Past("lost", newest), number, job_id)
