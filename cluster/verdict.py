"""Verdict: the end of an attempt -> [verdict] -> how it ended and why.  Standard library only; pure.

What a rank recorded, what srun and Slurm said and how processes ended are put in order, first cause before consequence:
when one rank dies the others lose their connections, and those errors say nothing.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.job_end import STEPD, JobRecord, maybe_job_cause
from cluster.launch import RanksEnd
from cluster.runs import EXIT_FAILED, EXIT_FINISHED, EXIT_HANG, EXIT_STOPPED, EXIT_USAGE, UsageError

# "srun: error: n2: task 1: Exited with exit code 1", "srun: error: n3: tasks 4-5: Killed"; Slurm 22.05, 24.11 and 26.05
TASK_LINE = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$")
# "srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure"; "task 3 launch failed:
# Job prolog failed"; "Unable to create step for job 1: Job credential expired"; step_launch.c, launch.c, 22.05 to 25.11
LAUNCH_LINE = re.compile(
    r"^srun: error: (?:Task launch for \S+ failed on node (?P<node>\S+)|task (?P<rank>\d+) launch failed"
    r"|Unable to (?:create step|confirm allocation) for job \d+|Application launch failed): (?P<why>.+)$"
)
# Why Slurm refuses a step that the job's own shape rules out; slurm_errno.c.
MISFITS = (
    "More processors requested than permitted", "Requested node configuration is not available",
    "Memory required by task is not available", "Requested more tasks than available processors",
    "Insufficient GRES available", "Invalid generic resource", "Invalid Trackable RESource", "specification invalid",
    "Unable to satisfy cpu bind request", "Unable to layout tasks", "Container runtime not configured",
)  # fmt: skip
NODE_LINE = re.compile(r"^srun: error: Node failure on ([\w.-]+)$")  # of one node; of several it has brackets
EXITED = re.compile(r"^Exited with exit code (\d+)$")
ALARM = ("Alarm clock", "SIGALRM")  # what a rank's own watch sets on it, for the case that its interpreter is held
OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_ ]kill|exceeded.*memory limit", re.IGNORECASE)

WARNING_SLACK_S = 90  # Slurm may send --signal up to 60 s early, and checks every 30 s


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one attempt ended and why."""

    outcome: str  # finished, stopped (all is saved) or failed
    cause: str  # a key of requeue.POLICY
    reason: str  # one line for the user
    exit_code: int  # of the job, if it ends here
    rank: int | None = None  # the rank that failed first, where one is known
    node: str | None = None  # the node at fault, where one is named
    nodes: tuple[str, ...] = ()  # where several are: all of them


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an attempt left behind."""

    is_finished: bool  # summary.json is there
    maybe_stop: Mapping[str, Any] | None  # the attempt's event `stopped`
    failures: Sequence[Mapping[str, Any]]  # records of failing ranks
    end: RanksEnd
    maybe_job: JobRecord | None = None  # by scontrol, when the ranks had ended; None where Slurm did not answer
    job_lines: Sequence[str] = ()  # of the job's standard error, since the attempt began; Slurm only
    time_left_s: float | None = None  # of the allocation, when the attempt ended
    lead_s: float = 0.0  # seconds before its end for which a warning was asked
    is_on_slurm: bool = False
    asked_by_user: bool = False  # cluster.stop, or Ctrl-C
    has_trained: bool = False  # an earlier attempt with the same keys, setup and interpreter has done a step


def judge(evidence: Evidence) -> Verdict:
    """Name the first cause of an attempt's end."""
    if evidence.is_finished:
        return Verdict("finished", "finished", "all steps done", EXIT_FINISHED)
    cause = maybe_job_cause(evidence.maybe_job, evidence.job_lines)
    if evidence.maybe_stop is not None:  # all is saved: a rank that is killed while it leaves takes nothing away
        stop = evidence.maybe_stop
        reason = f"{cause or stop_cause(evidence)} ({stop['signal']}), saved at step {stop['step']}"
        return Verdict("stopped", cause or stop_cause(evidence), reason, EXIT_STOPPED, node=maybe_dead_node(evidence))
    if cause is not None:
        reason = f"{cause}: the ranks were ended before they had saved"
        return Verdict("failed", cause, reason, EXIT_FAILED, node=maybe_dead_node(evidence))
    verdict = judge_ranks(evidence)
    return laid_on_node(verdict) if evidence.has_trained and not is_told_by_several_nodes(evidence) else verdict


