"""Early signals: a command -> [early_signals] -> the same, begun with the stop signals blocked.  Standard library only.

Between the start of a process and its handlers USR2 and TERM would kill it.  A blocked signal waits, over execve as
well, until StopFlag.install() unblocks it.  `env --block-signal` blocks them before the command begins; coreutils have
it since 8.31 (2019), RHEL 8 has 8.30, and busybox never had it.  There cluster.start blocks them as its first act.
Until they are blocked the shell ignores them, so that one is lost rather than deadly: while it tries `env`, and without
a new one while an interpreter starts.
Sources: env(1); trap in POSIX; signal(7), "Signal mask and pending signals".
"""

import shlex
from collections.abc import Sequence

STOP_SIGNAL = "USR2"
BLOCKING_ENV = f"env --block-signal={STOP_SIGNAL} --block-signal=TERM"
IGNORE = f"trap '' {STOP_SIGNAL} TERM"
BLOCK_IF_POSSIBLE = f'{IGNORE}; if {BLOCKING_ENV} true 2> /dev/null; then exec {BLOCKING_ENV} "$@"; fi'


def begun_blocked(command: Sequence[str]) -> tuple[str, ...]:
    """A command for any node, be its `env` new or old.

    command: begins by blocking them itself, as cluster.start does.
    """
    return ("/bin/sh", "-c", f'{BLOCK_IF_POSSIBLE}; exec "$@"', "sh", *command)


def shell_function(python: str, starter: str) -> tuple[str, ...]:
    """Shell lines that make `begin_blocked COMMAND ...`, which becomes the command, whatever that does itself."""
    return ("begin_blocked() {", f"  {BLOCK_IF_POSSIBLE}", f'  exec {shlex.join((python, starter))} --block "$@"', "}")
