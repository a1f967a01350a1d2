"""Terminal: a stream and the environment -> [terminal] -> whether to draw on it.  Standard library only."""

import signal
from collections.abc import Mapping
from typing import TextIO


def is_fancy(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether colours and tables are welcome; https://no-color.org, and terminfo's dumb terminal."""
    return can_move(stream, environ) and not environ.get("NO_COLOR")


def can_move(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a line can be written over."""
    return stream.isatty() and environ.get("TERM", "dumb") not in ("dumb", "")


def end_quietly_at_a_closed_pipe() -> None:
    """Let `| head` end this process as it ends any other filter; only for programs that change nothing."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
