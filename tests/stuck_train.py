"""The training program, stuck in its first attempt: python -m tests.stuck_train HOW RANK STEP, then jobs.train's words.

HOW is never, open (the data set), what one rank does before a step (with skip all but that one do it, see IN_STEPS), or
evaluate or save, where it gets stuck in reading.  For tests of what ends a hang.
"""

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cluster.rank import ATTEMPT_VARIABLE

if TYPE_CHECKING:
    from jobs.loop import Loop

PAUSE_S = 35.0


def never_start() -> None:
    """Do not come to the meeting."""
    time.sleep(3600)


def read_from_nobody() -> None:
    """Wait in open(), as on a file system that does not answer."""
    pipe = Path(tempfile.mkdtemp()) / "pipe"
    os.mkfifo(pipe)
    pipe.open().read()


def open_staged_from_nobody(_dataset: object) -> NoReturn:
    """The data set's file system does not answer."""
    read_from_nobody()
    sys.exit("the pipe was closed")


def hold_the_interpreter() -> None:
    """Wait in C code that does not let go of the GIL, and that no signal interrupts: a mutex locked twice."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def join_a_barrier() -> None:
    """A collective that not all ranks join."""
    import torch.distributed as dist

    dist.barrier()


def pause() -> None:
    """Take longer for a step than KillWait lasts, and go on."""
    time.sleep(PAUSE_S)


IN_STEPS = {"pause": pause, "read": read_from_nobody, "hold": hold_the_interpreter, "skip": join_a_barrier}


def main(environ: Mapping[str, str]) -> int:
    """Break the training program, then train."""
    how, rank, at_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    is_first = environ.get(ATTEMPT_VARIABLE, "1") == "1"
    if is_first and how == "never" and environ.get("SLURM_PROCID", environ.get("RANK")) == str(rank):
        never_start()
    from jobs import train
    from jobs.loop import Loop

    if is_first and how == "open":
        from jobs import session

        session.open_staged = open_staged_from_nobody  # type: ignore[attr-defined, assignment]
    elif is_first and how != "never":
        name = "evaluate" if how == "evaluate" else "save" if how == "save" else "step"
        whole = getattr(Loop, name)

        def stuck(self: "Loop") -> None:
            is_its_turn = (self.env.rank == rank) != (how == "skip") and self.state.step == at_step
            if name == "step" and is_its_turn:
                self.watch.at("training", at_step)
                IN_STEPS[how]()
            elif is_its_turn:
                self.watch.at("evaluating" if name == "evaluate" else "saving", at_step)
                read_from_nobody()
            whole(self)

        setattr(Loop, name, stuck)
    return train.main(sys.argv[4:])


if __name__ == "__main__":
    os._exit(main(os.environ))
