"""Text of a status: figures -> [status_text] -> a table that fits the terminal, or plain lines.  rich only draws.

In a terminal a run takes as many lines as its words need; elsewhere one line each, for grep and awk.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from cluster.progress import age, duration
from cluster.terminal import is_fancy

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS = {
    "training": "green",
    "saving": "green",
    "finished": "bold green",
    "failed": "bold red",
    "cancelled": "magenta",
    "stopped": "yellow",
    "requeued": "yellow",
    "pending": "cyan",
    "starting": "cyan",
}
Figures = Mapping[str, Any]
ROOM = 43  # columns that the others leave of 80


def lines_of(run: Figures, now: datetime) -> list[str]:
    """What is to be said of one run, in lines that fit beside the other columns where 80 are.

    now: with a time zone; times of another day carry their date.
    """
    why = ", ".join(why_words(run, now))
    words = [*step_words(run), *speed_words(run), *saved_words(run), *place_words(run)]
    return [*([why] if why else []), *packed(words)]


def packed(words: Sequence[str]) -> list[str]:
    """Pieces of text in as few lines as they fit in, so that a figure is not parted from its name."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= ROOM:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def why_words(run: Figures, now: datetime) -> list[str]:
    """What it waits for or ended by, and when it may start."""
    said = [run["because"]] if run["because"] else []
    if run["never_starts"]:
        return [*said, "it never starts like this"]
    if run["state"] in ("pending", "requeued") and run["start"]:
        may = "may start" if run["slurm_reason"] == "BeginTime" else "start expected"
        said.append(f"{may} at {clock(run['start'], now)}")
    return said


def step_words(run: Figures) -> list[str]:
    """How far it is."""
    said = [f"attempt {run['attempt']}"] if run["attempt"] > 1 else []
    if run["state"] == "finished":
        return [*said, f"{run['step']} steps, {run['epochs']} epochs"]
    if run["total_steps"]:
        said += [f"step {run['step']}/{run['total_steps']}", f"epoch {run['epoch']}/{run['epochs']}"]
    return said


def speed_words(run: Figures) -> list[str]:
    """How fast it is, and how much of its time counts."""
    said = [f"{run['images_per_s']:.0f} images/s"] if run["images_per_s"] else []
    said += [f"{duration(run['eta_s'])} left"] if run["eta_s"] is not None else []
    return [*said, *([f"goodput {run['goodput']:.2f}"] if run["goodput"] is not None else [])]


def saved_words(run: Figures) -> list[str]:
    """How good it is, and how old its last checkpoint."""
    said = [f"accuracy {run['accuracy']:.4f}"] if run["accuracy"] is not None else []
    return [*said, *([f"saved {age(run['checkpoint_age_s'])} ago"] if run["checkpoint_step"] is not None else [])]


def place_words(run: Figures) -> list[str]:
    """Where it runs, and what waits behind it."""
    said = [f"on {run['nodes']}"] if run["nodes"] else []
    said += [f"without {run['excluded']}"] if run["excluded"] else []
    return [*said, *([f"behind it job {', '.join(run['successors'])}"] if run["successors"] else [])]


def clock(moment: str, now: datetime) -> str:
    """A moment in the local time zone: 14:20, or 2026-01-02 14:20 on another day."""
    when = datetime.fromisoformat(moment.replace("Z", "+00:00")).astimezone(now.tzinfo)
    return f"{when:%H:%M}" if when.date() == now.date() else f"{when:%Y-%m-%d %H:%M}"


def show(runs: Sequence[Figures], out: TextIO, environ: Mapping[str, str], now: datetime) -> None:
    """Print a table of runs."""
    if is_fancy(out, environ):
        from rich.console import Console

        console = Console(file=out)
        console.print(table(runs, now))
    else:
        print("\n".join(plain_lines(runs, now)), file=out)


