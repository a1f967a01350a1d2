"""Early end: a run none of whose ranks was ever started -> [early_end] -> what its job left about that.

Standard library only.
"""

import re

from cluster.job_end import STEPD
from cluster.runs import RunFolder, read_lines

HEAD = re.compile(r"^\S+Z super (?P<level>\w) (?P<text>.*)")  # of the supervisor's lines


def early_end(run: RunFolder) -> str:
    """One line about the newest job: a line of setup that failed, an error of the supervisor; empty without a log."""
    failed = [event for event in read_lines(run.events) if event.get("event") == "setup_failed"]
    if failed:
        said = failed[-1]
        return f"setup: line {said.get('number')} ({said.get('line')}) ended with exit code {said.get('exit_code')}"
    logs = sorted(run.logs.glob("batch_*.log"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
    spoken = [line for line in lines if line.strip()]
    for is_wanted in (lambda line: line.startswith("setup: "), is_error, bool):
        if found := [line for line in spoken if is_wanted(line)]:
            return bare(found[-1])
    return ""


def is_error(line: str) -> bool:
    """Whether this is an error of the supervisor, or of Slurm."""
    head = HEAD.match(line)
    return head["level"] in "EC" if head else STEPD.match(line) is not None


def bare(line: str) -> str:
    """A line without the supervisor's head."""
    head = HEAD.match(line)
    return head["text"] if head else line
