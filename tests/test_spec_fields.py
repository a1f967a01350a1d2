from pathlib import Path

import pytest

from tests.specs import load, problems, value_problem


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nodes: 0", "nodes: 0 is too small; the least is 1"),
        ("nodes: -1", "nodes: -1 is too small; the least is 1"),
        ("nodes: 1.0", "nodes: 1.0 is no whole number"),
        ("nodes: '2'", "nodes: '2' is no whole number"),
        ("nodes: true", "nodes: true is no whole number"),
        ("nodes: 99999999", "nodes: 99999999 is too large; the most is 65533"),
        ("signal_lead_s: 9", "signal_lead_s: 9 is too small; the least is 10"),
        ("exclusive: 1", "exclusive: 1 is neither true nor false"),
        ("train: {lr: .inf}", "train.lr: .inf is no finite number"),
        ("train: {lr: .nan}", "train.lr: .nan is no finite number"),
        ("train: {lr: 1e999}", "train.lr: 1e999 is no finite number"),
        ("train: {lr: 0}", "train.lr: 0 is too small; it must be more than 0.0"),
        ("train: {lr: true}", "train.lr: true is no number"),
        ("train: {lr: '0.1'}", "train.lr: '0.1' is no number"),
        ("train: {momentum: 1}", "train.momentum: 1 is too large; it must be less than 1.0"),
        ("train: {model: resnet}",
         "train.model: 'resnet' is not known here; use resnet18 or small; did you mean resnet18?"),
        ("train: 5", "train: expected a section of keys, got 5"),
        ("train: [lr]", "train: expected a section of keys, got a list"),
        ("train: {keep_last: 1}", "train.keep_last: unknown key; did you mean checkpoint.keep_last?"),
        ("train: {run_root: x}", "train.run_root: unknown key; did you mean run_root, outside of train?"),
        ("epochs: 3", "epochs: unknown key; did you mean train.epochs?"),
        ("mem: 16G", "mem: unknown key; did you mean memory_per_node?"),
        ("time: 60", "time: unknown key; did you mean time_limit?"),
        ("ntasks_per_node: 4", "ntasks_per_node: unknown key; did you mean tasks_per_node?"),
        ("zzz: {a: ~}", "zzz: unknown key"),
        ("train: {\"a\\nb\": 1}", "train.'a\\nb': unknown key"),
        ("format_version: 2", "format_version: 2 is not known here; use 1"),
        ("dataset: {augment: [flip, flipp]}",
         "dataset.augment: 'flipp' is not known here; use flip, crop or cutout; did you mean flip?"),
        ("dataset: {augment: [flip, flip]}", "dataset.augment: 'flip' stands there twice"),
        ("setup: module load cuda", "setup: expected a list, such as [one, two], got 'module load cuda'"),
        ("setup: [a, 5]", "setup: 5 is read as a number; put it in quotes"),
        ('setup: ["a\\nb"]', "setup: 'a\\nb' holds the control character U+000A; take it out"),
        ("run_root: ~/runs", "run_root: '~/runs' is not expanded here; write the path itself"),
        ("run_root: $SCRATCH/runs", "run_root: '$SCRATCH/runs' is not expanded here; write the path itself"),
        ('run_root: "a\\0b"', "run_root: 'a\\x00b' holds the control character U+0000; take it out"),
        ("account: $proj", "account: '$proj' holds $, which nobody expands here; write the value itself"),
        ("account: -x", "account: '-x' begins with a dash, as only flags do"),
        ("partition: a b", "partition: 'a b' holds white space; Slurm's names are one word"),
        ("partition: ''", "partition: is empty; give a value or leave the key out"),
        ("constraint: [a100]", "constraint: expected text, got a list; put it in quotes if it is text"),
        ('comment: "a\\tb"', "comment: 'a\\tb' holds the control character U+0009; take it out"),
        ('comment: "a\\u2028b"', "comment: 'a\\u2028b' holds the control character U+2028; take it out"),
        ("gpus_per_node: 0", "gpus_per_node: '0' is no number of GPUs; use 8 or type:number, such as a100:8"),
        ("gpus_per_node: gpu:8", "gpus_per_node: 'gpu:8' is no number of GPUs; use 8 or type:number, such as a100:8"),
        ("gpus_per_node: a100", "gpus_per_node: 'a100' is no number of GPUs; use 8 or type:number, such as a100:8"),
        ("qos: *low",
         "qos: *low is a YAML alias, which a spec doesn't use; write the value itself, in quotes if it is text"),
        ("qos: &a low",
         "qos: &a is a YAML anchor, which a spec doesn't use; write the value itself, in quotes if it is text"),
        ("nodes: !!int 3",
         "nodes: !!int is a YAML tag, which a spec doesn't use; write the value itself, in quotes if it is text"),
        ("mail_type: END,FAILED",
         "mail_type: 'FAILED' is no mail type; use some of NONE, BEGIN, END, FAIL, REQUEUE, ALL, INVALID_DEPEND, "
         "STAGE_OUT, TIME_LIMIT, TIME_LIMIT_90, TIME_LIMIT_80, TIME_LIMIT_50, ARRAY_TASKS, with commas between"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_that_says_what_to_write(tmp_path: Path, line: str, expected: str) -> None:
    assert value_problem(tmp_path, line) == expected


@pytest.mark.parametrize("name", ["demo", "vit-ж 2", "学習", "a'; echo $HOME", "a%j", "x" * 128])
def test_a_name_that_a_folder_can_have_is_taken(tmp_path: Path, name: str) -> None:
    quoted = name.replace("'", "''")
    assert load(tmp_path, f"name: '{quoted}'\ntime_limit: 60\n").name == name


@pytest.mark.parametrize("name", [".", "..", "a/b", "-x", " a", "a "])
def test_a_name_that_no_folder_should_have_is_refused(tmp_path: Path, name: str) -> None:
    assert problems(tmp_path, f"name: '{name}'\ntime_limit: 60\n") == [
        f"spec.yaml:1: name: '{name}' is no name for a folder; leave out /, \\, a leading dash and outer white space"
    ]


def test_the_length_of_a_name_counts_in_bytes(tmp_path: Path) -> None:
    assert problems(tmp_path, f"name: {'学' * 43}\ntime_limit: 60\n") == [
        f"spec.yaml:1: name: '{'学' * 43}' has 129 bytes in UTF-8; the most is 128"
    ]
