"""The training program with one slow rank: python -m tests.slow_train RANK, then jobs.train's words.

That rank sleeps in each step, and rank 0 judges after windows of a second.
"""

import os
import sys
import time
from collections.abc import Mapping

SLEEP_S = 0.2  # many times what a step of the small model takes


def main(environ: Mapping[str, str]) -> int:
    """Slow the training program down, then train."""
    from jobs import pace, train
    from jobs.faults import Faults

    pace.WINDOW_S = 1.0
    if environ["RANK"] == sys.argv[1]:
        Faults.before_step = lambda _self, _num_done: time.sleep(SLEEP_S)  # type: ignore[method-assign, assignment]
    return train.main(sys.argv[2:])


if __name__ == "__main__":
    os._exit(main(os.environ))
