"""Which nodes a run's history speaks against."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import exclude
from cluster.exclude import Blame, NodeFailure, bad_nodes, find_blame, maybe_node_of_rank
from cluster.plan import LaunchPlan
from cluster.requeue import Past
from cluster.runs import RunFolder, utc_now, write_json
from tests.test_launch import make_plan

NOW = "2026-11-30T12:00:00.000Z"
THIS_MORNING = "2026-11-30T08:00:00.000Z"
YESTERDAY = "2026-11-29T11:59:59.000Z"
NODES = ["n1", "n2", "n3", "n4"]


def failed(*failures: tuple[str, str]) -> list[NodeFailure]:
    return [NodeFailure(number, time, node) for number, (time, node) in enumerate(failures, start=1)]


@pytest.mark.parametrize(
    ("failures", "num_nodes", "bad"),
    [
        ([(THIS_MORNING, "n2")], 4, ()),
        ([(THIS_MORNING, "n2"), (NOW, "n2")], 4, ("n2",)),
        ([(THIS_MORNING, "n2"), (NOW, "n3")], 4, ()),
        ([(YESTERDAY, "n2"), (NOW, "n2")], 4, ()),
        ([(NOW, "n2"), (NOW, "n2")], 2, ("n2",)),
        ([(NOW, "n2"), (NOW, "n2"), (NOW, "n1"), (NOW, "n1")], 4, ()),
        ([(NOW, "n2"), (NOW, "n2"), (NOW, "n1"), (NOW, "n1")], 8, ("n1", "n2")),
    ],
    ids=["once", "twice", "two nodes once", "a day ago", "one of two nodes", "more than a quarter", "a quarter"],
)
def test_node_is_bad_that_failed_twice_within_a_day_while_others_worked(
    failures: list[tuple[str, str]], num_nodes: int, bad: tuple[str, ...]
) -> None:
    assert bad_nodes(failed(*failures), NOW, num_nodes) == bad


@pytest.mark.parametrize(
    ("rank", "nodes", "world_size", "node"),
    [(0, NODES, 8, "n1"), (5, NODES, 8, "n3"), (7, NODES, 8, "n4"), (None, NODES, 8, None), (2, NODES, 6, None),
     (0, ["n1"], 2, None)],
    ids=["first", "third node", "last", "no rank named", "uneven", "no other node"],
)  # fmt: skip
def test_rank_is_traced_to_its_node(rank: int | None, nodes: list[str], world_size: int, node: str | None) -> None:
    assert maybe_node_of_rank(rank, nodes, world_size) == node


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo" / "a")
    run.make()
    return run


def add_attempt(run: RunFolder, attempt: int, cause: str, rank: int | None, node: str | None = None) -> None:
    run.append_event("attempt_started", attempt=attempt, job_id="17", nodes=NODES, world_size=4)
    write_json(run.verdict(attempt), {"time": utc_now(), "cause": cause, "rank": rank, "node": node})


def plan_with(**flags: str) -> LaunchPlan:
    return replace(make_plan("true"), num_nodes=4, sbatch=flags)


def test_killed_and_hung_ranks_speak_against_their_nodes_and_failures_of_the_program_do_not(run: RunFolder) -> None:
    for attempt, (cause, rank) in enumerate([("exception", 1), ("killed", 1), ("hang", 1), ("connection", 2)], start=1):
        add_attempt(run, attempt, cause, rank)
    blame = find_blame(run, plan_with(), {})
    assert ([(failure.attempt, failure.node) for failure in blame.failures], blame.bad) == (
        [(2, "n2"), (3, "n2")],
        ("n2",),
    )


def test_node_that_srun_named_as_dead_needs_no_rank(run: RunFolder) -> None:
    for attempt in (1, 2):
        add_attempt(run, attempt, "node failure", None, node="n3")
    assert find_blame(run, plan_with(), {}).bad == ("n3",)


def test_node_that_cannot_start_ranks_is_left_out_at_once_be_it_half_of_the_job(run: RunFolder) -> None:
    run.append_event("attempt_started", attempt=1, job_id="17", nodes=["n1", "n2"], world_size=4)
    verdict = {"time": utc_now(), "cause": "launch", "rank": None, "node": "n1", "nodes": ["n1", "n2"]}
    blame = find_blame(run, replace(plan_with(), num_nodes=2), {1: verdict})
    assert (blame.bad, blame.absolve([Past("launch", 0)])) == (("n1", "n2"), [Past("bad node", 0)])


def test_first_node_of_a_job_that_never_had_a_supervisor_is_left_out_by_its_event(run: RunFolder) -> None:
    add_attempt(run, 1, "preempted", None)
    run.append_event("node_unfit", attempt=1, job_id="17", node="n3", reason="python: /opt/python is not on n3")
    blame = find_blame(run, plan_with(), {})
    assert blame.bad == ("n3",)
    assert exclude.excluded_before(run) == {"n3"}
    assert blame.absolve([Past("preempted", 7)]) == [Past("preempted", 7)]


def test_attempt_without_a_verdict_yet_counts_by_what_is_known_of_it(run: RunFolder) -> None:
    add_attempt(run, 1, "killed", 1)
    run.append_event("attempt_started", attempt=2, job_id="17", nodes=NODES, world_size=4)
    assert find_blame(run, plan_with(), {}).bad == ()
    assert find_blame(run, plan_with(), {2: {"cause": "killed", "rank": 1, "time": utc_now()}}).bad == ("n2",)


def test_node_that_the_spec_asks_for_is_not_left_out_and_neither_where_a_killed_rank_is_to_stop_the_run(
    run: RunFolder,
) -> None:
    add_attempt(run, 1, "killed", 1)
    add_attempt(run, 2, "killed", 1)
    assert find_blame(run, plan_with(nodelist="n[2-3]"), {}).bad == ()
    assert find_blame(run, replace(plan_with(), policy={"killed": "requeue"}), {}).bad == ("n2",)
    assert find_blame(run, replace(plan_with(), policy={"killed": "stop"}), {}) == Blame()


def test_failures_of_a_bad_node_are_laid_on_it_and_not_on_the_run() -> None:
    history = [Past("killed", 0), Past("exception", 7), Past("killed", 7), Past("killed", 7)]
    failures = (NodeFailure(1, NOW, "n2"), NodeFailure(3, NOW, "n2"), NodeFailure(4, NOW, "n3"))
    causes = [past.cause for past in Blame(failures, ("n2",)).absolve(history)]
    assert causes == ["bad node", "exception", "bad node", "killed"]
    assert Blame(failures).absolve(history) == history


def test_only_the_node_of_this_attempt_is_told(run: RunFolder) -> None:
    blame = Blame((NodeFailure(1, NOW, "n2"), NodeFailure(3, NOW, "n2"), NodeFailure(4, NOW, "n3")), ("n2",))
    blame.tell(run, 4, "17")
    assert exclude.excluded_before(run) == frozenset()
    blame.tell(run, 3, "17")
    (event,) = run.read_events()
    assert (event["event"], event["attempt"], event["job_id"], event["node"]) == ("node_excluded", 3, "17", "n2")
    assert exclude.excluded_before(run) == {"n2"}


@pytest.mark.parametrize(
    ("own", "before", "bad", "words"),
    [
        ("", [], [], ""),
        ("", ["n2"], ["n2", "n4"], "n2,n4"),
        ("n[7,9]", [], ["n2"], "n7,n9,n2"),
        ("n[2,7]", ["n2"], [], "n7"),
        ("n[2,7]", ["n2"], ["n2"], "n7,n2"),
        ("n2", [], ["n2"], "n2"),
    ],
    ids=["none", "bad ones", "beside the user's own", "comes back", "stays away", "the user's own"],
)
def test_users_own_exclusions_stay_and_a_node_comes_back_when_it_is_bad_no_more(
    own: str, before: list[str], bad: list[str], words: str
) -> None:
    assert exclude.excluded(own, frozenset(before), bad) == words
