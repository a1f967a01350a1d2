"""Small runs: the user's spec -> [drill_spec] -> specs of seconds, one for each fault of a drill.  Pure.

Nodes, tasks, partition, environment, setup, model and batch stay; length, data set and saves are the drill's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.spec import DatasetSpec, FaultSpec, JobSpec, TrainSpec

EPOCHS = 3
STEPS_PER_EPOCH = 8  # the last of each epoch is short
SAVE_EVERY_STEPS = 3
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH
FAULT_STEP = 12  # in the second epoch; asked then, the ranks leave after step 14, where no save is due
KILL_STEP = 14  # two steps after a save
SAVE_STEP = 15  # the first save after FAULT_STEP

TIME_LIMIT = "10"  # minutes
SHORT_TIME_LIMIT = "2"  # the shortest that leaves room for the warning
SIGNAL_LEAD_S = 29
PAUSED_STEP_TIMEOUT_S = 900.0


def small_spec(
    spec: JobSpec,
    faults: Sequence[Mapping[str, Any]],
    *,
    maybe_step_timeout_s: float | None = None,
    time_limit: str = TIME_LIMIT,
) -> JobSpec:
    """The spec's job, made small, with faults.

    maybe_step_timeout_s: how long a step may last before it counts as hung; None leaves what the spec says.
    """
    is_on_slurm = spec.cluster == "slurm"
    return spec.model_copy(
        update={
            "name": f"{spec.name}-drill",
            "time_limit": time_limit if is_on_slurm else None,
            "signal_lead_s": SIGNAL_LEAD_S,
            "mail_user": None,
            "mail_type": None,
            "train": small_train(spec, maybe_step_timeout_s),
            "dataset": small_dataset(spec),
            "checkpoint": spec.checkpoint.model_copy(
                update={
                    "every_steps": SAVE_EVERY_STEPS,
                    "every_minutes": None,
                    "keep_last": max(2, spec.checkpoint.keep_last),
                }
            ),
            "faults": tuple(FaultSpec(**fault) for fault in faults),
        }
    )


def small_train(spec: JobSpec, maybe_step_timeout_s: float | None) -> TrainSpec:
    """A few steps of the same model and global batch, each of them logged."""
    changes: dict[str, Any] = {
        "epochs": EPOCHS,
        "max_steps": None,
        "global_batch_size": spec.train.global_batch(spec.world_size),
        "batch_size_per_rank": None,
        "warmup_epochs": min(1.0, spec.train.warmup_epochs),
        "eval_every_epochs": 1,
        "log_every_steps": 1,
    }
    if maybe_step_timeout_s is not None and "step_timeout_s" in TrainSpec.model_fields:
        changes["step_timeout_s"] = maybe_step_timeout_s
    return spec.train.model_copy(update=changes)


def small_dataset(spec: JobSpec) -> DatasetSpec:
    """Images that are made up, so that nothing is downloaded and no epoch takes long."""
    batch = spec.train.global_batch(spec.world_size)
    num_train = (STEPS_PER_EPOCH - 1) * batch + max(1, batch // 2)
    return DatasetSpec(
        kind="synthetic", root=spec.dataset.root, augment=spec.dataset.augment, num_train=num_train, num_test=128
    )
