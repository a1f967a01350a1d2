"""Where a submission's time goes: python -m benchmarks.submission_parts SPEC [key=value ...], by benchmarks.submission.

Submits as cluster.submit does, with clocks around its parts, and prints their seconds as JSON on the last line.
"""

import time

BEGAN_S = time.perf_counter()

import functools  # noqa: E402  # what is imported from here on is a part
import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import submitit  # noqa: E402, F401  # cluster.submit imports it when it needs it

from cluster import keep, preflight, submit  # noqa: E402

IMPORTED_S = time.perf_counter()

PARTS = (
    (submit, "read_spec", "parsing and validation"),
    (keep, "look", "interpreter's packages, list of the code by git"),
    (preflight, "conclude", "look-ups: what is left to wait, judging"),
    (submit, "write_files", "snapshot of the code, spec, plan, script"),
    (submit, "start", "sbatch, by submitit; events and index"),
)


def main() -> None:
    """Submit and print."""
    seconds = {"imports": IMPORTED_S - BEGAN_S}
    for module, name, part in PARTS:
        setattr(module, name, timed(getattr(module, name), part, seconds))
    if code := submit.main(sys.argv[1:]):
        raise SystemExit(code)
    print(json.dumps(seconds))
    gc.freeze()


def timed(work: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The same, and its duration is noted."""

    @functools.wraps(work)
    def measured(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        try:
            return work(*args, **named)
        finally:
            seconds[part] = time.perf_counter() - began

    return measured


if __name__ == "__main__":
    main()
