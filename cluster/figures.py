"""Figures: a run as it was seen -> [figures] -> the numbers that status shows.  Standard library only."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.facts import Facts, beat_age_s
from cluster.run_state import LIVE, RunState
from cluster.runs import RunFolder, read_lines, seconds_between, utc_now
from cluster.view import View


def figures(view: View) -> dict[str, Any]:
    """Everything about one run; None where it is not known (yet)."""
    facts, state = view.facts, view.state
    job = state.maybe_job
    return {
        "run_dir": str(facts.run.path),
        "run_id": facts.run.run_id,
        "name": facts.run.path.parent.name,
        "job_id": state.job_id or None,
        "state": state.word,
        "because": state.because,
        "source": state.source,
        "slurm_state": job.state if job else state.ended_as or None,
        "slurm_reason": job.reason if job else None,
        "start": job.maybe_start if job else None,
        "never_starts": state.never_starts,
        "time_left_s": job.time_left_s if job and job.kind != "pending" else None,
        "nodes": job.nodes if job and job.nodes else None,
        "excluded": job.excluded if job and job.excluded else None,
        "successors": list(state.waiting),
        "attempt": facts.attempt,
        **(of_summary(facts.summary) if facts.summary else of_progress(facts, state)),
    }


def of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a finished run."""
    taken = {
        "step": "steps",
        "total_steps": "steps",
        "epoch": "epochs",
        "epochs": "epochs",
        "images_per_s": "images_per_s",
        "loss": "train_loss",
        "accuracy": "test_accuracy",
        "goodput": "goodput",
    }
    unknown = ("eta_s", "checkpoint_step", "checkpoint_age_s", "heartbeat_age_s")
    return {**{key: summary.get(name) for key, name in taken.items()}, **dict.fromkeys(unknown)}


def of_progress(facts: Facts, state: RunState) -> dict[str, Any]:
    """The figures of a run that is not finished, by its last heartbeat and, while it is live, its metrics."""
    is_training = state.word in ("training", "saving")
    lines = list(read_lines(facts.run.metrics)) if facts.beat and state.word in LIVE else []
    beat = with_last_line(facts.beat, lines)
    tested = [line["test_accuracy"] for line in lines if "test_accuracy" in line]
    epoch, epochs = epoch_of(beat)
    saved_s = facts.checkpoint_s
    return {
        "step": beat.get("step"),
        "total_steps": beat.get("total_steps"),
        "epoch": epoch,
        "epochs": epochs,
        "eta_s": maybe_eta_s(beat) if is_training else None,
        "images_per_s": beat.get("images_per_s") if is_training else None,
        "loss": beat.get("loss"),
        "accuracy": beat.get("accuracy", tested[-1] if tested else None),
        "checkpoint_step": facts.checkpoint_step,
        "checkpoint_age_s": None if saved_s is None else round(max(0.0, time.time() - saved_s), 1),
        "heartbeat_age_s": round(beat_age_s(facts), 1) if beat else None,
        "goodput": maybe_goodput(facts, lines, is_running=is_training),
    }


def with_last_line(beat: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A heartbeat brought up to the last logged step: it may be some seconds older."""
    if not lines or lines[-1]["step"] < beat.get("step", 0):
        return beat
    return {**beat, **{key: lines[-1][key] for key in ("step", "loss", "images_per_s") if key in lines[-1]}}


def epoch_of(beat: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The epoch of a heartbeat, counted from 1, and the number of epochs; None before they are known."""
    step, total, per_epoch = beat.get("step", 0), beat.get("total_steps"), beat.get("steps_per_epoch")
    if not total or not per_epoch:
        return None, None
    return min(step, total - 1) // per_epoch + 1, -(-total // per_epoch)


def maybe_eta_s(beat: Mapping[str, Any]) -> int | None:
    """Seconds until the last step at the speed of now; None before there is one."""
    if not beat.get("images_per_s") or not beat.get("total_steps"):  # 0.0 where a step takes minutes
        return None
    return int((beat["total_steps"] - beat.get("step", 0)) * beat["global_batch"] / beat["images_per_s"])


def maybe_goodput(facts: Facts, lines: Sequence[Mapping[str, Any]], *, is_running: bool) -> float | None:
    """Seconds in logged steps over seconds of held allocations, so far; summary.json has the exact figure.

    lines: of metrics.jsonl.
    """
    batch = facts.beat.get("global_batch")
    if not batch or not lines:
        return None
    steps = [0, *(line["step"] for line in lines)]
    in_steps = sum(
        (after - before) * batch / line["images_per_s"]
        for before, after, line in zip(steps, steps[1:], lines, strict=False)
        if line.get("images_per_s")
    )
    held = held_s(facts.run, facts.attempt, utc_now() if is_running else None)
    return round(min(1.0, in_steps / held), 4) if held else None


def held_s(run: RunFolder, last_attempt: int, maybe_now: str | None) -> float:
    """Seconds for which attempts held allocations: from each start to its verdict, or to its last heartbeat.

    maybe_now: the end of the last attempt, if that runs still.
    """
    events = [event for event in read_lines(run.events) if event.get("event") in ("attempt_started", "resumed")]
    beats = {event["attempt"] - 1: event["last_beat"] for event in events if event["event"] == "resumed"}
    starts = {event["attempt"]: event["time"] for event in events if event["event"] == "attempt_started"}
    held = 0.0
    for attempt, start in starts.items():
        end = maybe_now if attempt == last_attempt else None
        end = end or run.read_json(run.verdict(attempt)).get("time") or beats.get(attempt) or start
        held += max(0.0, seconds_between(start, end))
    return held
