"""Takes one defence away from the ranks: a folder for PYTHONPATH, with WITHOUT_DEFENCE=verify, agreement or fence.

For tests of the drill: it must notice.  Python imports a module of this name at its start.
"""

import os
import sys
from dataclasses import replace


def without_verify() -> None:
    """A checkpoint is never compared with its manifest."""
    from jobs import checkpoint

    checkpoint.verify = lambda path, manifest: None


def without_agreement() -> None:
    """Each rank stops by the signals that it got itself."""
    from jobs.control import Control, Tally

    whole_take = Control.take

    def take(self: Control) -> Tally:
        return replace(whole_take(self), stop_signal=self._stop.name())

    Control.take = take  # type: ignore[method-assign]


def without_fence() -> None:
    """An old attempt does not look whether a later one owns the run."""
    from cluster.runs import RunFolder

    RunFolder.check_owner = lambda self, attempt, afresh=False: None  # type: ignore[method-assign,misc]


if "jobs.train" in sys.orig_argv:
    taken_away = os.environ.get("WITHOUT_DEFENCE")
    if taken_away is not None:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as `python -m` is about to
        {"verify": without_verify, "agreement": without_agreement, "fence": without_fence}[taken_away]()
