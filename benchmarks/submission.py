"""How long `cluster.submit configs/4node.yaml` takes, against ten lines of submitit for the same allocation.

    python -m benchmarks.submission [--repeats 9] [--many 20] [--folder /dev/shm] [--partition low]

Both are whole processes, taken in turn; medians.  The data set is staged beforehand.  Then --many submissions one
after another: on an idle machine what they take beyond the processor's time is waiting.  Last, where the time goes.

Starts a Slurm on this machine, whose partition is down, or takes the one that SLURM_CONF names; every job is cancelled.
Run folders are made in memory unless --folder says where: ext4 does not use an inode again at once, and where many
files were removed in the last minutes it takes 0.3 ms and more for a new one in place of 0.015 ms.  The first line
says what it is.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.sandbox import down, up, without_slurm

LIMIT = 2.75
ROOT = Path(__file__).parents[1]
WIDTH = 46


@dataclass(frozen=True, slots=True)
class Taken:
    """What one process took, those that it started included."""

    wall_s: float
    cpu_s: float
    output: str


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submission", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--many", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where run folders are made")
    parser.add_argument("--partition", default="low")
    args = parser.parse_args()
    with a_slurm(args.partition) as slurm, tempfile.TemporaryDirectory(dir=args.folder) as name:
        environ = {**slurm, "XDG_STATE_HOME": f"{name}/state"}
        spec = ["configs/4node.yaml", f"run_root={name}/runs", "dataset.kind=synthetic", f"dataset.root={name}/data"]
        ours = ["-m", "cluster.submit", *spec, f"partition={args.partition}"]
        reference = ["-m", "benchmarks.reference.ten_lines", f"{name}/submitit", args.partition]
        print(f"a new file in {args.folder} takes {new_file_ms(Path(name)):.3f} ms")
        take(["-m", "jobs.stage", *spec], environ)
        tell_ratio(*in_turn(reference, ours, environ, args.repeats))
        tell_many([submit(ours, environ) for _ in range(args.many)])
        tell_parts(ours[2:], environ, args.repeats)


@contextlib.contextmanager
def a_slurm(partition: str) -> Iterator[dict[str, str]]:
    """Variables of processes that use Slurm.  What Python compiles is kept, as it is for users."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if "SLURM_CONF" in environ:
        yield environ
        return
    parent = Path(tempfile.mkdtemp(prefix="slurm-"))
    sandbox = up(parent / "s", environ=environ)
    try:
        environ = {**without_slurm(environ), **sandbox.variables()}
        # A job that starts would compute beside the next measurement.
        subprocess.run(["scontrol", "update", f"PartitionName={partition}", "State=DOWN"], env=environ, check=True)
        yield environ
    finally:
        down(sandbox.directory)
        shutil.rmtree(parent)


def new_file_ms(folder: Path, number: int = 300) -> float:
    """Milliseconds for an empty file."""
    (folder / "new").mkdir()
    began = time.perf_counter()
    for index in range(number):
        (folder / "new" / str(index)).touch()
    return (time.perf_counter() - began) / number * 1e3


def take(words: Sequence[str], environ: Mapping[str, str]) -> Taken:
    """Run Python once."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=dict(environ), cwd=ROOT, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall_s, cpu_s, done.stdout)


def submit(words: Sequence[str], environ: Mapping[str, str]) -> Taken:
    """Submit once; the job is cancelled at once."""
    taken = take(words, environ)
    subprocess.run(["scancel", f"--user={os.getuid()}", "--name=4node"], env=dict(environ), check=True)
    return taken


def in_turn(
    reference: Sequence[str], ours: Sequence[str], environ: Mapping[str, str], repeats: int
) -> tuple[list[Taken], list[Taken]]:
    """Both commands in turn; the first of each, which compiles, is left out."""
    pairs = [(submit(reference, environ), submit(ours, environ)) for _ in range(repeats + 1)]
    return [pair[0] for pair in pairs[1:]], [pair[1] for pair in pairs[1:]]


def tell_ratio(reference: Sequence[Taken], ours: Sequence[Taken]) -> None:
    """Print both sides and the ratio."""
    for what, name in (("wall", "wall_s"), ("processor", "cpu_s")):
        medians_s = [statistics.median(getattr(taken, name) for taken in side) for side in (reference, ours)]
        print(
            f"{what}: ten lines of submitit {medians_s[0] * 1e3:.0f} ms, cluster.submit {medians_s[1] * 1e3:.0f} ms, "
            f"ratio {medians_s[1] / medians_s[0]:.2f}, limit {LIMIT}"
        )


def tell_many(taken: Sequence[Taken]) -> None:
    """Print what each of many submissions took."""
    walls_s, cpu_s = [one.wall_s for one in taken], [one.cpu_s for one in taken]
    print(
        f"{len(taken)} submissions one after another: {statistics.mean(walls_s) * 1e3:.0f} ms each, the slowest "
        f"{max(walls_s) * 1e3:.0f} ms; processor {statistics.mean(cpu_s) * 1e3:.0f} ms each"
    )


def tell_parts(words: Sequence[str], environ: Mapping[str, str], repeats: int) -> None:
    """Print where the time goes, part by part."""
    bare_s = statistics.median(take(["-c", "pass"], environ).wall_s for _ in range(repeats))
    found = [submit(["-m", "benchmarks.submission_parts", *words], environ) for _ in range(repeats)]
    told = [json.loads(one.output.splitlines()[-1]) for one in found]
    parts = {"interpreter": bare_s} | {name: statistics.median(one[name] for one in told) for name in told[0]}
    whole_s = statistics.median(one.wall_s for one in found)
    for name, seconds in (parts | {"the rest, Python's end included": whole_s - sum(parts.values())}).items():
        print(f"  {name:{WIDTH}} {seconds * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
