"""Limits: which of a login node's are lifted, and which stay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROGRAM = """
import json, resource
from cluster.limits import lift_limits
from cluster.runs import make_logger
make_logger("super", {})
lift_limits()
print(json.dumps([resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)]))
"""


def lifted(ulimit: str) -> tuple[list[list[int]], list[str]]:
    """The limits of processor time and open files below a shell's ulimit, and what was said."""
    script = f"{ulimit}; exec {sys.executable} -c '{PROGRAM}'"
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), [line.partition(" ")[2] for line in done.stderr.splitlines()]


def test_soft_limit_of_processor_time_is_lifted_and_that_of_files_stays() -> None:
    (cpu, files), said = lifted("ulimit -S -t 600; ulimit -S -n 100")
    assert (cpu, files[0]) == ([-1, -1], 100)
    where = "as where the job was submitted: lifted for the ranks"
    assert said == [f"super I ulimit -t: 600 processor seconds of a process, {where}"]


def test_hard_limit_stays_and_is_told() -> None:
    (cpu, _), said = lifted("ulimit -t 600")
    assert cpu == [600, 600]
    assert said == ["super W ulimit -t: at most 600 processor seconds of a process on this node, for the ranks too"]


def test_nothing_is_said_without_limits() -> None:
    if lifted(":")[0][0] != [-1, -1]:
        pytest.skip("this machine limits processor time itself")
    assert lifted(":")[1] == []
