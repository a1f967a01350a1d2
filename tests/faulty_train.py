"""The training program with a bug in one rank: python -m tests.faulty_train RANK STEP, then jobs.train's arguments.

For tests of what happens when user code fails.
"""

import os
import sys
import time


def main() -> int:
    """Break one rank's training step, then train."""
    rank, at_step = int(sys.argv[1]), int(sys.argv[2])
    from jobs import train
    from jobs.loop import Loop

    whole_step = Loop.step

    def step(self: Loop) -> None:
        if self.env.rank == rank and self.state.step == at_step:
            raise ArithmeticError(f"broken on purpose at step {at_step}\nsecond line, {time.time()}")
        whole_step(self)

    Loop.step = step  # type: ignore[method-assign]
    return train.main(sys.argv[3:])


if __name__ == "__main__":
    os._exit(main())
