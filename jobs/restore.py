"""Restore: checkpoint -> [restore] -> position and learner on every rank.

Rank 0 alone reads the checkpoint; the rest travels by broadcast, so the cost on shared storage does not grow with the
number of ranks.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.runs import FormatError, RunError
from jobs.checkpoint import Loaded, load_newest, remove_leftovers
from jobs.control import Control
from jobs.learner import Learner
from jobs.metrics import Recorder
from jobs.numerics import Precision
from jobs.state import TrainState
from jobs.step import Length

log = logging.getLogger("run")


@dataclass(frozen=True, slots=True)
class Position:
    """From where a run goes on, and what it keeps from its first start; equal on every rank but for the content."""

    state: TrainState
    length: Length
    precision: Precision
    maybe_content: dict[str, Any] | None  # the checkpoint, on rank 0; None where there is nothing to go on from


def find_position(
    control: Control,
    recorder: Recorder,
    *,
    length: Length,
    precision: Precision,
    keeps_precision: bool,
    environment: Mapping[str, Any],
) -> Position:
    """Find the newest good checkpoint; load() puts it into a learner.

    length, precision: of a new run; one that goes on keeps the number of its micro-batches.
    keeps_precision: whether it keeps its precision, too.
    environment: what bits depend on, but for the precision.

    Raises RunError: the checkpoint was made with another global batch, so its position has no meaning here, or by
    another release.
    """
    told: dict[str, Any] = {}
    maybe_content = None
    if recorder.writes:
        told, maybe_content = read_position(recorder, length, precision, environment, keeps_precision=keeps_precision)
    told = dict(control.broadcast_object(told))
    if "error" in told:
        raise RunError(told["error"])
    length = replace(length, micro_batches=told["micro_batches"])
    return Position(TrainState(**told["state"]), length, told["precision"], maybe_content)


def load(learner: Learner, position: Position, control: Control) -> None:
    """Make every rank's learner what rank 0 has read.

    The model's weights reach the other ranks by DDP's constructor, which broadcasts rank 0's.
    """
    if position.maybe_content is not None:
        learner.load(position.maybe_content)
    if position.state.step > 0:
        for tensor in learner.tensors_behind_weights():
            control.broadcast_tensor(tensor)


def read_position(
    recorder: Recorder,
    length: Length,
    precision: Precision,
    environment: Mapping[str, Any],
    *,
    keeps_precision: bool,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Rank 0's part: load, cut metrics.jsonl back to the checkpoint, say what was found.

    Raises SupersededError: a later attempt owns the run; nothing of it was touched.
    """
    recorder.run.check_owner(recorder.attempt, afresh=True)
    try:
        loaded = load_newest(recorder.run, recorder.attempt)
    except FormatError as error:
        return {"error": str(error)}, None
    for name, reason in loaded.quarantined:
        recorder.event("checkpoint_quarantined", name=name, reason=reason)
    remove_leftovers(recorder.run.checkpoints)
    state, micro_batches = TrainState(), length.micro_batches
    if loaded.maybe_state is not None:
        schedule = loaded.maybe_state["schedule"]
        micro_batches = schedule["micro_batches"]
        if (kept := schedule["global_batch"]) != length.global_batch:
            return {
                "error": f"the run was made with a global batch of {kept}, and this start has {length.global_batch}: "
                "start it with as many ranks as before, or use train.global_batch_size from the beginning"
            }, None
        if keeps_precision:
            precision = schedule.get("precision", precision)
        state = TrainState(**loaded.maybe_state["state"])
    elif loaded.quarantined:
        log.error("no good checkpoint is left: the run starts again from step 0")
    if recorder.attempt > 1:
        tell_resumption(recorder, state, loaded, {**environment, "precision": precision})
    recorder.cut_metrics(state.metrics_bytes)
    told = {"state": state.as_dict(), "micro_batches": micro_batches, "precision": precision}
    return told, loaded.maybe_state


def tell_resumption(recorder: Recorder, state: TrainState, loaded: Loaded, environment: Mapping[str, Any]) -> None:
    """Say from where the run goes on, what is lost, and what differs from the attempt that saved."""
    lost = max(0, recorder.last_known_step() - state.step)
    beat = recorder.run.read_json(recorder.run.heartbeat)
    recorder.event("resumed", from_step=state.step, lost_steps=lost, last_beat=beat.get("time"))
    log.info("resumed at step %d; %d steps were lost", state.step, lost)
    if loaded.maybe_manifest is None:
        return
    before = loaded.maybe_manifest.environment
    changes = {key: [before.get(key), now] for key, now in environment.items() if before.get(key) != now}
    if changes:
        recorder.event("environment_changed", **changes)
        log.warning("the run is no longer bit-exact: %s", changes)
