import pytest

from cluster.refusals import keys_to_look_at

FAILED = "sbatch: error: Batch job submission failed: "
FLAGS = {
    "nodes": 4, "account": "0042", "partition": "gpu", "qos": "high", "exclude": "n[3,9]", "time": "12:00:00",
    "gpus-per-node": "a100:8", "mem": "65536M", "licenses": "fluent:1", "nice": "x", "hold": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("Invalid account or account/partition combination specified", "account: 0042, partition: gpu"),
        ("Invalid partition name specified", "partition: gpu"),
        ("Invalid qos specification", "qos: high, account: 0042"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
         "qos: high, account: 0042, nodes: 4, time_limit: 12:00:00, gpus_per_node: a100:8, memory_per_node: 65536M"),
        ("Invalid node name specified", "exclude: n[3,9]"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time_limit: 12:00:00, partition: gpu"),
        ("Invalid generic resource (gres) specification", "gpus_per_node: a100:8"),
        ("Memory specification can not be satisfied", "memory_per_node: 65536M"),
        ("Node count specification invalid", "nodes: 4, partition: gpu"),
        ("Requested node configuration is not available",
         "nodes: 4, gpus_per_node: a100:8, memory_per_node: 65536M"),
        ("Invalid license specification", "sbatch.licenses: fluent:1"),
        ("Invalid --nice specification", "sbatch.nice: x"),
        ("Access/permission denied", ""),
    ],
)  # fmt: skip
def test_refusal_names_the_keys_that_it_may_be_about(words: str, keys: str) -> None:
    assert keys_to_look_at(FAILED + words, FLAGS) == keys
