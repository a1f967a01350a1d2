"""Deadlines: spec, steps so far -> [deadlines] -> how long a rank may stay where it is.  Pure.

Seconds here are those in which the watching thread ran: a job that was suspended and goes on has missed nothing.
"""

from dataclasses import dataclass
from typing import Literal

from cluster.spec import JobSpec

Phase = Literal["meeting", "preparing", "training", "evaluating", "saving", "finishing", "leaving"]

STEP_FACTOR = 10.0  # of the slowest step
STEP_FLOOR_S = 120.0  # a fabric that recovers from a flapping link, or a node under memory pressure, takes a minute
STEP_CEILING_S = 1800.0
CEILING_FACTOR = 3.0  # where steps are so slow that the ceiling would cut them off
EVALUATION_FACTOR = 3.0  # the first micro-batch of an evaluation picks kernels of its own


@dataclass
class Deadlines:
    """How long each phase may last without any progress.

    - meeting, and then preparing: `start_s` each.  Preparing ends with the first step of the attempt, so that cold file
      systems, checkpoints of gigabytes and the choice of kernels are part of it.
    - training, per step: `maybe_step_s`, or without it STEP_FACTOR times the slowest step of this attempt, at least
      STEP_FLOOR_S and at most STEP_CEILING_S, or CEILING_FACTOR times the slowest step where that is more.
    - evaluating, per micro-batch, and leaving: EVALUATION_FACTOR times that.
    - saving, and finishing, which writes the final model: `save_s`.
    """

    start_s: float = 600.0
    maybe_step_s: float | None = None
    save_s: float = 1800.0
    slowest_step_s: float = 0.0  # the first step of an attempt does not count
    has_stepped: bool = False

    @classmethod
    def of(cls, spec: JobSpec) -> "Deadlines":
        """As the spec asks for."""
        return cls(spec.train.start_timeout_s, spec.train.step_timeout_s, spec.checkpoint.save_timeout_s)

    def learn(self, seconds: float) -> None:
        """Take in how long a step took."""
        if self.has_stepped:
            self.slowest_step_s = max(self.slowest_step_s, seconds)
        self.has_stepped = True

    @property
    def step_s(self) -> float:
        """For one step after the first."""
        if self.maybe_step_s is not None:
            return self.maybe_step_s
        ceiling_s = max(STEP_CEILING_S, CEILING_FACTOR * self.slowest_step_s)
        return min(ceiling_s, max(STEP_FLOOR_S, STEP_FACTOR * self.slowest_step_s))

    def limit_s(self, phase: Phase) -> float:
        """Seconds that a rank may stay at one place of a phase."""
        if phase in ("meeting", "preparing") or (phase == "training" and not self.has_stepped):
            return self.start_s
        if phase == "training":
            return self.step_s
        return self.save_s if phase in ("saving", "finishing") else EVALUATION_FACTOR * self.step_s
