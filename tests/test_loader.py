"""The loader against input of every kind: a plan or a refusal in words, soon and in little memory.  Seeded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.spec import MAX_PROBLEMS, SpecError, load_spec
from cluster.spec_yaml import MAX_BYTES
from tests.training import REPOSITORY, command

NUM_EXAMPLES = 2000
CPU_S = 2  # for one file; what is reached here is about half
MEMORY_MIB = 200


def test_every_file_is_a_plan_or_a_refusal_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = command("tests.loader_examples", NUM_EXAMPLES)
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    total = sum(outcomes.values())
    with capsys.disabled():
        print(f"\n{total} files: {outcomes}")
    assert total >= NUM_EXAMPLES
    assert min(outcomes["accepted"], outcomes["refused"]) >= 0.3 * total


def filled(line: str, head: str = "", size: int = MAX_BYTES) -> bytes:
    """Numbered lines up to a size.  line: {} stands for the number."""
    count = (size - len(head)) // (len(line) + 4)
    return (head + "".join(line.replace("{}", f"{number:05d}") for number in range(count))).encode()[:size]


HEAD = "name: a\ntime_limit: 60\n"
HUGE: dict[str, bytes] = {
    "10 MB of text": b"name: " + b"a" * 10_000_000,
    "10 MB of keys": filled("k{}: 1\n", size=10_000_000),
    "10 MB of depth": b"[" * 10_000_000,
    "one byte too many": b"#" * (MAX_BYTES + 1),
    "unknown keys": filled("partitionx{}: 1\n"),
    "short unknown keys": filled("k{}:\n"),
    "the same key": filled("name: a\n"),
    "variables": filled(" A{}: x\n", f"{HEAD}env:\n"),
    "setup lines": f"{HEAD}setup: [{'a,' * 30_000}]".encode(),
    "wrong faults": f"{HEAD}faults: [{'{},' * 20_000}]".encode(),
    "wrong causes": filled("k{}: a,", f"{HEAD}requeue: {{policy: {{") + b"}}",
    "flow depth": b"a: " + b"[" * 60_000,
    "block depth": b"".join(b" " * depth + b"a:\n" for depth in range(300)),
    "anchors": filled("&a{} x,", "a: [") + b"]",
    "alias bomb": b"a0: &a0 [x, x]\n" + b"".join(
        f"a{number}: &a{number} [{f'*a{number - 1},' * 9}]\n".encode() for number in range(1, 900)
    ),
    "merge keys": filled("k{}: {<<: *a}\n", "a: &a {b: 1}\n"),
    "documents": filled("---\n", "a: 1\n"),
    "a long number": f"{HEAD}nodes: {'9' * 60_000}".encode(),
    "a long assignment": f"{HEAD}setup: ['{' A=' * 20_000} -', 010]".encode(),
    "a right one": HEAD.encode(),
}  # fmt: skip
REFUSED_TOO_LONG = ("10 MB of text", "10 MB of keys", "10 MB of depth", "one byte too many")

LOAD_ALL = f"""
import math, pathlib, resource, sys
from cluster.spec import SpecError, load_spec

def used_s():
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime

for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s()) + {CPU_S}, resource.RLIM_INFINITY))
    try:
        load_spec(path, cwd=pathlib.Path("/"))
    except SpecError as error:
        print(path.name, len(error.problems), error.problems[0].removeprefix(f"{{path}}"), sep="|")
    else:
        print(path.name, 0, "", sep="|")
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss holds what the parent had before exec
print("peak", int(status.split("VmHWM:")[1].split()[0]) // 1024, "", sep="|")
"""


def test_huge_and_nested_files_are_refused_soon_and_in_little_memory(tmp_path: Path) -> None:
    for name, content in HUGE.items():
        (tmp_path / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, tmp_path], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")  # SIGXCPU would be -24
    lines = {
        name: (int(number), text) for name, number, text in (line.split("|", 2) for line in done.stdout.splitlines())
    }
    assert lines.pop("peak")[0] < MEMORY_MIB
    assert set(lines) == set(HUGE)
    assert [name for name, (number, _) in lines.items() if number == 0] == ["a right one"]
    assert max(number for number, _ in lines.values()) == MAX_PROBLEMS + 1
    too_long = f": has more than {MAX_BYTES:,} bytes, which no spec needs; is this the right file?"
    assert {name for name, (_, text) in lines.items() if text == too_long} == set(REFUSED_TOO_LONG)


def test_spec_whose_copy_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(HUGE["variables"])
    with pytest.raises(SpecError) as caught:
        load_spec(path, cwd=tmp_path)
    assert str(caught.value).startswith(f"{path}: with every default written out it has ")


def test_file_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(Path("/dev/zero"), cwd=tmp_path)
    assert caught.value.problems == (
        f"/dev/zero: has more than {MAX_BYTES:,} bytes, which no spec needs; is this the right file?",
    )


def test_deepest_and_longest_right_specs_are_taken(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"{HEAD}comment: '{'x' * 50_000}'\n")
    spec: Any = load_spec(tmp_path / "spec.yaml", cwd=tmp_path)
    assert len(spec.comment) == 50_000
