from pathlib import Path

import pytest

from cluster.spec import SpecError, load_spec
from tests.specs import load, problems, spec_with, value_problem


@pytest.mark.parametrize("plain", ["no", "Yes", "on", "OFF"])
def test_a_truth_value_of_old_in_a_text_field_is_refused(tmp_path: Path, plain: str) -> None:
    expected = f"partition: {plain} may be read as true or false; put it in quotes"
    assert value_problem(tmp_path, f"partition: {plain}") == expected
    assert load(tmp_path, spec_with("partition", f"partition: '{plain}'")).partition == plain


@pytest.mark.parametrize("plain", ["010", "0042", "1_000", "0x1F", "0o17", "08", "1_0.5", "9" * 19])
def test_a_number_with_two_readings_is_refused_in_every_field(tmp_path: Path, plain: str) -> None:
    expected = f"account: {plain} may be read as another number; put it in quotes"
    assert value_problem(tmp_path, f"account: {plain}") == expected
    expected = f"nodes: {plain} is not clear; write a plain decimal number of at most 18 digits"
    assert value_problem(tmp_path, f"nodes: {plain}") == expected
    assert load(tmp_path, spec_with("account", f"account: '{plain}'")).account == plain


@pytest.mark.parametrize("plain", ["42", "3.10", "1e-3", "-1", ".5", ".inf"])
def test_a_number_in_a_text_field_is_refused(tmp_path: Path, plain: str) -> None:
    assert value_problem(tmp_path, f"qos: {plain}") == f"qos: {plain} is read as a number; put it in quotes"


def test_a_date_in_a_text_field_is_refused(tmp_path: Path) -> None:
    expected = "reservation: 2024-01-01 may be read as a date; put it in quotes"
    assert value_problem(tmp_path, "reservation: 2024-01-01") == expected


def test_true_in_a_text_field_is_refused(tmp_path: Path) -> None:
    assert value_problem(tmp_path, "qos: true") == "qos: true is read as true or false; put it in quotes"


def test_yes_in_a_truth_field_is_refused(tmp_path: Path) -> None:
    assert value_problem(tmp_path, "exclusive: yes") == "exclusive: yes is not clear; write true or false"


@pytest.mark.parametrize("plain", ["12:00:00", "1:30", "10:00", "190:20:30", "-1:30"])
def test_colon_numbers_stay_text(tmp_path: Path, plain: str) -> None:
    assert load(tmp_path, spec_with("comment", f"comment: {plain}")).comment == plain


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    spec = load(
        tmp_path, "name: demo\ntime_limit: nonsense\ntrain: {lr: 1}\n",
        "time_limit=12:00:00", "train.lr=1e-3", "train.epochs=5", "dataset.augment=[flip]", "env.A=b", "sbatch.nice=5",
        "comment='a #b'",
    )  # fmt: skip
    assert (spec.slurm_time, spec.train.lr, spec.train.epochs) == ("12:00:00", 0.001, 5)
    assert (spec.dataset.augment, spec.env, spec.sbatch, spec.comment) == (("flip",), {"A": "b"}, {"nice": 5}, "a #b")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=fast", "command line: train.lr: 'fast' is no number"),
        ("train.lr=", "command line: train.lr: has no value; give one, or leave the key out"),
        ("train.lrr=1", "command line: train.lrr: unknown key; did you mean lr?"),
        ("trian.lr=1", "command line: trian: unknown key; did you mean train?"),
        ("nodes=010", "command line: nodes: 010 is not clear; write a plain decimal number of at most 18 digits"),
        ("account=no", "command line: account: no may be read as true or false; put it in quotes"),
        ("train.lr", "command line: 'train.lr' is no section.key=value, such as train.epochs=5"),
        ("=1", "command line: '=1' is no section.key=value, such as train.epochs=5"),
        ("train.=1", "command line: 'train.=1' is no section.key=value, such as train.epochs=5"),
        ("name.x=1", "command line: name.x: name is 'demo', which has no keys"),
        ("comment=a #b", "command line: comment: 'a #b' would lose what follows #; put the value in quotes"),
        ("comment=a: b", "command line: comment: 'a: b' is a mapping; give its keys one by one, with a dot between"),
        ("comment=[", "command line: comment: is no YAML: while parsing a flow node, expected the node content, "
         "but found '<stream end>'"),
        ("name=[", "command line: name: is no YAML: while parsing a flow node, expected the node content, "
         "but found '<stream end>'"),
        ("memory_per_gpu=1G",
         "command line: memory_per_gpu: memory_per_gpu needs gpus_per_node; give it, or use memory_per_node"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_told_as_the_command_lines(tmp_path: Path, override: str, expected: str) -> None:
    assert problems(tmp_path, "name: demo\ntime_limit: 60\n", override) == [expected]


def test_an_override_given_twice_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: demo\ntime_limit: 60\n", "nodes=2", "nodes=3") == [
        "command line: nodes: is given twice"
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "spec.yaml:1: the file is empty; a spec needs a name, such as name: demo"),
        (b"# only this\n", "spec.yaml:1: the file is empty; a spec needs a name, such as name: demo"),
        (b"null\n", "spec.yaml:1: the file is empty; a spec needs a name, such as name: demo"),
        (b"{}\n", "spec.yaml:1: the file is empty; a spec needs a name, such as name: demo"),
        (b"- a\n", "spec.yaml:1: expected keys at the top, such as name: demo, got a list"),
        (b"demo\n", "spec.yaml:1: expected keys at the top, such as name: demo, got 'demo'"),
        (b"name: \xff\n", "spec.yaml: byte 7 is not UTF-8; save the file as UTF-8"),
        (b"name: a\x00\n", "spec.yaml:1: the character U+0000 is not allowed in YAML; take it out"),
        (b"name: a\n\tnodes: 1\n",
         "spec.yaml:2: is no YAML: while scanning for the next token, "
         "found character '\\t' that cannot start any token"),
        (b"name: 'a\n", "spec.yaml:2: is no YAML: while scanning a quoted scalar, found unexpected end of stream"),
        (b"name: a: b\n", "spec.yaml:1: is no YAML: mapping values are not allowed here"),
        (b"name: a\n---\nname: b\n", "spec.yaml:3: a second document begins here; a spec is one"),
        (b"name: a\n? [x]\n: 1\n", "spec.yaml:2: a list can't be a key; put the value in quotes if it is text"),
        (b"a: " + b"[" * 9 + b"]" * 9, "spec.yaml:1: values are nested more than 8 deep"),
        (b"a: " + b"[" * 60_000, "spec.yaml:1: values are nested more than 8 deep"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_spec_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "spec.yaml").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(Path("spec.yaml"), cwd=tmp_path)
    assert caught.value.problems == (expected,)


