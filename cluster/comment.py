"""Comment: a running job -> [comment] -> where its run is, for everybody's `squeue -o %k`.  Standard library only.

A thread of the supervisor writes it, so that a slow Slurm holds nothing up.  A comment of the user's own stays.
Source: scontrol(1), "Comment"; a job's owner may change it, Slurm 22.05 and 24.11.
"""

import logging
import random
import threading
import time
from dataclasses import dataclass, field

from cluster import orders, slurm
from cluster.job import Job
from cluster.plan import LaunchPlan
from cluster.progress import progress_text
from cluster.runs import RunFolder, maybe_object

log = logging.getLogger("run")

# Between two updates without news, 20 % more or less, so that the jobs of a sweep do not write in step: each update
# takes a write lock of slurmctld's, and goes to its disk.
EVERY_S = 600.0
SPREAD = 0.2
LOOK_S = 10.0  # between two looks at the heartbeat, which costs Slurm nothing
STARTING = "starting"
ANSWER_S = 20.0


@dataclass
class Comment:
    """The comment of one job; begin() starts a thread, which ends with the process."""

    run: RunFolder
    job: Job
    is_wanted: bool  # on Slurm, and no comment in the spec
    _text: str = ""  # what the supervisor says; empty while the heartbeat tells more
    _last: str = ""
    _stage: str = ""  # what was told last, without its numbers
    _due_s: float = 0.0  # time.monotonic() of the next update without news
    _is_logged: bool = False  # the first failure
    _news: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Start to write."""
        if self.is_wanted:
            threading.Thread(target=self._keep_writing, daemon=True).start()

    def tell(self, text: str) -> None:
        """Say something soon.  text: empty to go by the heartbeat."""
        self._text = text
        self._news.set()

    def _keep_writing(self) -> None:
        if self._is_users():
            return
        while True:
            if self.is_due(time.monotonic()):
                self.write()
            self._news.wait(LOOK_S)
            self._news.clear()

    def is_due(self, now_s: float) -> bool:
        """Whether there is news, or the last update is old.

        Saving and evaluating are part of training here: they come and go.
        """
        stage = self._text or (STARTING if self._by_heartbeat().startswith(STARTING) else "training")
        if stage == self._stage and now_s < self._due_s:
            return False
        self._stage, self._due_s = stage, now_s + EVERY_S * random.uniform(1 - SPREAD, 1 + SPREAD)
        return True

    def _is_users(self) -> bool:
        """Whether the job has a comment that no supervisor of this run has written, as after `sbatch --comment`."""
        try:
            found = slurm.run(["squeue", "--noheader", f"--jobs={self.job.job_id}", "--format=%k"], self.job.environ)
        except slurm.SlurmError:
            return False
        return found.strip() not in ("", "(null)") and self.run.run_id not in found

    def write(self) -> None:
        """Write what there is to say, if it is new; a Slurm that refuses or is slow costs this one update."""
        text = f"{self._text or self._by_heartbeat()} [{self.run.run_id}]"
        if text == self._last:
            return
        try:
            orders.update(self.job.own, f"Comment={text}", self.job.environ, timeout_s=ANSWER_S)
            self._last = text
        except slurm.SlurmError as error:
            if not self._is_logged:
                log.info("the job's comment does not say where the run is: %s", error)
            self._is_logged = True

    def _by_heartbeat(self) -> str:
        beat = maybe_object(self.run.heartbeat)
        is_current = beat.get("attempt") == self.run.latest_attempt() and "total_steps" in beat
        return progress_text(beat) if is_current else STARTING


def find_comment(run: RunFolder, plan: LaunchPlan, job: Job) -> Comment:
    """The comment of the job that this process runs in."""
    return Comment(run, job, is_wanted=job.is_on_slurm and "comment" not in plan.sbatch)
