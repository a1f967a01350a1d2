"""Files of every kind for the loader: python -m tests.loader_examples NUMBER.  Prints the number of each outcome.

A program of its own, since Hypothesis takes ideas from the modules that are loaded: so the files are the same whatever
other tests run beside it.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.plan import make_plan
from cluster.runs import RunFolder
from cluster.spec import SpecError, dump_spec, load_spec
from tests.test_spec import COMPANIONS, RIGHT

# Keys of which any may stand beside any other.
CONTRADICTING = ("name", "faults", "memory_per_cpu", "train.batch_size_per_rank", *COMPANIONS)
ONE_READING = [key for key in RIGHT if key not in CONTRADICTING and RIGHT[key][0] != "{"]
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = st.one_of(
    TEXT,
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["yes", "010", "1_000", "12:00:00", "2024-01-01", "null", "~", "!!python/object:os.system", "*a", "&a"]
    ),
    st.sampled_from(sorted(RIGHT.values())),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def lines_of(settings: dict[str, str]) -> str:
    """A spec with so many of its keys, each with a text of the file."""
    plain = {"name": "demo", "time_limit": "60"} | {key: text for key, text in settings.items() if "." not in key}
    lines = [f"{key}: {text}" for key, text in plain.items()]
    for section in {key.split(".")[0] for key in settings if "." in key}:
        lines.append(f"{section}:")
        lines += [f"  {key.split('.')[1]}: {text}" for key, text in settings.items() if key.startswith(f"{section}.")]
    return "\n".join(lines) + "\n"


RIGHT_ONES = st.lists(st.sampled_from(ONE_READING), unique=True, max_size=8).map(
    lambda keys: lines_of({key: RIGHT[key] for key in keys})
)
WRONG_VALUES = st.dictionaries(st.sampled_from(sorted(RIGHT)), SCALARS, max_size=3).map(lines_of)
STRUCTURES = st.dictionaries(
    st.sampled_from(sorted({key.split(".")[0] for key in RIGHT})) | TEXT, VALUES, max_size=4
).map(lambda value: yaml.safe_dump(value, allow_unicode=True))
CHANGED = st.tuples(RIGHT_ONES, st.integers(0, 60), st.sampled_from([*"{}[]&*!|>'\"%@`:#-?,\n\t \\", "\x00", "é"])).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
)
FILES = st.one_of(
    RIGHT_ONES,
    RIGHT_ONES.map(lambda text: text.replace("\n", "\r\n")),
    RIGHT_ONES.map(lambda text: f"\ufeff# a comment\n---\n{text}..."),
    WRONG_VALUES,
    STRUCTURES,
    CHANGED,
    st.text(max_size=60),
).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=60)


def outcome_of(content: bytes, folder: Path, *, dump: bool) -> str:
    """What becomes of a file: a plan, or lines that say what to mend.  dump: whether to compare with its dump."""
    path = folder / "spec.yaml"
    path.write_bytes(content)
    try:
        spec = load_spec(path, cwd=folder, allow_faults=True)
    except SpecError as error:
        assert error.problems
        assert all(len(problem.splitlines()) == 1 and problem.isprintable() for problem in error.problems)
        return "refused"
    plan = make_plan(spec, RunFolder(spec.run_root / spec.name / "a"), python="/usr/bin/python3")
    assert plan.name == spec.name
    if dump:
        path.write_text(dump_spec(spec), encoding="utf-8")
        assert load_spec(path, cwd=Path("/"), allow_faults=True) == spec
    return "accepted"


def main() -> int:
    """Load so many files, and print the outcomes; a failure is an exception with the file that caused it."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=int(sys.argv[1]),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(FILES)
    def load_one(content: bytes) -> None:
        outcomes[outcome_of(content, folder, dump=outcomes.total() % 10 == 0)] += 1

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_one()
    sys.stdout.write(json.dumps(outcomes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
