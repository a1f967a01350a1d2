"""Checkpoints: a run -> [checkpoints] -> what it could go on from, told, verified, exported.  Standard library only.

    python -m cluster.checkpoints RUN [--verify] [--export FILE [--step N]] [--json]

RUN is a run folder, run id, run name (its newest) or job id.  It only reads: the run may be running.  --verify compares
each checkpoint with its manifest; --export writes the weights of the newest good one, or of step N, as a plain state
dict like model_final.pt.
Exit codes: 0 answered; 1 a checkpoint is bad, or none can be exported; 2 usage, no such run, or FILE exists.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.index import find_run
from cluster.progress import age
from cluster.runs import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USAGE,
    RunFolder,
    UsageError,
    digest_of,
    manifest_steps,
    maybe_object,
)

WIDTH = 80
HEAD = f"{'step':>10} {'epoch':>6} {'attempt':>7} {'age':>10} {'bytes':>15} {'ranks':>6}  state"
NAME = re.compile(r"step_(\d{8,})(\.a\d+)?\.(pt|json)(\.a\d+\.tmp)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint as it lies in the folder; None where nothing says it."""

    name: str  # of its data file, below checkpoints/
    step: int
    state: str  # unread, good, bad, quarantined, or unfinished: data without a manifest, such as a save in flight has
    epoch: int | None = None
    attempt: int | None = None
    age_s: float | None = None
    size: int | None = None  # bytes of the data file, as it is
    world_size: int | None = None
    is_best: bool = False
    reason: str = ""  # why it is bad, or was quarantined


def main(argv: Sequence[str] | None = None) -> int:
    """Answer about one run's checkpoints and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.checkpoints", description="Show a run's checkpoints.")
    parser.add_argument("run", help="its folder, id, name or job id")
    parser.add_argument("--verify", action="store_true", help="compare each checkpoint with its manifest")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the weights of the newest good one")
    parser.add_argument("--step", type=int, metavar="N", help="export those of this step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.step is not None and args.export is None:
        parser.error("--step chooses what --export writes: give --export FILE too")
    try:
        return answer(find_run(args.run, os.environ), args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def answer(run: RunFolder, args: argparse.Namespace) -> int:
    """List, verify and export as asked."""
    found = find_checkpoints(run, time.time())
    if args.verify:
        found = verify_all(run, found)
    exported: dict[str, Any] = {}
    exit_code = EXIT_FINISHED
    if args.export is not None:
        exit_code, exported = export(run, args.export, args.step)
    if args.json:
        head = {"run_dir": str(run.path), "run_id": run.run_id}
        listed = [asdict(checkpoint) for checkpoint in found]
        print(json.dumps({**head, "checkpoints": listed, "exported": exported or None}, ensure_ascii=False))
    elif args.verify or args.export is None:
        print("\n".join(table(run, found)))
    if exported and not args.json:
        print(f"exported the weights of step {exported['step']} to {exported['path']}")
    is_bad = args.verify and any(checkpoint.state == "bad" for checkpoint in found)
    return exit_code or (EXIT_FAILED if is_bad else EXIT_FINISHED)


def find_checkpoints(run: RunFolder, now_s: float) -> list[Checkpoint]:
    """All that lies in checkpoints/ and checkpoints/bad/, the newest first, those put aside last; nothing is hidden.

    now_s: seconds since 1970.
    """
    folder = run.checkpoints
    if not folder.is_dir():
        return []
    best = maybe_object(folder / "best.json").get("step")
    names = [f"step_{step:08d}.pt" for step in reversed(manifest_steps(folder))]
    whole = [describe(folder, name, now_s) for name in names]
    whole = [one for one in whole if manifest_of(folder, one).exists()]  # its owner may have removed it just now
    kept = {*names, *(manifest_of(folder, one).name for one in whole)}
    others = [path.name for path in folder.iterdir() if NAME.fullmatch(path.name) and path.name not in kept]
    unfinished = [describe(folder, name, now_s, "unfinished") for name in sorted(others, reverse=True)]
    return [*(replace(one, is_best=one.step == best) for one in whole), *unfinished, *quarantined(run, now_s)]


def manifest_of(folder: Path, checkpoint: Checkpoint) -> Path:
    """Where a checkpoint's manifest lies."""
    return (folder / checkpoint.name).with_suffix(".json")


def quarantined(run: RunFolder, now_s: float) -> list[Checkpoint]:
    """What lies in bad/, with the reason that the events give."""
    folder = run.checkpoints / "bad"
    if not folder.is_dir():
        return []
    events = [event for event in run.read_events() if event["event"] == "checkpoint_quarantined"]
    reasons = {event["name"]: event["reason"] for event in events}
    names = sorted({f"{path.stem}.pt" for path in folder.iterdir() if NAME.fullmatch(path.name)}, reverse=True)
    found = [describe(folder, name, now_s, "quarantined") for name in names]
    return [replace(one, name=f"bad/{one.name}", reason=reasons.get(one.name, "")) for one in found]


