"""Start watch: an srun, the attempt's log -> [start_watch] -> whether any rank has begun, and when to give up waiting.

Every rank watches itself and the others from its first second.  Nobody watches before that: an srun whose step is not
created since another step has the CPUs, or whose ranks hang before their interpreter runs.  Standard library only.
Source: srun(1), --overlap; the ranks' log lines are those of runs.LineHandler.
"""

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster import slurm
from cluster.allocation import FIRST_RESERVED_STEP_ID

MARGIN_S = 60.0  # at most, for Slurm to start the ranks, beside the time that they have to meet
LOOK_S = 2.0
RANK_LINE = re.compile(rb"^\S+Z r\d{5,} ", re.MULTILINE)
LIMIT = re.compile(r"^ +start_timeout_s: ([\d.e+]+)$", re.MULTILINE)  # as spec.dump_spec writes it
DEFAULT_LIMIT_S = 600.0  # of a spec from before the key


@dataclass
class StartWatch:
    """The wait for the first line of a rank in the log of its attempt."""

    log_path: Path
    limit_s: float  # from now
    job_id: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    _begun_s: float = field(default_factory=time.monotonic)
    _looked_s: float = 0.0
    _has_begun: bool = False
    _offset: int = 0  # bytes of the log that were there before

    def __post_init__(self) -> None:
        """What an attempt of the same number has left is old."""
        with contextlib.suppress(OSError):
            self._offset = self.log_path.stat().st_size

    def is_overdue(self) -> bool:
        """Whether no rank has begun for longer than it may take; looks into the log now and then."""
        now = time.monotonic()
        if self._has_begun or now < self._looked_s + LOOK_S:
            return False
        self._looked_s = now
        self._has_begun = self._sees_a_rank()
        return not self._has_begun and now > self._begun_s + self.limit_s

    def why(self, launcher_lines: Sequence[str]) -> str:
        """One line about a start that is given up: srun's last words, and the steps that may be in its way."""
        words = f"; {launcher_lines[-1]}" if launcher_lines else ""
        steps = foreign_steps(self.job_id, self.environ)
        listed = (
            f"; steps of this job: {', '.join(steps)} (srun --overlap leaves the ranks their CPUs)" if steps else ""
        )
        return f"no rank has begun within {self.limit_s:g} s (see train.start_timeout_s){words}{listed}"

    def _sees_a_rank(self) -> bool:
        try:
            with self.log_path.open("rb") as file:
                file.seek(self._offset)
                return RANK_LINE.search(file.read()) is not None
        except OSError:  # not there yet
            return False


def start_limit_s(spec_text: str) -> float:
    """Seconds without a rank after which a start is given up.  spec_text: of spec.yaml, with every default."""
    found = LIMIT.search(spec_text)
    to_meet_s = float(found[1]) if found else DEFAULT_LIMIT_S
    return to_meet_s + min(to_meet_s, MARGIN_S)


def foreign_steps(job_id: str, environ: Mapping[str, str]) -> list[str]:
    """Steps of a job beside its batch step, `5.0 (bash)`; empty when Slurm does not say."""
    try:
        answer = slurm.run(["squeue", "--noheader", "--steps", f"--job={job_id}", "--format=%i %j"], environ)
    except slurm.SlurmError:
        return []
    steps = [line.split(maxsplit=1) for line in answer.splitlines()]
    return [f"{step[0]} ({step[1]})" for step in steps if len(step) == 2 and re.search(r"\.\d+$", step[0])]


def is_inside_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step, as in a shell by `srun --pty`, whose CPUs its own steps must share."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_RESERVED_STEP_ID
