"""The drill's list of faults, and what it does to files and reads of Slurm."""

import hashlib
from pathlib import Path

import pytest

from cluster.drill_faults import FAULTS, choose, partition_tiers
from cluster.drill_run import flip_bit, truncate
from cluster.drill_spec import small_spec
from cluster.runs import UsageError
from cluster.spec import dump_spec, load_spec
from tests.training import write_spec

SLURM = "nodes: 4\ntime_limit: 8:00:00\npartition: low\nmail_user: me\nmail_type: END"

# `scontrol show partition --oneliner` of a sandbox, Slurm 22.05.8, without what is not looked at
PARTITIONS = """\
PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES GraceTime=10 Hidden=NO MaxNodes=UNLIMITED \
PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE \
State=UP TotalCPUs=64 TotalNodes=4
PartitionName=high AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED \
PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF \
State=UP TotalCPUs=64 TotalNodes=4
PartitionName=closed AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO GraceTime=0 Hidden=NO \
PriorityJobFactor=1 PriorityTier=20 RootOnly=NO ReqResv=NO OverSubscribe=NO PreemptMode=OFF State=DOWN TotalNodes=4
"""


def test_faults_of_the_drill() -> None:
    assert [fault.key for fault in FAULTS] == [
        "preempt", "time-limit", "kill", "kill-save", "truncate", "bit", "disk", "stop", "signal", "port", "old",
    ]  # fmt: skip
    assert max(len(fault.title) for fault in FAULTS) <= 24


def test_faults_are_chosen_by_key_in_the_drills_order() -> None:
    assert choose(None) == FAULTS
    assert [fault.key for fault in choose("port,kill")] == ["kill", "port"]
    with pytest.raises(UsageError, match=r"^--only: fire, : no fault; there are preempt, "):
        choose("kill,fire,")


def test_partitions_that_are_up_have_their_tiers() -> None:
    assert partition_tiers(PARTITIONS) == {"low": 1, "high": 10}


def test_truncated_file_has_half_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(101)))
    truncate(path)
    assert path.read_bytes() == bytes(range(50))


def test_one_bit_is_flipped_and_flipped_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = hashlib.sha256(b"").digest() * 3
    path.write_bytes(content)
    flip_bit(path)
    differing = [a ^ b for a, b in zip(path.read_bytes(), content, strict=True)]
    assert [(place, bits) for place, bits in enumerate(differing) if bits] == [(50, 0x40)]
    flip_bit(path)
    assert path.read_bytes() == content


def test_small_spec_keeps_what_the_job_is_on_the_cluster(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "data", SLURM), cwd=tmp_path)
    fault = next(fault for fault in FAULTS if fault.key == "time-limit")
    small = small_spec(spec, [fault.in_spec(4)], maybe_step_timeout_s=900.0, time_limit=fault.time_limit)
    assert (small.name, small.nodes, small.partition, small.world_size) == ("tiny-drill", 4, "low", 4)
    assert (small.time_limit_s, small.signal_lead_s, small.mail_user, small.mail_type) == (120, 29, None, None)
    assert (small.train.model, small.train.global_batch(4), small.train.lr) == ("small", 60, 0.05)
    assert (small.train.epochs, small.dataset.num_train, small.checkpoint.every_steps) == (3, 450, 3)
    assert [(fault.do, fault.at_step, fault.rank) for fault in small.faults] == [("pause", 12, 3)]
    (tmp_path / "small.yaml").write_text(dump_spec(small))
    assert load_spec(tmp_path / "small.yaml", cwd=tmp_path, allow_faults=True) == small


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.key)
def test_every_small_spec_is_a_right_one_for_one_local_rank(fault: object, tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "data", "cluster: local"), cwd=tmp_path)
    small = small_spec(spec, [next(f for f in FAULTS if f is fault).in_spec(1)])
    (tmp_path / "small.yaml").write_text(dump_spec(small))
    assert load_spec(tmp_path / "small.yaml", cwd=tmp_path, allow_faults=True) == small