def judge_ranks(evidence: Evidence) -> Verdict:
    """Name the first cause of an end that Slurm has not brought about."""
    if evidence.end.given_up:
        return Verdict("failed", "launch", evidence.end.given_up, EXIT_FAILED)
    unlaunched = maybe_unlaunched(evidence.end.launcher_lines)
    if unlaunched is not None:
        return unlaunched
    killed = maybe_first_killed(evidence.failures, evidence.end)
    if killed is not None:
        return told_by_slurmstepd(killed, evidence.job_lines)
    unstartable = maybe_unstartable(evidence.end)
    if unstartable is not None and all(record["kind"] == "connection" for record in evidence.failures):
        return unstartable
    record = maybe_first_record(evidence.failures, evidence.end)
    if record is not None and not (record["kind"] == "connection" and evidence.end.launcher_code < 0):
        return from_record(record)
    if evidence.end.launcher_code < 0:
        how = signal.Signals(-evidence.end.launcher_code).name
        return Verdict("failed", "srun killed", f"srun was ended by {how}, and with it all ranks", EXIT_FAILED)
    if left_by_watchdog(evidence.end):
        return Verdict("failed", "hang", "the watchdog ended the ranks, and could write no record", EXIT_HANG)
    return Verdict("failed", "unknown", unexplained(evidence.end), EXIT_FAILED)


def judge_start(error: Exception, node: str, *, has_trained: bool) -> Verdict:
    """Why the supervisor on the job's first node could not even start the ranks.

    error: a UsageError, or Slurm's refusal.  node: the first.
    """
    if not isinstance(error, UsageError):
        return Verdict("failed", "launch", f"Slurm could not start the ranks: {error}", EXIT_FAILED)
    verdict = Verdict("failed", "usage", str(error), EXIT_USAGE, node=node)
    return laid_on_node(verdict) if has_trained else verdict


def laid_on_node(verdict: Verdict) -> Verdict:
    """What the user could have mended is a node's fault where the run has trained with the same keys elsewhere."""
    return replace(verdict, cause="unfit node", exit_code=EXIT_FAILED) if verdict.cause == "usage" else verdict


def is_told_by_several_nodes(evidence: Evidence) -> bool:
    """Whether ranks of more than one node say that the user can mend something: then it is what they share."""
    return len({record["host"] for record in evidence.failures if record["kind"] == "usage"}) > 1


def maybe_unlaunched(lines: Sequence[str]) -> Verdict | None:
    """Slurm could not start the ranks, where srun says so before it reports the end of a rank.

    srun then ends the ranks that have begun on the other nodes.
    """
    ended = next((place for place, line in enumerate(lines) if TASK_LINE.match(line)), len(lines))
    found = [match for match in map(LAUNCH_LINE.match, lines[:ended]) if match]
    if not found:
        return None
    why = found[0]["why"]
    if any(word in why for word in MISFITS):
        return Verdict("failed", "usage", f"Slurm refused to start the ranks: {why}", EXIT_USAGE)
    nodes = tuple(dict.fromkeys(match["node"] for match in found if match["node"]))
    where = f" on {', '.join(nodes)}" if nodes else ""
    reason = f"Slurm could not start the ranks{where}: {why}"
    rank = None if found[0]["rank"] is None else int(found[0]["rank"])
    return Verdict("failed", "launch", reason, EXIT_FAILED, rank, next(iter(nodes), None), nodes)


def maybe_dead_node(evidence: Evidence) -> str | None:
    """The node whose failure srun reports first."""
    found = (NODE_LINE.match(line) for line in evidence.end.launcher_lines)
    return next((match[1] for match in found if match), None)


def stop_cause(evidence: Evidence) -> str:
    """Why ranks were asked to stop when Slurm has not said: it says nothing while a grace period lasts."""
    if not evidence.is_on_slurm or evidence.asked_by_user:
        return "stopped"
    left = evidence.time_left_s
    warned = evidence.maybe_stop is not None and evidence.maybe_stop["signal"] == "SIGUSR2"
    return "time limit" if warned and left is not None and left <= evidence.lead_s + WARNING_SLACK_S else "preempted"


def maybe_first_killed(failures: Sequence[Mapping[str, Any]], end: RanksEnd) -> Verdict | None:
    """The rank that a signal ended, when that came before any failure of the program.

    srun's first report says so by itself.  Otherwise a rank without a record was the first when the records tell of
    nothing but lost connections: srun and the supervisor end those that have noticed nothing only later.
    """
    reported = task_lines(end.launcher_lines)
    hung = {record["rank"] for record in failures if record["kind"] == "hang"}  # ended for that
    if reported and not EXITED.match(reported[0][1]) and reported[0][0] not in hung:
        return killed_verdict(*reported[0])
    if any(record["kind"] != "connection" for record in failures) or (reported and not failures):
        return None
    recorded = {record["rank"] for record in failures}
    signalled = [(number, how) for number, how in reported if not EXITED.match(how) and how != "Terminated"]
    signalled += [
        (number, signal.Signals(-code).name)
        for number, code in end.exit_codes.items()
        if code < 0 and -code != signal.SIGTERM and number not in end.ended
    ]
    return next((killed_verdict(number, how) for number, how in signalled if number not in recorded), None)


