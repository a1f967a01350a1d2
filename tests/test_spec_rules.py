from pathlib import Path

import pytest

from tests.specs import load, problems


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["nodes: 2", "faults: [{at_step: 0, rank: 1, do: kill_save}]"],
         ["4: faults.rank: 1 never saves; kill_save needs rank 0"]),
        (["nodes: 2", "faults: [{at_step: 0, rank: 1, do: port}]"],
         ["4: faults.rank: 1 serves no store; port needs rank 0"]),
        (["sbatch: {distribution: cyclic}"],
         ["3: sbatch.distribution: 'cyclic' does not fill one node after the other, and a rank's number has to tell "
          "its node; use block, as in block:cyclic, or leave it out"]),
        (["sbatch: {distribution: plane=2}"],
         ["3: sbatch.distribution: 'plane=2' does not fill one node after the other, and a rank's number has to tell "
          "its node; use block, as in block:cyclic, or leave it out"]),
        (["sbatch: {distribution: arbitrary}"],
         ["3: sbatch.distribution: 'arbitrary' does not fill one node after the other, and a rank's number has to tell "
          "its node; use block, as in block:cyclic, or leave it out"]),
        (["memory_per_node: 1G", "memory_per_cpu: 1G"],
         ["4: memory_per_cpu: memory_per_node and memory_per_cpu exclude each other; keep one"]),
        (["memory_per_cpu: 1G", "memory_per_node: 1G"],
         ["4: memory_per_node: memory_per_node and memory_per_cpu exclude each other; keep one"]),
        (["memory_per_gpu: 1G"],
         ["3: memory_per_gpu: memory_per_gpu needs gpus_per_node; give it, or use memory_per_node"]),
        (["train:", "  global_batch_size: 8", "  batch_size_per_rank: 8"],
         ["5: train.batch_size_per_rank: batch_size_per_rank and global_batch_size exclude each other; keep one"]),
        (["train:", "  epochs: 2", "  warmup_epochs: 3"],
         ["5: train.warmup_epochs: warmup_epochs 3.0 is more than epochs 2"]),
        (["signal_lead_s: 3510"],
         ["3: signal_lead_s: time_limit 1:00:00 is 3600 s and must exceed signal_lead_s + 90 s = 3600 s; "
          "give more time or a shorter lead"]),
        (["gpus_per_node: 2", "tasks_per_node: 4"],
         ["4: tasks_per_node: tasks_per_node 4 is more than the GPUs of gpus_per_node 2; each rank needs its own"]),
        (["train: {device: cuda}"],
         ["3: train.device: train.device is cuda, but no GPUs are asked for; give gpus_per_node"]),
        (["dataset:", "  num_train: 5"],
         ["4: dataset.num_train: num_train is for kind synthetic, but kind is cifar10; leave num_train out"]),
        (["dataset:", "  kind: synthetic", "  accept_unpublished_md5: true"],
         ["5: dataset.accept_unpublished_md5: accept_unpublished_md5 is for the CIFAR archives, but kind is synthetic; "
          "leave it out"]),
        (["cluster: local", "nodes: 2"],
         ["4: nodes: nodes is 2, but cluster is local, which is one node; leave nodes out"]),
        (["cluster: local", "partition: gpu", "exclusive: true", "sbatch: {nice: 1}"],
         ["4: partition: partition is for Slurm, but cluster is local; leave partition out",
          "5: exclusive: exclusive is for Slurm, but cluster is local; leave exclusive out",
          "6: sbatch: sbatch is for Slurm, but cluster is local; leave sbatch out"]),
        (["partition: gpu", "cluster: local"],
         ["4: cluster: partition is for Slurm, but cluster is local; leave partition out"]),
    ],
)  # fmt: skip
def test_a_broken_rule_between_keys_is_told_at_the_later_key(
    tmp_path: Path, lines: list[str], expected: list[str]
) -> None:
    text = "\n".join(["name: demo", "time_limit: 1:00:00", *lines])
    assert problems(tmp_path, text) == [f"spec.yaml:{line}" for line in expected]


def test_the_lead_just_fits_into_the_time_limit(tmp_path: Path) -> None:
    assert load(tmp_path, "name: demo\ntime_limit: 1:00:00\nsignal_lead_s: 3509\n").signal_lead_s == 3509


def test_a_local_run_needs_no_time_limit(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: demo\ncluster: local\n")
    assert (spec.time_limit, spec.time_limit_s, spec.slurm_time) == (None, None, None)


def test_missing_keys_are_told_at_line_1(tmp_path: Path) -> None:
    assert problems(tmp_path, "# nothing here\n\nnodes: 2\n") == [
        "spec.yaml:1: name: is required; add it",
        "spec.yaml:1: time_limit: is required on Slurm; give the time one allocation may take, such as 8:00:00",
    ]


def test_all_problems_come_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = """\
name: a/b
time_limit: '10:00:'
train:
  lr: fast
  epoch: 3
memory_per_node: 1G
memory_per_node: 2G
memory_per_cpu: 1G
"""
    assert problems(tmp_path, text, "nodes=none", "train.momentum=2") == [
        "spec.yaml:1: name: 'a/b' is no name for a folder; leave out /, \\, a leading dash and outer white space",
        "spec.yaml:2: time_limit: '10:00:' is no Slurm time; use minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S",
        "spec.yaml:4: train.lr: 'fast' is no number",
        "spec.yaml:5: train.epoch: unknown key; did you mean epochs?",
        "spec.yaml:7: memory_per_node: duplicate key; the first is on line 6",
        "spec.yaml:8: memory_per_cpu: memory_per_node and memory_per_cpu exclude each other; keep one",
        "command line: nodes: 'none' is no whole number",
        "command line: train.momentum: 2 is too large; it must be less than 1.0",
    ]


def test_a_rule_is_silent_about_a_key_that_is_wrong_itself(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: demo\ncluster: lokal\n") == [
        "spec.yaml:2: cluster: 'lokal' is not known here; use slurm or local; did you mean local?"
    ]
