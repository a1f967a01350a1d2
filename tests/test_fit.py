"""Which specs the recorded cluster can run, see tests/sites, and what is said of the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import fit
from cluster.fit import judge
from cluster.site import Site
from cluster.site_answers import Limits, Qos
from tests.sites import recorded_site
from tests.specs import load

# Fits: two of the three nodes of partition gpu, whatever type their GPUs are.
FITS = {"name": "demo", "time_limit": "60", "nodes": "1", "account": "teaching"}


def verdict_of(tmp_path: Path, site: Site, **keys: str) -> fit.Verdict:
    if "long" in keys.get("partition", "") and not any(key.startswith("memory") for key in keys):
        keys["memory_per_node"] = "1G"
    text = "".join(f"{key}: {value}\n" for key, value in (FITS | keys).items() if value)
    return judge(load(tmp_path, text + "train: {global_batch_size: 512}\n"), site)


def found(problems: tuple[fit.Problem, ...]) -> list[str]:
    return [f"{key}: {message}" for key, message in problems]


@pytest.fixture
def site() -> Site:
    """As a member of the group daemon sees it."""
    return replace(recorded_site(), groups=frozenset({"daemon"}))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"nodes": "2"},
        {"nodes": "1-2"},
        {"time_limit": "2:00:00"},
        {"gpus_per_node": "4"},
        {"gpus_per_node": "a100:4", "constraint": "a100&ib"},
        {"gpus_per_node": "A100:4"},
        {"cpus_per_task": "16"},
        {"memory_per_node": "500G"},
        {"memory_per_cpu": "64000M", "cpus_per_task": "8"},
        {"partition": "gpu,long", "time_limit": "12:00:00", "cpus_per_task": "2"},
        {"partition": "long", "nodes": "3", "exclude": "n2"},
        {"partition": "long", "nodes": "2", "nodelist": "'n[3-4]'"},
        {"partition": "long", "account": "research", "time_limit": "30"},
        {"account": "Teaching", "qos": "HIGH"},
        {"sbatch": "{gres: 'nvme:2'}"},
        {"sbatch": "{mincpus: 16}"},
        {"reservation": "course"},
        {"constraint": "'[a100|h100]'"},
    ],
    ids=str,
)
def test_spec_inside_the_limits_has_no_problem(tmp_path: Path, site: Site, keys: dict[str, str]) -> None:
    assert found(verdict_of(tmp_path, site, **keys).problems) == []


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        # Partitions.
        ({"partition": "gpuu"}, ["partition: 'gpuu' is no partition of this cluster; did you mean gpu?"]),
        ({"partition": "xyz"},
         ["partition: 'xyz' is no partition of this cluster; there are gpu, lab, long, old"]),
        ({"partition": "gpu,lonk"}, ["partition: 'lonk' is no partition of this cluster; did you mean long?"]),
        ({"partition": "old"}, ["partition: old is DRAIN, and takes no jobs; use another, or wait until it is UP"]),
        ({"partition": "lab", "nodes": "1-2"},
         []),
        ({"partition": "lab", "nodes": "2"}, ["nodes: 2 is more than partition lab has, 1 node; use at most that"]),
        ({"partition": "lab", "nodes": "1"}, ["nodes: 1 is under the limit of partition lab, MinNodes=2; use 2"]),
        ({"partition": "lab", "nodes": "1-2", "qos": "high"},
         ["qos: high may not use partition lab, DenyQos=high"]),
        # Time.
        ({"time_limit": "2:00:01"},
         ["time_limit: 2:00:01 is over the limit of partition gpu, MaxTime=02:00:00; use at most that, or partition "
          "long"]),
        ({"time_limit": "8-0", "partition": "gpu,long"},
         ["time_limit: 8-0 is over the limit of partition gpu, MaxTime=02:00:00; use at most that",
          "time_limit: 8-0 is over the limit of partition long, MaxTime=7-00:00:00; use at most that",
          "time_limit: 8-0 is over the limit of QOS capped of partition long, MaxWall=1-00:00:00; use at most that, or "
          "another partition"]),
        # Number of nodes; of a range Slurm 22.05.8 wants both ends to be within MaxNodes (PartitionNodeLimit).
        ({"nodes": "3"}, ["nodes: 3 is over the limit of partition gpu, MaxNodes=2; use 2"]),
        ({"nodes": "1-3"}, ["nodes: 1-3 is over the limit of partition gpu, MaxNodes=2; use 1-2"]),
        ({"nodes": "5", "partition": "long", "cpus_per_task": "2"},
         ["nodes: 5 is more than partition long has, 4 nodes; use at most that"]),
        # GPUs.
        ({"gpus_per_node": "5"},
         ["gpus_per_node: each node must have 5 GPUs; partition gpu has no such node; the most is 4 GPUs"]),
        ({"gpus_per_node": "v100:2"},
         ["gpus_per_node: each node must have 2 v100 GPUs; partition gpu has no such node; its GPUs are a100:4, "
          "h100:2"]),
        ({"gpus_per_node": "h100:2", "nodes": "2"},
         ["gpus_per_node: each node must have 2 h100 GPUs; partition gpu has 1 such node, and nodes is 2"]),
        ({"gpus_per_node": "1", "partition": "lab", "nodes": "1-2"},
         ["gpus_per_node: each node must have 1 GPU; partition lab has no such node; its GPUs are none"]),
        ({"sbatch": "{gres: 'nvme:3'}"},
         ["sbatch.gres: each node must have 3 nvmes; partition gpu has no such node; the most is 2 nvmes"]),
        # CPUs.
        ({"cpus_per_task": "17"},
         ["cpus_per_task: each node must have 17 CPUs; partition gpu has no such node; the most is 16 CPUs"]),
        ({"tasks_per_node": "5", "cpus_per_task": "4"},
         ["cpus_per_task: each node must have 20 CPUs (5 ranks of 4); partition gpu has no such node; the most is 16 "
          "CPUs"]),
        ({"tasks_per_node": "17"},
         ["tasks_per_node: each node must have 17 CPUs (17 ranks of 1); partition gpu has no such node; the most is 16 "
          "CPUs"]),
        ({"sbatch": "{mincpus: 20}"},
         ["sbatch.mincpus: each node must have 20 CPUs; partition gpu has no such node; the most is 16 CPUs"]),
        ({"partition": "long", "cpus_per_task": "13"},
         ["cpus_per_task: 13 CPUs on each node are over the limit of partition long, MaxCPUsPerNode=12; use at most "
          "that"]),
        # Memory, by each of the three keys.
        ({"memory_per_node": "501G"},
         ["memory_per_node: each node must have 513024 MiB of memory; partition gpu has no such node; the most is "
          "512000 MiB"]),
        ({"memory_per_node": "400G", "nodes": "1-2", "gpus_per_node": "h100:1"},
         ["nodes: 1-2 asked for, and 0 nodes of partition gpu with 1 CPU, 409600 MiB of memory, 1 h100 GPU at once; "
          "ask for less"]),
        ({"memory_per_cpu": "60G", "cpus_per_task": "10"},
         ["memory_per_cpu: each node must have 614400 MiB of memory; partition gpu has no such node; the most is "
          "512000 MiB"]),
        ({"memory_per_gpu": "300G", "gpus_per_node": "2"},
         ["memory_per_gpu: each node must have 614400 MiB of memory; partition gpu has no such node; the most is "
          "512000 MiB"]),
        ({"memory_per_node": "240G", "partition": "long"},
         ["memory_per_node: 245760 MiB on each node are over the limit of partition long, MaxMemPerNode=200000; use at "
          "most that",
          "memory_per_node: 245760 MiB in all are over the limit of QOS capped of partition long, MaxTRES mem=102400M; "
          "ask for at most that, or use another partition"]),
        ({"partition": "long", "memory_per_node": ""},
         ["memory_per_node: is needed: partition long has MaxMemPerNode=200000, and this cluster no default; use at "
          "most 200000M"]),
        # Features.
        ({"constraint": "a10"}, ["constraint: 'a10' is a feature of no node; did you mean a100?"]),
        ({"constraint": "a100|xyz"},
         ["constraint: 'xyz' is a feature of no node; there are a100, cpu, h100, ib"]),
        ({"constraint": "a100&h100"},
         ["constraint: a100&h100 holds for 0 nodes of partition gpu, and nodes is 1; its features are a100, h100, ib"]),
        ({"constraint": "h100", "nodes": "2"},
         ["constraint: h100 holds for 1 node of partition gpu, and nodes is 2; its features are a100, h100, ib"]),
        ({"constraint": "a100", "gpus_per_node": "h100:1"},
         ["nodes: 1 asked for, and 0 nodes of partition gpu with 1 CPU, 1 h100 GPU, the features a100 at once; ask "
          "for less"]),
        # Names of nodes.
        ({"nodelist": "n9"}, ["nodelist: 'n9' is no node of this cluster; there are n1, n2, n3, n4"]),
        ({"exclude": "'n1,h200-dev-145-040'"},
         ["exclude: 'h200-dev-145-040' is no node of this cluster; there are n1, n2, n3, n4"]),
        ({"nodelist": "'n[3-4]'", "nodes": "2"}, ["nodelist: n4 is not in partition gpu"]),
        ({"nodelist": "'n[1-2]'"},
         ["nodelist: n[1-2] names 2 nodes, which must all be part of the job, and nodes is 1; name fewer, or ask for "
          "2"]),
        ({"nodelist": "n1", "exclude": "'n[1-2]'"},
         ["exclude: n1 is also in nodelist; take it out of one"]),
        ({"exclude": "'n[1-2]'", "nodes": "2"},
         ["exclude: n[1-2] leaves 1 node of partition gpu that fit, and nodes is 2; leave out fewer"]),
        # Reservations.
        ({"reservation": "coarse"}, ["reservation: 'coarse' is no reservation that daemon may see; did you mean "
                                     "course?"]),
        ({"reservation": "maint"}, ["reservation: maint is for root, not for daemon; use another, or none"]),
        # Accounts and QOS.
        ({"account": "teachin"}, ["account: 'teachin' is no account of this cluster; did you mean teaching?"]),
        ({"account": "outside"}, ["account: user daemon may not charge account outside; use research, teaching"]),
        ({"account": "research"}, ["account: research is not for the default partition; it is for long"]),
        ({"account": ""}, ["account: research is not for the default partition; it is for long"]),
        ({"account": "research", "partition": "gpu"}, ["account: research is not for partition gpu; it is for long"]),
        ({"account": "research", "partition": "long", "time_limit": "30", "cpus_per_task": "13"},
         ["cpus_per_task: 13 CPUs on each node are over the limit of partition long, MaxCPUsPerNode=12; use at most "
          "that"]),
        ({"qos": "hihg"}, ["qos: 'hihg' is no QOS of this cluster; did you mean high?"]),
        ({"qos": "forbidden"}, ["qos: account teaching may not use forbidden; it may use high, normal"]),
        ({"account": "research", "partition": "long", "nodes": "4"},
         ["nodes: 4 nodes in all are over the limit of account research, MaxTRES node=3; ask for at most that, or use "
          "another account"]),
        # The partition's QOS has a MaxWall of its own, so that of the account, half an hour, does not count.
        ({"account": "research", "partition": "long", "time_limit": "1-1"},
         ["time_limit: 1-1 is over the limit of QOS capped of partition long, MaxWall=1-00:00:00; use at most that, or "
          "another partition"]),
        ({"partition": "long", "nodes": "3", "cpus_per_task": "7"},
         ["cpus_per_task: 21 CPUs in all are over the limit of QOS capped of partition long, MaxTRES cpu=20; ask for "
          "at most that, or use another partition"]),
        # All at once.
        ({"nodes": "3", "time_limit": "3:00:00", "gpus_per_node": "8", "qos": "zzz"},
         ["qos: 'zzz' is no QOS of this cluster; there are capped, forbidden, high, normal, tiny",
          "time_limit: 3:00:00 is over the limit of partition gpu, MaxTime=02:00:00; use at most that, or partition "
          "long",
          "nodes: 3 is over the limit of partition gpu, MaxNodes=2; use 2",
          "gpus_per_node: each node must have 8 GPUs; partition gpu has no such node; the most is 4 GPUs",
          ]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_spec_that_the_cluster_can_never_run_has_a_problem_for_each_limit(
    tmp_path: Path, site: Site, keys: dict[str, str], problems: list[str]
) -> None:
    assert found(verdict_of(tmp_path, site, **keys).problems) == problems


def test_nodes_that_are_down_or_drained_are_waited_for_with_a_warning(tmp_path: Path, site: Site) -> None:
    verdict = verdict_of(tmp_path, site, nodes="2", gpus_per_node="a100:4")
    assert (found(verdict.problems), found(verdict.warnings)) == (
        [],
        ["nodes: 2 asked for, and of 2 that fit in partition gpu 1 is down or drained: the job waits for n2 "
         "(DRAIN+IDLE)"],
    )  # fmt: skip
    verdict = verdict_of(tmp_path, site, nodelist="n2")
    assert found(verdict.warnings) == ["nodelist: n2 (DRAIN+IDLE) take no jobs at present: the job waits for them"]
    assert verdict_of(tmp_path, site, nodes="2").warnings == ()


def test_partition_that_fits_in_another_way_makes_the_misfit_a_warning(tmp_path: Path, site: Site) -> None:
    verdict = verdict_of(tmp_path, site, partition="gpu,long", time_limit="3:00:00")
    assert (found(verdict.problems), found(verdict.warnings)) == (
        [],
        [
            "time_limit: 3:00:00 is over the limit of partition gpu, MaxTime=02:00:00; use at most that, or partition "
            "long"
        ],
    )
    strict = replace(site, config={**(site.config or {}), "EnforcePartLimits": "ALL"})
    assert len(verdict_of(tmp_path, strict, partition="gpu,long", time_limit="3:00:00").problems) == 1


def test_account_that_a_partition_does_not_list_is_a_warning_as_it_may_be_below_one_that_it_does(
    tmp_path: Path, site: Site
) -> None:
    """Sisters: DenyAccounts refuses by a name that is listed, which holds on every release; QOS have no hierarchy."""
    free = replace(site, config={**(site.config or {}), "AccountingStorageEnforce": "none"})
    verdict = verdict_of(tmp_path, free, partition="lab", nodes="1-2", account="child")
    words = "child is not one of partition lab's AllowAccounts=teaching: the job may wait for ever, unless it is below"
    assert (verdict.problems, found(verdict.warnings)) == ((), [f"account: {words} one of them"])
    assert verdict_of(tmp_path, free, partition="lab", nodes="1-2", account="teaching").warnings == ()


def test_limits_on_the_number_of_jobs_are_notes(tmp_path: Path, site: Site) -> None:
    verdict = verdict_of(tmp_path, site, partition="long", account="research", time_limit="30")
    assert found(verdict.notes) == ["account: account research runs at most 4 jobs of a user at once (MaxJobs)"]


def test_partition_that_is_down_is_waited_for(tmp_path: Path, site: Site) -> None:
    down = replace(site, partitions=tuple(replace(p, state="DOWN") for p in site.partitions or ()))
    verdict = verdict_of(tmp_path, down)
    assert (verdict.problems, found(verdict.warnings)) == (
        (), ["partition: gpu is DOWN: the job waits until it is up again"],
    )  # fmt: skip


def test_partition_for_other_groups_or_for_root_is_refused(tmp_path: Path, site: Site) -> None:
    stranger = replace(site, groups=frozenset({"users"}))
    assert found(verdict_of(tmp_path, stranger, partition="lab", nodes="1-2").problems) == [
        "partition: lab is for the groups daemon, and daemon is in none of them"
    ]
    assert verdict_of(tmp_path, replace(stranger, is_root=True), partition="lab", nodes="1-2").problems == ()
    closed = replace(
        site, partitions=tuple(replace(p, is_root_only=True, needs_reservation=True) for p in site.partitions or ())
    )
    assert found(verdict_of(tmp_path, closed).problems) == [
        "partition: gpu is for jobs with a reservation only; give the key reservation",
        "partition: gpu is for root only; use another",
    ]


def test_partition_that_refuses_root_refuses_root_alone(tmp_path: Path, site: Site) -> None:
    closed = replace(site, partitions=tuple(replace(p, refuses_root=True) for p in site.partitions or ()))
    assert verdict_of(tmp_path, closed).problems == ()
    assert found(verdict_of(tmp_path, replace(closed, is_root=True)).problems) == [
        "partition: gpu takes no jobs of root; submit as another user"
    ]


def test_cluster_without_a_default_partition_wants_one(tmp_path: Path, site: Site) -> None:
    none = replace(site, partitions=tuple(replace(p, is_default=False) for p in site.partitions or ()))
    assert found(verdict_of(tmp_path, none).problems) == [
        "partition: is needed: this cluster has no default; use gpu, lab, long, old"
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("partition", "'any' is no partition of this cluster; there are gpu, lab, long, old"),
        ("account", "'any' is no account of this cluster; there are research, teaching"),
        ("qos", "'any' is no QOS of this cluster; there are capped, forbidden, high, normal, tiny"),
    ],
)
def test_unknown_name_is_only_warned_of_where_a_plug_in_may_know_it(
    tmp_path: Path, site: Site, key: str, message: str
) -> None:
    with_plugin = replace(site, config={**(site.config or {}), "JobSubmitPlugins": "lua"})
    verdict = verdict_of(tmp_path, with_plugin, **{key: "any"})
    assert (verdict.problems, found(verdict.warnings)) == ((), [f"{key}: {message}"])
    assert found(verdict_of(tmp_path, site, **{key: "any"}).problems) == [f"{key}: {message}"]
    assert len(verdict_of(tmp_path, with_plugin, time_limit="9-0").problems) == 1


def test_qos_may_lift_a_partitions_limits_and_has_its_own(tmp_path: Path, site: Site) -> None:
    lifted = replace(
        site,
        qos=tuple(
            replace(qos, flags=frozenset({"PartitionTimeLimit", "PartitionMaxNodes"})) if qos.name == "high" else qos
            for qos in site.qos or ()
        ),
    )
    assert verdict_of(tmp_path, lifted, qos="high", time_limit="5:00:00", nodes="3").problems == ()
    allowed = replace(site, associations=tuple(replace(a, qos=(*a.qos, "tiny")) for a in site.associations or ()))
    assert found(
        verdict_of(tmp_path, allowed, qos="tiny", time_limit="20", nodes="2", cpus_per_task="16").problems
    ) == [
        "time_limit: 20 is over the limit of QOS tiny, MaxWall=00:10:00; use at most that, or another qos",
        "cpus_per_task: 32 CPUs in all are over the limit of QOS tiny, GrpTRES cpu=30; ask for at most that, or use "
        "another qos",
    ]


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (Limits(max_tres_per_node={"gres/gpu": 1}),
         "gpus_per_node: 2 GPUs in a node are over the limit of QOS high, MaxTRESPerNode gres/gpu=1; ask for at most "
         "that, or use another qos"),
        (Limits(max_tres={"gres/gpu:a100": 3}),
         "gpus_per_node: 4 a100 GPUs in all are over the limit of QOS high, MaxTRES gres/gpu:a100=3; ask for at most "
         "that, or use another qos"),
        (Limits(max_tres_per_user={"node": 1}),
         "nodes: 2 nodes in all are over the limit of QOS high, MaxTRESPerUser node=1; ask for at most that, or use "
         "another qos"),
        (Limits(grp_tres={"mem": 1000}),
         "memory_per_node: 2048 MiB in all are over the limit of QOS high, GrpTRES mem=1000M; ask for at most that, or "
         "use another qos"),
        (Limits(min_tres={"node": 3}), "nodes: 2 is under the limit of QOS high, MinTRES node=3; use 3"),
    ],
)  # fmt: skip
def test_every_limit_of_a_qos_is_held_against_what_the_job_asks_for(
    tmp_path: Path, site: Site, limits: Limits, problem: str
) -> None:
    keys = {"nodes": "2", "gpus_per_node": "a100:2", "memory_per_node": "1G", "qos": "high"}
    assert verdict_of(tmp_path, site, **keys).problems == ()
    limited = replace(site, qos=tuple(replace(q, limits=limits) if q.name == "high" else q for q in site.qos or ()))
    assert found(verdict_of(tmp_path, limited, **keys).problems) == [problem]
    unenforced = replace(limited, config={**(site.config or {}), "AccountingStorageEnforce": "associations,qos"})
    assert verdict_of(tmp_path, unenforced, **keys).problems == ()


@pytest.mark.parametrize(
    ("flags", "limit"), [((), "capped of partition long, MaxTRES cpu=20"), (("OverPartQOS",), "high, MaxTRES cpu=10")]
)
def test_qos_of_a_partition_counts_before_the_jobs_unless_that_says_so(
    tmp_path: Path, site: Site, flags: tuple[str, ...], limit: str
) -> None:
    high = Qos("high", frozenset(flags), Limits(max_tres={"cpu": 10}))
    limited = replace(site, qos=tuple(high if qos.name == "high" else qos for qos in site.qos or ()))
    (problem,) = verdict_of(tmp_path, limited, qos="high", partition="long", nodes="3", cpus_per_task="7").problems
    assert problem.message.split("; ")[0] == f"21 CPUs in all are over the limit of QOS {limit}"


@pytest.mark.parametrize("unlearned", ["partitions", "nodes", "reservations", "config", "associations", "qos"])
def test_nothing_is_concluded_from_what_was_not_answered(tmp_path: Path, site: Site, unlearned: str) -> None:
    wrong = {
        "partitions": {"partition": "nosuch"},
        "nodes": {"cpus_per_task": "99", "constraint": "nosuch", "nodelist": "n9", "gpus_per_node": "9"},
        "reservations": {"reservation": "nosuch"},
        "config": {"account": "nosuch", "qos": "nosuch"},
        "associations": {"account": "nosuch"},
        "qos": {"qos": "nosuch"},
    }[unlearned]
    assert verdict_of(tmp_path, site, **wrong).problems != ()
    assert verdict_of(tmp_path, replace(site, **{unlearned: None}), **wrong).problems == ()  # type: ignore[arg-type]


def test_names_are_taken_as_they_are_where_slurm_does_not_enforce_them(tmp_path: Path, site: Site) -> None:
    free = replace(site, config={**(site.config or {}), "AccountingStorageEnforce": "none"})
    assert verdict_of(tmp_path, free, account="nosuch", qos="nosuch").problems == ()
    assert verdict_of(tmp_path, free, partition="lab", nodes="1-2", account="nosuch").problems == ()


def test_memory_for_each_cpu_counts_only_where_slurm_counts_memory(tmp_path: Path, site: Site) -> None:
    """Slurm 22.05.8 with CR_Core runs a job of 10 CPUs with 60 GiB each on a node of 500 GiB."""
    uncounted = replace(site, config={**(site.config or {}), "SelectTypeParameters": "CR_CORE"})
    keys = {"memory_per_cpu": "60G", "cpus_per_task": "10"}
    assert verdict_of(tmp_path, uncounted, **keys).problems == ()
    assert len(verdict_of(tmp_path, site, **keys).problems) == 1


def test_local_run_is_not_judged(tmp_path: Path, site: Site) -> None:
    assert judge(load(tmp_path, "name: demo\ncluster: local\n"), replace(site, partitions=())) == fit.Verdict()