def describe(folder: Path, name: str, now_s: float, state: str = "unread") -> Checkpoint:
    """One checkpoint by its manifest and its files; a manifest that says nothing makes it bad.

    name: of the data file.  state: unless it is bad.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    data = folder / name
    manifest = data.with_suffix(".json")
    said = maybe_object(manifest)
    newest = maybe_stat(manifest) or maybe_stat(data)
    size = maybe_stat(data)
    epoch, attempt, ranks = (maybe_integer(said, key) for key in ("epoch", "attempt", "world_size"))
    reason = "" if state != "unread" else maybe_fault(said, int(match[1]), manifest.name) or ""
    if state == "unread" and size is None:
        reason = f"{name}: it is not there"
    return Checkpoint(
        name,
        int(match[1]),
        "bad" if reason else state,
        epoch,
        attempt,
        world_size=ranks,
        age_s=None if newest is None else round(max(0.0, now_s - newest.st_mtime), 1),
        size=None if size is None else size.st_size,
        reason=reason,
    )


def maybe_integer(said: Mapping[str, Any], key: str) -> int | None:
    """A whole number of a manifest; None where there is none."""
    return said[key] if type(said.get(key)) is int else None


def maybe_fault(said: Mapping[str, Any], step: int, name: str) -> str | None:
    """What is wrong with a manifest; None when it can be compared with its data."""
    if not said:
        return f"{name}: it is damaged"
    if said.get("step") != step:
        return f"{name}: it speaks of step {said.get('step')!r}"
    wrong = [key for key in ("epoch", "attempt", "size", "world_size") if maybe_integer(said, key) is None]
    wrong += [] if isinstance(said.get("sha256"), str) else ["sha256"]
    return f"{name}: {', '.join(wrong)}: missing or of another type" if wrong else None


def verify_all(run: RunFolder, found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The same with their states known; one that its owner has removed meanwhile is left out."""
    checked = (verify(run.checkpoints, one) if one.state == "unread" else one for one in found)
    return [checkpoint for checkpoint in checked if checkpoint is not None]


def verify(folder: Path, checkpoint: Checkpoint) -> Checkpoint | None:
    """Compare one data file with its manifest; None when it is gone, as old checkpoints of a running run go.

    A manifest that has changed while the data was read belongs to a new save of that step, and is read again.
    """
    manifest = manifest_of(folder, checkpoint)
    while said := maybe_object(manifest):
        reason = maybe_difference(folder / checkpoint.name, said)
        if maybe_object(manifest) == said:
            return replace(checkpoint, state="bad" if reason else "good", reason=reason or "")
    return None if maybe_stat(manifest) is None else replace(checkpoint, state="bad", reason="its manifest is damaged")


def maybe_difference(data: Path, said: Mapping[str, Any]) -> str | None:
    """What a data file has that its manifest does not say; None when they are equal."""
    try:
        size, digest = digest_of(data)
    except OSError as error:
        return f"{data.name}: {error.strerror}"
    if (size, digest) == (said["size"], said["sha256"]):
        return None
    told = f"{data.name}: {size} bytes with SHA-256 {digest[:12]}..., the manifest says"
    return f"{told} {said['size']} and {said['sha256'][:12]}..."


def export(run: RunFolder, path: Path, maybe_step: int | None) -> tuple[int, dict[str, Any]]:
    """Have a process that may load torch write the weights; returns its exit code and what it says of the file."""
    step = [] if maybe_step is None else ["--step", str(maybe_step)]
    command = [sys.executable, "-m", "jobs.export", str(run.path), str(path.absolute()), *step]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}


def table(run: RunFolder, found: Sequence[Checkpoint]) -> list[str]:
    """Lines of at most WIDTH columns: a row for each checkpoint, and below what is wrong with some."""
    if not found:
        is_pruned = any(event["event"] == "pruned" and event["steps"] for event in run.read_events())
        return [f"{run.path} has no checkpoint {'any more: cluster.prune has removed them' if is_pruned else 'yet'}"]
    lines = [HEAD, *(row(checkpoint) for checkpoint in found)]
    for checkpoint in found:
        if checkpoint.reason:
            text = f"step {checkpoint.step}, {checkpoint.state}: {checkpoint.reason}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return lines


def row(checkpoint: Checkpoint) -> str:
    """One line of the table."""
    state = {"unread": ""}.get(checkpoint.state, checkpoint.state)
    state = ", ".join(word for word in (state, "best" if checkpoint.is_best else "") if word)
    text = (
        f"{checkpoint.step:>10} {shown(checkpoint.epoch):>6} {shown(checkpoint.attempt):>7} "
        f"{shown(checkpoint.age_s, age):>10} {shown(checkpoint.size, '{:,}'.format):>15} "
        f"{shown(checkpoint.world_size):>6}  {state}"
    )
    return text.rstrip()


def shown(maybe_value: Any, render: Callable[[Any], str] = str) -> str:  # noqa: ANN401
    """A value as text, or a dash."""
    return "-" if maybe_value is None else render(maybe_value)


def maybe_stat(path: Path) -> os.stat_result | None:
    """What the file system says of a file; None when it is not there."""
    try:
        return path.stat()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
