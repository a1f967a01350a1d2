"""Progress: a heartbeat -> [progress] -> a bar in a terminal, a line now and then elsewhere.

Standard library, and rich where it draws.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from cluster.terminal import can_move

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SAY_S = 5.0  # between two lines where there is no terminal


class Shown(Protocol):
    """Where progress is shown."""

    def wait(self, text: str) -> None:
        """Show what a run waits for."""

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Show where it is."""

    def log(self, line: bytes) -> object:
        """Show a line of the ranks' log, whatever bytes it holds."""


@dataclass
class Silence:
    """Nowhere: standard output belongs to somebody else, and a log that is asked for goes to standard error."""

    errors: TextIO

    def wait(self, text: str) -> None:
        """Say nothing."""

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Say nothing."""

    def log(self, line: bytes) -> None:
        """Write it."""
        print(line.decode(errors="replace"), end="", file=self.errors, flush=True)


@dataclass
class OccasionalLines:
    """Prints a line when it has changed, at most once in SAY_S seconds."""

    out: TextIO
    last: str = ""
    last_s: float = 0.0

    def wait(self, text: str) -> None:
        """Print it, or not yet."""
        now = time.monotonic()
        if text != self.last and now - self.last_s >= SAY_S:
            self.last, self.last_s = text, now
            print(text, file=self.out, flush=True)

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Print where it is, or not yet."""
        self.wait(progress_text(beat))

    def log(self, line: bytes) -> None:
        """Write it."""
        print(line.decode(errors="replace"), end="", file=self.out, flush=True)


@dataclass
class Bar:
    """Draws over its own last lines."""

    live: "Live"

    def wait(self, text: str) -> None:
        """A spinner and the text."""
        from rich.spinner import Spinner

        self.live.update(Spinner("dots", text))

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Two lines: the bar, and the figures."""
        self.live.update(bar(beat))

    def log(self, line: bytes) -> None:
        """Print it above; what is too long is left to the terminal to fold, so that it can be copied in one piece."""
        from rich.text import Text

        self.live.console.print(Text(line.decode(errors="replace").rstrip("\n")), soft_wrap=True)


@contextmanager
def shown_on(out: TextIO, environ: Mapping[str, str], *, maybe_errors: TextIO | None = None) -> Iterator[Shown]:
    """The place for progress on a stream.  maybe_errors: nowhere, and logs go there."""
    if maybe_errors is not None:
        yield Silence(maybe_errors)
    elif can_move(out, environ):
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=out), refresh_per_second=4, transient=True) as live:
            yield Bar(live)
    else:
        yield OccasionalLines(out)


def bar(beat: Mapping[str, Any]) -> "RenderableType":
    """A heartbeat drawn in two lines, whatever the width."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step, total = beat.get("step", 0), beat.get("total_steps", 0)
    first = Table.grid(padding=(0, 1), expand=True)
    first.add_column(no_wrap=True)
    first.add_column(ratio=1, min_width=8)
    first.add_column(no_wrap=True)
    left = maybe_left(beat)
    words = f"step {step}/{total}" + (f", {left} left" if left else "")
    first.add_row(
        Text(str(beat.get("phase", "")), style="bold"), ProgressBar(total=total or None, completed=step), words
    )
    return Group(first, Text(", ".join(figures_of(beat)), style="dim"))


def progress_text(beat: Mapping[str, Any]) -> str:
    """`training: step 120/960, epoch 4/30, loss 1.234, accuracy 0.6500, 512 images/s, 0:32 left`."""
    left = maybe_left(beat)
    parts = [f"{beat['phase']}: step {beat.get('step', 0)}/{beat.get('total_steps', 0)}", *figures_of(beat)]
    return ", ".join([*parts, *([f"{left} left"] if left else [])])


def figures_of(beat: Mapping[str, Any]) -> list[str]:
    """Epoch, loss, accuracy and speed, as far as they are known."""
    step, total, per_epoch = beat.get("step", 0), beat.get("total_steps", 0), beat.get("steps_per_epoch", 1)
    parts = [f"epoch {min(step, total - 1) // per_epoch + 1}/{-(-total // per_epoch)}"]
    parts += [f"loss {beat['loss']:.3f}"] if "loss" in beat else []
    parts += [f"accuracy {beat['accuracy']:.4f}"] if "accuracy" in beat else []
    return [*parts, *([f"{beat['images_per_s']:.0f} images/s"] if beat.get("images_per_s") else [])]


def maybe_left(beat: Mapping[str, Any]) -> str | None:
    """The time that the rest takes at the speed of now, as 1:02:03 or 2:03; None before there is a speed."""
    if not beat.get("images_per_s"):  # 0.0 where a step takes minutes
        return None
    seconds = int((beat["total_steps"] - beat.get("step", 0)) * beat["global_batch"] / beat["images_per_s"])
    return duration(seconds)


def duration(seconds: float) -> str:
    """1:23, 4:05:06 or 2 d 4:05."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def age(seconds: float) -> str:
    """One number and its unit: `3 min`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