def plain_lines(runs: Sequence[Figures], now: datetime) -> list[str]:
    """One line for each run, in columns; nothing is cut."""
    rows = [("run", "name", "job", "state", "")]
    rows += [
        (run["run_id"], run["name"], run["job_id"] or "-", run["state"], ", ".join(lines_of(run, now))) for run in runs
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def table(runs: Sequence[Figures], now: datetime, note: str = "") -> "RenderableType":
    """The same for a terminal; the last column takes what is left and is folded.  note: below it."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    drawn.caption, drawn.caption_justify = note or None, "left"
    for title in ("run", "job", "state"):
        drawn.add_column(title, no_wrap=True, overflow="ellipsis", max_width=20, justify="left")
    drawn.add_column("", overflow="fold", ratio=1)
    for run in runs:
        drawn.add_row(
            Text.assemble((run["name"], "bold"), "\n", run["run_id"]),
            run["job_id"] or "-",
            Text(run["state"], style=COLOURS[run["state"]]),
            Text("\n".join(lines_of(run, now))),
        )
    return drawn


def detail(run: Figures, now: datetime) -> list[tuple[str, str]]:
    """(label, value) of everything about one run; what is not known is left out."""
    job = f"{run['job_id']}{', ' + run['slurm_state'] if run['slurm_state'] else ''}" if run["job_id"] else ""
    left = run["time_left_s"]
    rows = [
        ("state", f"{run['state']}{': ' + run['because'] if run['because'] else ''}"),
        ("run folder", run["run_dir"]),
        ("job", job),
        ("start" if run["time_left_s"] is None else "started", clock(run["start"], now) if run["start"] else ""),
        ("limit in", duration(left) if left is not None else ""),
        ("nodes", run["nodes"] or ""),
        ("left out", run["excluded"] or ""),
        ("successors", ", ".join(run["successors"])),
        ("attempt", str(run["attempt"]) if run["attempt"] else ""),
        *progress_rows(run),
        ("said by", run["source"]),
    ]
    return [(label, value) for label, value in rows if value]


def progress_rows(run: Figures) -> list[tuple[str, str]]:
    """(label, value) of how far it is."""
    is_saved = run["checkpoint_step"] is not None
    rows = (
        ("step", f"{run['step']} of {run['total_steps']}" if run["total_steps"] else ""),
        ("epoch", f"{run['epoch']} of {run['epochs']}" if run["epochs"] else ""),
        ("done in", duration(run["eta_s"]) if run["eta_s"] is not None else ""),
        ("images/s", f"{run['images_per_s']:.0f}" if run["images_per_s"] else ""),
        ("loss", f"{run['loss']:.3f}" if run["loss"] is not None else ""),
        ("accuracy", f"{run['accuracy']:.4f}" if run["accuracy"] is not None else ""),
        ("checkpoint", f"step {run['checkpoint_step']}, {age(run['checkpoint_age_s'])} ago" if is_saved else ""),
        ("goodput", f"{run['goodput']:.2f}" if run["goodput"] is not None else ""),
    )
    return list(rows)


def show_detail(run: Figures, out: TextIO, environ: Mapping[str, str], now: datetime) -> None:
    """Print everything about one run."""
    rows = detail(run, now)
    if is_fancy(out, environ):
        from rich.console import Console

        Console(file=out).print(detail_table(run, rows))
    else:
        print(f"{run['name']} {run['run_id']}", file=out)
        print("\n".join(f"{label:<11} {value}" for label, value in rows), file=out)


def detail_table(run: Figures, rows: Sequence[tuple[str, str]]) -> "RenderableType":
    """The same for a terminal."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, show_header=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    drawn.add_column(run["name"], no_wrap=True)
    drawn.add_column(run["run_id"], overflow="fold")
    for label, value in rows:
        drawn.add_row(Text(label, style="dim"), Text(value, style=COLOURS[run["state"]] if label == "state" else ""))
    return drawn
