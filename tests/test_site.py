"""What Slurm's answers are read as.  The answers are recorded, see tests/sites."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import site_answers
from cluster.site import SACCTMGR, SCONTROL, look_up, make_site
from cluster.site_answers import Association, Gres, Limits, Node, Partition, Qos, Reservation
from tests.executables import put_answer, put_executable
from tests.sites import VERSIONS, answers, put_site, recorded_site

by_version = pytest.mark.parametrize("version", VERSIONS)


@by_version
def test_partitions_are_read_with_their_limits_and_who_may_use_them(version: str) -> None:
    qos = "capped" if version == "22.05.8" else None
    assert site_answers.partitions(answers(version)["partitions"]) == (
        Partition("gpu", is_default=True, num_nodes=3, max_nodes=2, max_time_s=7200),
        Partition(
            "long", num_nodes=4, max_time_s=604_800, max_cpus_per_node=12, max_memory_per_node_mib=200_000, qos=qos
        ),
        Partition(
            "lab", num_nodes=1, min_nodes=2, allow_groups=("daemon",), allow_accounts=("teaching",), deny_qos=("high",)
        ),
        Partition("old", state="DRAIN", num_nodes=1),
    )


@by_version
def test_nodes_are_read_with_gpus_features_and_states(version: str) -> None:
    a100, h100 = Gres("gpu", "a100", 4), Gres("gpu", "h100", 2)
    idle, first, last = frozenset({"IDLE"}), ("gpu", "long"), ("long", "lab", "old")
    found = site_answers.nodes(answers(version)["nodes"])
    assert [replace(node, host="", address="") for node in found] == [
        Node("n1", first, "", 16, 512_000, (a100, Gres("nvme", None, 2)), frozenset({"a100", "ib"}), idle),
        # The reason of the drain says "State=UP": free text, which counts for nothing.
        Node("n2", first, "", 16, 512_000, (a100,), frozenset({"a100", "ib"}), frozenset({"IDLE", "DRAIN"})),
        Node("n3", first, "", 16, 256_000, (h100,), frozenset({"h100", "ib"}), idle),
        Node("n4", last, "", 16, 128_000, (), frozenset({"cpu"}), idle),
    ]
    assert [node.is_absent for node in found] == [False, True, False, False]
    assert [node.count_gres("gpu", None) for node in found] == [4, 4, 2, 0]
    assert [node.count_gres("gpu", "H100") for node in found] == [0, 0, 2, 0]


@by_version
def test_reservations_are_read_with_their_users(version: str) -> None:
    assert site_answers.reservations(answers(version)["reservations"]) == (
        Reservation("maint", 1, ("root",), is_flexible=False),
        # On 22.05.8 it is an account's.
        Reservation("course", 2, () if version == "22.05.8" else ("root",), is_flexible=True),
    )
    assert site_answers.reservations("No reservations in the system\n") == ()


def test_accounts_and_qos_are_read_with_their_limits() -> None:
    site = recorded_site()
    assert site.associations == (
        Association(
            "research", "long", ("normal",), "normal", True, Limits(max_wall_s=1800, max_tres={"node": 3}, max_jobs=4)
        ),
        Association("teaching", None, ("high", "normal"), "normal"),
    )
    tiny = Limits(max_wall_s=600, max_tres={"node": 2}, grp_tres={"cpu": 30}, max_jobs=3, max_submitted=5)
    capped = Limits(max_wall_s=86_400, max_tres={"cpu": 20, "mem": 102_400})
    assert site.qos == (
        Qos("normal"), Qos("high"), Qos("tiny", limits=tiny), Qos("forbidden"), Qos("capped", limits=capped),
    )  # fmt: skip
    assert site.accounts == ("outside", "research", "root", "teaching")
    assert [site.enforces(word) for word in ("associations", "limits", "qos", "safe")] == [True, True, True, False]


def test_associations_of_other_clusters_are_not_the_users_here() -> None:
    told = {"config": "ClusterName = east\n", "associations": "west|a|||||||||\neast|b|||||||||\n"}
    assert make_site(told, {}, user="ann", uid=7).associations == (Association("b"),)


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("gpu:2", [Gres("gpu", None, 2)]),
        ("gpu:a100:4(S:0,1),nvme:1", [Gres("gpu", "a100", 4), Gres("nvme", None, 1)]),
        ("gpu:2(S:0-1)", [Gres("gpu", None, 2)]),
        ("gpu:3g.20gb:2,gpu:1g.5gb:3", [Gres("gpu", "3g.20gb", 2), Gres("gpu", "1g.5gb", 3)]),
        ("gpu:a100:no_consume:4", [Gres("gpu", "a100", 4)]),
        ("gpu", [Gres("gpu", None, 1)]),
        ("gres/nvme:2", [Gres("nvme", None, 2)]),
        ("bandwidth:lustre:4K", [Gres("bandwidth", "lustre", 4096)]),
        ("(null)", []),
        ("", []),
    ],
)
def test_generic_resources_are_read_in_every_form(text: str, gres: list[Gres]) -> None:
    assert list(site_answers.gres_list(text)) == gres


@pytest.mark.parametrize(
    ("facts", "known"),
    [
        ({"DefMemPerNode": "UNLIMITED", "JobDefaults": "(null)"}, False),
        ({"DefMemPerNode": "1000"}, True),
        ({"DefMemPerCPU": "1000"}, True),
        ({"DefMemPerNode": "UNLIMITED", "JobDefaults": "DefCpuPerGPU=2,DefMemPerGPU=1000"}, True),
    ],
)
def test_default_memory_is_found_in_every_form(facts: dict[str, str], known: bool) -> None:
    assert site_answers.has_default_memory(facts) is known


def test_limits_are_read_in_mebibytes_and_numbers() -> None:
    assert site_answers.tres("cpu=8,mem=1G,node=2,gres/gpu:a100=4,energy=x") == {
        "cpu": 8, "mem": 1024, "node": 2, "gres/gpu:a100": 4,
    }  # fmt: skip
    assert site_answers.tres("mem=500") == {"mem": 500}
    assert site_answers.tres("") == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("Partition_Limit", None),
        ("00:02:00", 120),
        ("365-00:00:00", 31_536_000),
    ],
)
def test_a_partitions_time_that_is_a_word_is_no_limit(text: str, seconds: int | None) -> None:
    (partition,) = site_answers.partitions(f"PartitionName=a MaxTime={text} State=UP\n")
    assert partition.max_time_s == seconds


def test_partition_whose_nodes_are_not_all_told_has_none_to_judge_by() -> None:
    site = recorded_site()
    assert site.partitions is not None
    assert site.nodes is not None
    gpu = site.partitions[0]
    assert [node.name for node in site.nodes_of(gpu) or ()] == ["n1", "n2", "n3"]
    assert replace(site, nodes=site.nodes[:2]).nodes_of(gpu) is None
    assert replace(site, nodes=None).nodes_of(gpu) is None


def test_everything_is_asked_and_accounts_only_where_there_is_accounting(tmp_path: Path) -> None:
    put_site(tmp_path / "bin")
    site = look_up({"PATH": str(tmp_path / "bin")})
    told = recorded_site()
    assert replace(site, user=told.user, is_root=told.is_root, groups=told.groups) == told
    put_site(tmp_path / "bin", is_calm=True)
    put_executable(tmp_path / "bin", "sacctmgr", "echo asked > $0.asked; exit 1")
    site = look_up({"PATH": str(tmp_path / "bin")})
    assert (site.associations, site.qos, site.accounts, site.unanswered) == (None, None, None, ())
    assert not (tmp_path / "bin/sacctmgr.asked").exists()


def test_questions_without_an_answer_are_named_and_the_others_count(tmp_path: Path) -> None:
    put_site(tmp_path / "bin")
    put_answer(tmp_path / "bin", "sacctmgr", errors="sacctmgr: error: slurm_persist_conn_open: failed", exit_code=1)
    site = look_up({"PATH": str(tmp_path / "bin")})
    assert (site.partitions, site.nodes) == (recorded_site().partitions, recorded_site().nodes)
    assert (site.associations, site.qos, site.accounts) == (None, None, None)
    assert site.unanswered == ("sacctmgr show user", "sacctmgr show qos", "sacctmgr show account")
    assert site.reasons[1].endswith(": exit code 1: sacctmgr: error: slurm_persist_conn_open: failed")


def test_a_slow_answer_is_not_waited_for(tmp_path: Path) -> None:
    put_executable(tmp_path / "bin", "scontrol", f"exec {os.path.realpath('/bin/sleep')} 300")
    site = look_up({"PATH": str(tmp_path / "bin")}, timeout_s=0.1)
    assert set(site.unanswered) == {f"scontrol show {name}" for name in ("partition", "node", "reservation", "config")}
    assert (site.partitions, site.nodes, site.config, site.associations) == (None, None, None, None)


def test_each_question_is_one_command_of_slurm() -> None:
    assert {argv[0] for argv in SCONTROL.values()} == {"scontrol"}
    assert {argv[0] for argv in SACCTMGR.values()} == {"sacctmgr"}