def killed_verdict(number: int, how: str) -> Verdict:
    """A rank ended by a signal; how: in srun's words, such as Killed or Segmentation fault, or the signal's name."""
    if how in ALARM:
        reason = f"rank {number} did not run its own watch past its deadline; its stacks are in the attempt's log"
        return Verdict("failed", "hang", reason, EXIT_HANG, number)
    cause = "out of memory" if OUT_OF_MEMORY.search(how) else "killed"
    return Verdict("failed", cause, f"rank {number} was ended by a signal: {how}", EXIT_FAILED, number)


def told_by_slurmstepd(killed: Verdict, job_lines: Sequence[str]) -> Verdict:
    """What becomes of a killed rank when slurmstepd says that the job's memory was used up.

    srun says only `Killed` then: JobAcctGatherParams=OverMemoryKill, on 22.05 "slurmstepd: error: Exceeded job memory
    limit".
    """
    words = [line[head.end() :] for line in job_lines if (head := STEPD.match(line)) and OUT_OF_MEMORY.search(line)]
    if killed.cause != "killed" or not words:
        return killed
    return replace(killed, cause="out of memory", reason=f"{killed.reason}; slurmstepd: {words[0]}")


def task_lines(lines: Sequence[str]) -> list[tuple[int, str]]:
    """(first rank named, what happened) of each line in which srun reports the end of tasks, in its order."""
    found = (TASK_LINE.match(line) for line in lines)
    return [(first_task(match), match["how"]) for match in found if match]


def first_task(line: re.Match[str]) -> int:
    """The first rank that a TASK_LINE names."""
    return int(re.split("[,-]", line["tasks"])[0])


def maybe_first_record(failures: Sequence[Mapping[str, Any]], end: RanksEnd) -> Mapping[str, Any] | None:
    """The record that explains the others: no connection error while there is another, then the earliest.

    srun's first report of an exit outranks the clocks of the nodes.
    """
    causes = [record for record in failures if record["kind"] != "connection"] or list(failures)
    reported = task_lines(end.launcher_lines)
    if reported:
        causes.sort(key=lambda record: (record.get("reporter", record["rank"]) != reported[0][0], record["time"]))
    else:
        causes.sort(key=lambda record: record["time"])
    return causes[0] if causes else None


def left_by_watchdog(end: RanksEnd) -> bool:
    """Whether a rank's exit code says so."""
    exits = [EXITED.match(how) for _, how in task_lines(end.launcher_lines)]
    return EXIT_HANG in end.exit_codes.values() or any(found and int(found[1]) == EXIT_HANG for found in exits)


def maybe_unstartable(end: RanksEnd) -> Verdict | None:
    """Why no rank could be started, where that is so: no such interpreter, or no such option of srun.

    `env` and a shell end with 126 or 127 when they cannot start what they were asked to.
    """
    for line in end.launcher_lines:
        if line.startswith("srun: unrecognized option"):
            reason = f"srun could not start the ranks: {line}; --container-* options need pyxis, a plugin of Slurm"
            return Verdict("failed", "usage", reason, EXIT_USAGE)
    reported = [match for match in map(TASK_LINE.match, end.launcher_lines) if match]
    exits = [
        (first_task(match), match["node"], int(found[1])) for match in reported if (found := EXITED.match(match["how"]))
    ]
    exits += [(number, "", code) for number, code in end.exit_codes.items()]
    for number, node, code in exits:
        if code in (126, 127):
            reason = (
                f"rank {number} could not be started (exit code {code}): its interpreter, or what enters its "
                "container, is not on its node; see the attempt's log"
            )
            return Verdict("failed", "usage", reason, EXIT_USAGE, number, node or None)
    return None


def from_record(record: Mapping[str, Any]) -> Verdict:
    """The verdict that a rank's record gives, of itself or of the rank that it could not reach."""
    who = "all ranks" if record["rank"] is None else f"rank {record['rank']} on {record['host']}"
    reason = f"{who}: {record['exception']}"
    node = record["host"].partition(".")[0] if record["kind"] == "usage" and record["rank"] is not None else None
    return Verdict("failed", record["kind"], reason, record["exit_code"], record["rank"], node)


def unexplained(end: RanksEnd) -> str:
    """The best line there is when no rank said why."""
    spoken = [line for line in end.launcher_lines if line.startswith("srun: error:")]
    if spoken:
        return f"the ranks ended without a word; {spoken[0]}"
    codes = ", ".join(f"rank {number}: {code}" for number, code in end.exit_codes.items() if code)
    return f"the ranks ended without a word; {codes or f'srun ended with {end.launcher_code}'}"
