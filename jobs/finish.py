"""Finish: the last step -> [finish] -> model_final.pt and summary.json, the done marker.  Rank 0 alone."""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cluster.runs import RunFolder, seconds_between, utc_now, write_atomic, write_json
from jobs.digest import weights_sha256
from jobs.learner import exported_weights
from jobs.loop import Loop

log = logging.getLogger("run")


def finish(loop: Loop) -> None:
    """Publish the final weights, then the summary: whoever sees the summary finds the rest."""
    run = loop.recorder.run
    weights = exported_weights(loop.learner.state())
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    run.check_owner(loop.recorder.attempt, afresh=True)
    write_atomic(run.model_final, buffer.getvalue())
    summary = summarize(loop, weights_sha256(weights))
    run.check_owner(loop.recorder.attempt, afresh=True)
    loop.recorder.beat(phase="finished")
    write_json(run.summary, summary)
    log.info("finished: test accuracy %.4f; %s", summary["test_accuracy"], run.summary)
    loop.recorder.event("finished", step=loop.state.step, test_accuracy=summary["test_accuracy"])


def summarize(loop: Loop, weights_digest: str) -> dict[str, Any]:
    """The contents of summary.json but for its format_version."""
    run, state, spec = loop.recorder.run, loop.state, loop.spec
    events = run.read_events()
    now = utc_now()
    return {
        "run_id": run.run_id,
        "name": spec.name,
        "status": "finished",
        "steps": state.step,
        "epochs": state.epoch,
        "world_size": loop.env.world_size,
        "attempts": loop.recorder.attempt,
        "preemptions": num_preemptions(run, loop.recorder.attempt),
        "lost_steps": sum(event["lost_steps"] for event in events if event["event"] == "resumed"),
        "test_accuracy": state.test_accuracy,
        "test_loss": state.test_loss,
        "train_loss": state.train_loss,
        "images_per_s": round(state.images / state.step_seconds, 1),
        "weights_sha256": weights_digest,
        "samples_sha256": state.samples_sha256,
        "bit_exact": spec.train.deterministic and not is_broken(events),
        "goodput": round(state.step_seconds / held_seconds(run, events, now), 4),
        "wall_s": round(seconds_between(events[0]["time"], now), 3),
    }


def is_broken(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run is no longer what an undisturbed one would have been, bit for bit.

    An extension counts unless the submission that it was part of was refused, and the run given its old spec back.
    """
    is_extended = maybe_extended = False
    for event in events:
        is_other_code = event["event"] == "code_drift" and event["attempt"] > 1  # before the first nothing was trained
        if is_other_code or event["event"] == "environment_changed":
            return True
        if event["event"] == "extended":
            maybe_extended = True
        elif event["event"] == "submission_refused":
            maybe_extended = False
        elif event["event"] == "submitted":
            is_extended |= maybe_extended
    return is_extended or maybe_extended


def num_preemptions(run: RunFolder, attempts: int) -> int:
    """Attempts whose verdict is that the job was preempted."""
    verdicts = [run.read_json(run.verdict(number)) for number in range(1, attempts + 1)]
    return sum(verdict.get("cause") == "preempted" for verdict in verdicts)


def held_seconds(run: RunFolder, events: Sequence[Mapping[str, Any]], now: str) -> float:
    """Seconds for which the run held allocations: from each attempt's start to its verdict.

    An attempt that left no verdict counts to its last heartbeat, which its successor noted when it resumed; the
    last attempt counts to now.
    """
    beats = {event["attempt"] - 1: event["last_beat"] for event in events if event["event"] == "resumed"}
    starts = {event["attempt"]: event["time"] for event in events if event["event"] == "attempt_started"}
    held = 0.0
    for attempt, start in starts.items():
        verdict = run.read_json(run.verdict(attempt))
        end = now if attempt == max(starts) else verdict.get("time") or beats.get(attempt) or start
        held += max(0.0, seconds_between(start, end))
    return max(held, 1e-3)
