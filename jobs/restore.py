"""Restore: checkpoint -> [restore] -> model, optimizer and position on every rank.

Rank 0 alone reads the checkpoint; the rest travels by broadcast, so the cost on shared storage does not grow with the
number of ranks.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cluster.runs import FormatError, RunError
from jobs.checkpoint import Loaded, load_newest, remove_leftovers
from jobs.control import Control
from jobs.metrics import Recorder
from jobs.state import TrainState
from jobs.step import Length

log = logging.getLogger("run")


def restore(
    model: nn.Module,
    optimizer: torch.optim.SGD,
    control: Control,
    recorder: Recorder,
    *,
    length: Length,
    environment: Mapping[str, Any],
) -> tuple[TrainState, Length]:
    """Put rank 0's newest good checkpoint into model and optimizer; returns position and length on every rank.

    length: of a new run; one that goes on keeps the number of its micro-batches.

    The model's weights reach the other ranks by DDP's constructor, which broadcasts rank 0's.

    Raises RunError: the checkpoint was made with another global batch, so its position has no meaning here, or by
    another release.
    """
    told: dict[str, Any] = {}
    if recorder.writes:
        told = read_position(model, optimizer, recorder, length, environment)
    told = dict(control.broadcast_object(told))
    if "error" in told:
        raise RunError(told["error"])
    state = TrainState(**told["state"])
    if state.step > 0:
        share_momentum(optimizer, control)
    return state, replace(length, micro_batches=told["micro_batches"])


def read_position(
    model: nn.Module,
    optimizer: torch.optim.SGD,
    recorder: Recorder,
    length: Length,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Rank 0's part: load, cut metrics.jsonl back to the checkpoint, say what was found.

    Raises SupersededError: a later attempt owns the run; nothing of it was touched.
    """
    recorder.run.check_owner(recorder.attempt)
    try:
        loaded = load_newest(recorder.run, recorder.attempt)
    except FormatError as error:
        return {"error": str(error)}
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
            }
        model.load_state_dict(loaded.maybe_state["model"])
        optimizer.load_state_dict(loaded.maybe_state["optimizer"])
        state = TrainState(**loaded.maybe_state["state"])
    elif loaded.quarantined:
        log.error("no good checkpoint is left: the run starts again from step 0")
    if recorder.attempt > 1:
        tell_resumption(recorder, state, loaded, environment)
    recorder.cut_metrics(state.metrics_bytes)
    return {"state": state.as_dict(), "micro_batches": micro_batches}


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


def share_momentum(optimizer: torch.optim.SGD, control: Control) -> None:
    """Give every rank rank 0's momentum buffers."""
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            control.broadcast_tensor(state["momentum_buffer"])