def test_a_file_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(Path("none.yaml"), cwd=tmp_path)
    assert caught.value.problems == ("none.yaml: can't be read: No such file or directory",)


def test_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path, cwd=tmp_path)
    assert caught.value.problems == (f"{tmp_path}: can't be read: Is a directory",)


def test_a_byte_order_mark_and_dos_lines_are_fine(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes("\ufeffname: demo\r\ntime_limit: 60\r\n".encode())
    assert load_spec(Path("spec.yaml"), cwd=tmp_path).name == "demo"


def test_a_working_folder_with_a_line_break_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a\nb"
    folder.mkdir()
    (folder / "spec.yaml").write_text("name: demo\ntime_limit: 60\ndataset: {root: /data}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(Path("spec.yaml"), cwd=folder)
    assert [problem.split(": ")[:2] for problem in caught.value.problems] == [["spec.yaml:1", "run_root"]]
    assert len(caught.value.problems[0].splitlines()) == 1


@pytest.mark.parametrize("key", ["[", "[0]", "[0] ", "[key]"])
def test_key_that_looks_like_an_entry_of_a_list_is_told_as_it_stands(tmp_path: Path, key: str) -> None:
    assert problems(tmp_path, f"name: demo\ntime_limit: 60\n'{key}': 1\n") == [f"spec.yaml:3: {key}: unknown key"]
    found = problems(tmp_path, f"name: demo\ntime_limit: 60\nenv:\n  '{key}': x\n")
    assert found == [f"spec.yaml:4: env.{key}: {key!r} is no name of a variable; use letters, digits and _"]


def test_key_of_any_length_is_told_in_short(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, f"name: demo\ntime_limit: 60\n{'k' * 900}: 1\n")
    assert found == f"spec.yaml:3: '{'k' * 57}...': unknown key"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sbatch: {\"\\r_\": 1}", "sbatch.'\\r_': '\\r_' is no long name of an sbatch flag, such as licenses"),
        ("comment: !%0Ax b",
         "comment: !\\nx is a YAML tag, which a spec doesn't use; write the value itself, in quotes if it is text"),
        ("comment: 2024-01-01 \u00a0x", "comment: 2024-01-01 \\xa0x may be read as a date; put it in quotes"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_escaped_in_a_message(tmp_path: Path, line: str, expected: str) -> None:
    assert value_problem(tmp_path, line) == expected
