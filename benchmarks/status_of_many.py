"""How long `cluster.status --all` takes for many runs, against an interpreter that starts and ends.

    python -m benchmarks.status_of_many [--runs 500] [--repeats 9] [--folder DIR]

The runs are made up: half are finished, 40 % have failed, the others wait or train, and a squeue that answers at once
knows those.  Medians; --folder puts them on the storage to be measured.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.run_folders import answer_with, environment, make_run


def main() -> None:
    """Make the runs, measure and print one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status_of_many", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the runs lie; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        environ = {**os.environ, **prepare(Path(name), args.runs)}
        status = median_s([sys.executable, "-m", "cluster.status", "--all"], environ, args.repeats)
        alone = median_s([sys.executable, "-c", "pass"], environ, args.repeats)
    print(f"{args.runs} runs: status {status * 1e3:.0f} ms, python alone {alone * 1e3:.0f} ms")


def prepare(folder: Path, num_runs: int) -> Mapping[str, str]:
    """Make the runs; returns the variables under which they are found."""
    environ = environment(folder)
    lines = []
    for number in range(num_runs):
        kind = ("finished", "failed")[number % 2] if number % 10 else ("pending", "training")[number // 10 % 2]
        run = make_run(folder, environ, number, kind)
        if kind in ("pending", "training"):
            state = {"pending": "PENDING", "training": "RUNNING"}[kind]
            lines.append(f"{number}|{state}|N/A|1:00|||Priority|{run.path}/job.sh\n")
    answer_with(folder, "".join(lines))
    return environ


def median_s(command: Sequence[str], environ: Mapping[str, str], repeats: int) -> float:
    """Seconds of a command, the first time left out."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run(command, env=dict(environ), stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
