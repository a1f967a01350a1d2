"""History of a run's attempts: ranks, Slurm -> [history] -> evidence for a verdict; verdicts -> history for the policy.

Standard library only.
"""

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.job import Job
from cluster.launch import Ranks
from cluster.plan import LaunchPlan
from cluster.requeue import Decision, Past
from cluster.runs import EXIT_FAILED, RunFolder, manifest_steps, read_lines, utc_now, write_json
from cluster.signals import StopFlag
from cluster.verdict import Evidence, Verdict

log = logging.getLogger("run")

UNWRITTEN = "not written: the verdict on attempt "


def gather(run: RunFolder, plan: LaunchPlan, attempt: int, ranks: Ranks, stop: StopFlag, job: Job) -> Evidence:
    """Collect what the attempt left behind."""
    run.look_afresh()
    records = []
    for path in sorted(run.failures.glob(f"a{attempt:04d}_r*.json")):
        with contextlib.suppress(json.JSONDecodeError):  # its rank was killed while it wrote
            records.append(json.loads(path.read_text()))
    stops: list[dict[str, Any]] = [
        event for event in read_lines(run.events) if event["event"] == "stopped" and event["attempt"] == attempt
    ]
    record = job.maybe_record()
    return Evidence(
        is_finished=run.summary.exists(),
        maybe_stop=stops[-1] if stops else None,
        failures=records,
        end=ranks.end(),
        maybe_job=record,
        job_lines=job.new_error_lines(),
        time_left_s=job.maybe_time_left_s() if record is None else record.time_left_s,
        lead_s=plan.signal_lead_s,
        is_on_slurm=job.is_on_slurm,
        asked_by_user=run.stop_mark.exists() or stop.name() == "SIGINT",
    )


@dataclass
class Verdicts:
    """The verdicts on a run's attempts, those of this job that could not be written among them.

    A storage that is full, or over its quota, keeps nobody from going on: what was to be written goes to the batch log,
    and is written by whoever comes next.
    """

    run: RunFolder
    unwritten: dict[int, dict[str, Any]] = field(default_factory=dict)  # attempt -> contents of its file

    def record(self, verdict: Verdict, decision: Decision, past: Past, attempt: int, job_id: str) -> None:
        """Write the verdict, and the events that rank 0 could not."""
        content = {
            "time": utc_now(),
            "attempt": attempt,
            "job_id": job_id,
            "outcome": verdict.outcome,
            "cause": verdict.cause,
            "reason": verdict.reason,
            "rank": verdict.rank,
            "node": verdict.node,
            "nodes": list(verdict.nodes),
            "exit_code": verdict.exit_code,
            "action": decision.action,
            "why": decision.why,
            "checkpoint_step": past.checkpoint_step,
        }
        self.unwritten[attempt] = content
        self.write()
        told = {"cause": verdict.cause, "rank": verdict.rank, "reason": verdict.reason}
        if verdict.outcome == "failed":
            self.run.note_event("attempt_failed", attempt=attempt, job_id=job_id, **told)
        if decision.action == "restart":
            self.run.note_event("restarted", attempt=attempt, job_id=job_id, cause=verdict.cause)
        level = logging.ERROR if verdict.outcome == "failed" else logging.INFO
        log.log(level, "attempt %d %s: %s", attempt, verdict.outcome, verdict.reason)
        log.info("next: %s%s", decision.action, f" ({decision.why})" if decision.why else "")

    def write(self) -> None:
        """Write what is not written yet; where it still can't be, the log has it, in the form that unlogged() reads."""
        for attempt, content in list(self.unwritten.items()):
            try:
                write_json(self.run.verdict(attempt), content)
                del self.unwritten[attempt]
            except OSError as error:
                log.error("%s%d (%s): %s", UNWRITTEN, attempt, error.strerror, json.dumps(content, ensure_ascii=False))

    def read(self, last: int) -> list[Past]:
        """The attempts up to a number, oldest first."""
        verdicts = [
            self.unwritten.get(number) or self.run.read_json(self.run.verdict(number)) for number in range(1, last + 1)
        ]
        return [Past(verdict.get("cause", "lost"), verdict.get("checkpoint_step", 0)) for verdict in verdicts]

    def note_lost(self) -> None:
        """Give a verdict to earlier attempts without one: what a log has of it, else that its supervisor has died."""
        self.write()
        newest = max(manifest_steps(self.run.checkpoints), default=0)
        for number in range(1, self.run.latest_attempt() + 1):
            if number in self.unwritten or self.run.verdict(number).exists():
                continue
            job_id = self.run.read_attempt(number).get("job_id", "")
            if content := unlogged(self.run.batch_log(job_id), number):
                self.unwritten[number] = content
                self.write()
            else:
                lost = Verdict("failed", "lost", "it left no verdict: its node or its supervisor died", EXIT_FAILED)
                self.record(lost, Decision("leave"), Past("lost", newest), number, job_id)


def unlogged(batch_log: Path, attempt: int) -> dict[str, Any]:
    """The verdict on an attempt that its supervisor could only log; empty where there is none."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        for line in batch_log.read_text(errors="replace").splitlines():
            _, found, rest = line.partition(f"{UNWRITTEN}{attempt} (")
            if found:
                return dict(json.loads(rest.partition("): ")[2]))
    return {}
