"""Words of a verdict: fit_nodes, fit_accounts -> [fit_words] -> fit."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.spec import JobSpec

MAX_NAMED = 8  # names in one message


class Problem(NamedTuple):
    """One thing that does not fit."""

    key: str  # dotted, as in the spec: nodes, sbatch.gres
    message: str


def given(spec: "JobSpec", *keys: str) -> str:
    """The first of these keys that the spec's author wrote; the first of all when none was."""
    return next((key for key in keys if key in spec.model_fields_set), keys[0])


def near(name: str, known: Iterable[str]) -> str:
    """What was meant, or what there is."""
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=1)
    if matches:
        return f"; did you mean {matches[0]}?"
    return f"; there are {some(names)}" if names else "; there is none"


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Iterable[str]) -> str:
    """Names with commas between, the first few of many."""
    listed = sorted(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
