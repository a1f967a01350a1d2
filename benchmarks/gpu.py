"""ResNet-18 on one GPU: images per second with and without torch.compile, and a resumed run's bits.

    python -m benchmarks.gpu [--root data] [--batch 512] [--steps 400]

Runs the training program itself, one rank over NCCL, on CIFAR-10 below --root, or on as many made-up images without it.
Three runs: one that is not disturbed, the same one stopped by a signal half-way and gone on with, and one compiled.
Exit code 0 when the weights of the first two are equal, 1 when they are not.  --device cpu tries the script itself.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from cluster.runs import EXIT_FINISHED, EXIT_STOPPED, RunFolder, read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
LOG_EVERY = 10
SPEC = """\
name: {name}
cluster: local
gpus_per_node: {gpus}
run_root: {folder}/runs
train:
  model: {model}
  batch_size_per_rank: {batch}
  epochs: 1000
  max_steps: {steps}
  eval_every_epochs: 1000
  log_every_steps: {log_every}
  device: {device}
  compile: {compiles}
dataset: {dataset}
checkpoint: {{every_minutes: 600.0}}
"""


def main() -> int:
    """Make the runs and print what they gave."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--root", type=Path, help="folder with cifar-10-batches-py")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", choices=("resnet18", "small"), default="resnet18")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = run(args, Path(folder), "whole")
        stopped = run(args, Path(folder), "stopped", stop_at=args.steps // 2)
        compiled = run(args, Path(folder), "compiled", compiles=True)
    is_equal = whole["weights_sha256"] == stopped["weights_sha256"]
    for name, found in (("as it is", whole), ("compiled", compiled)):
        print(f"{args.model}, batch {args.batch}, {name}: {found['rate']:,.0f} images/s in {found['precision']}")
    print(f"compiled / as it is: {compiled['rate'] / whole['rate']:.3f}")
    print(f"stopped at step {stopped['stopped_at']} and gone on with: weights {'equal' if is_equal else 'DIFFER'}")
    return 0 if is_equal else 1


def run(
    args: argparse.Namespace, folder: Path, name: str, *, compiles: bool = False, stop_at: int | None = None
) -> dict[str, Any]:
    """One run to its end, stopped once where asked; its summary, with the median rate of its second half."""
    if args.root is None:
        dataset = f"{{kind: synthetic, root: {folder}/data, num_train: 50000, num_test: 10000}}"
    else:
        dataset = f"{{kind: cifar10, root: {args.root.absolute()}, accept_unpublished_md5: true}}"
    spec = folder / f"{name}.yaml"
    gpus = 1 if args.device == "cuda" else 0
    spec.write_text(
        SPEC.format(
            **{**vars(args), "name": name, "folder": folder, "gpus": gpus, "dataset": dataset},
            log_every=LOG_EVERY,
            compiles=str(compiles).lower(),
        ).replace("gpus_per_node: 0\n", "")
    )
    subprocess.run([sys.executable, "-m", "jobs.stage", spec], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    run_folder = RunFolder(folder / "runs" / name / name)
    run_folder.make()
    stopped_at = train(spec, run_folder, stop_at)
    if stop_at is not None:
        train(spec, run_folder, None)
    lines = [line for line in read_lines(run_folder.metrics) if line["step"] > args.steps // 2]
    manifest = json.loads(max(run_folder.checkpoints.glob("step_*.json")).read_text())
    return {
        **json.loads(run_folder.summary.read_text()),
        "rate": median(line["images_per_s"] for line in lines),
        "precision": manifest["environment"]["precision"],
        "stopped_at": stopped_at,
    }


def train(spec: Path, run_folder: RunFolder, stop_at: int | None) -> int:
    """One attempt; the last step that it logged.  Raises RuntimeError: it ended otherwise than it should."""
    command = [sys.executable, "-m", "jobs.train", str(spec), "--run-dir", str(run_folder.path)]
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if stop_at is not None:
        while last_step(run_folder) < stop_at and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR2)
    expected = EXIT_FINISHED if stop_at is None else EXIT_STOPPED
    if process.wait() != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, expected {expected}")
    return last_step(run_folder)


def last_step(run_folder: RunFolder) -> int:
    """The last step in metrics.jsonl."""
    return max((line["step"] for line in read_lines(run_folder.metrics)), default=0)


if __name__ == "__main__":
    sys.exit(main())
