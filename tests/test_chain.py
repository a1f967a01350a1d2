"""The jobs behind a supervisor's own, as far as it goes without a controller."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.chain import Chain, find_chain
from cluster.identity import RunJob
from cluster.job import Job
from cluster.runs import RunFolder, SupersededError
from cluster.verdict import Verdict
from tests.executables import put_answer, put_executable, shown_job
from tests.test_launch import make_plan

REQUEUE = "   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n"
NO_REQUEUE = REQUEUE.replace("Requeue=1", "Requeue=0")
SALLOC = REQUEUE.replace("BatchFlag=1", "BatchFlag=0")
DISABLED = "Requested operation is presently disabled for job 17"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where scontrol, scancel and sbatch note what they were asked, but for `show job`; sbatch answers 18."""
    for name in ("scontrol", "scancel", "sbatch"):
        first, then = shown_job(tmp_path / "demo" / "a") if name == "scontrol" else ":", "echo 18" * (name == "sbatch")
        put_executable(tmp_path / "bin", name, f'{first}; echo "{name} $*" >> {tmp_path}/asked; {then}')
    return tmp_path


def asked(folder: Path, command: str) -> list[str]:
    path = folder / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix(f"{command} ") for line in lines if line.startswith(f"{command} ")]


def make_chain(folder: Path, *, is_used: bool = True, **changes: Any) -> Chain:  # noqa: ANN401
    """The chain of job 17, which was submitted by hand."""
    run = RunFolder(folder / "demo" / "a")
    run.make()
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    job = Job(
        RunJob("17", run.path), is_on_slurm=True, environ={"PATH": str(folder / "bin"), "XDG_STATE_HOME": str(folder)}
    )
    plan = replace(make_plan("true"), cluster="slurm", **changes)
    return Chain(run, plan, job, is_used=is_used, may_begin=True)


def put_state(folder: Path, state: str) -> None:
    """What squeue says of every job that it is asked for."""
    put_executable(folder / "bin", "squeue", f'IFS=,; for id in $5; do echo "$id|$id|{state}|None||10:00"; done')


def add_successors(chain: Chain, *job_ids: str) -> None:
    for job_id in job_ids:
        event = {"job_id": job_id, "route": "successor", "predecessor": str(int(job_id) - 1)}
        chain.run.append_event("submitted", attempt=1, **event)


@pytest.mark.parametrize(
    ("mode", "shown", "is_used", "may_begin", "updates"),
    [
        ("auto", REQUEUE, False, True, []),
        ("auto", NO_REQUEUE, True, True, []),
        ("auto", SALLOC, False, False, []),
        ("successor", NO_REQUEUE, True, True, []),
        ("successor", REQUEUE, True, True, ["update JobId=17 Requeue=0"]),
        ("successor", SALLOC, False, False, []),
        ("requeue", NO_REQUEUE, False, False, []),
    ],
)
def test_mode_and_slurms_terms_say_how_a_run_goes_on(
    folder: Path, mode: str, shown: str, is_used: bool, may_begin: bool, updates: list[str]
) -> None:
    own = f"JobId=17\n   Command={folder}/demo/a/job.sbatch\n"
    told = f'echo "scontrol $*" >> {folder}/asked; printf "{own}{shown}   ReqNodeList=(null) ExcNodeList=n9\n"'
    put_executable(folder / "bin", "scontrol", told)
    chain = make_chain(folder, requeue_mode=mode)
    found = find_chain(chain.run, chain.plan, chain.job)
    assert (found.is_used, found.may_begin, found.own_excluded) == (is_used, may_begin, "n9")
    assert [words for words in asked(folder, "scontrol") if words.startswith("update")] == updates


def test_one_successor_is_submitted_at_the_start_and_one_that_waits_already_is_kept(folder: Path) -> None:
    chain = make_chain(folder)
    chain.begin()
    assert (chain.maybe_next, len(asked(folder, "sbatch"))) == ("18", 1)
    put_state(folder, "PENDING")
    chain.begin()
    assert (chain.maybe_next, len(asked(folder, "sbatch"))) == ("18", 1)


def test_run_that_is_over_leaves_no_successor_in_the_queue(folder: Path) -> None:
    put_state(folder, "PENDING")
    with make_chain(folder) as chain:
        add_successors(chain, "18")
    assert asked(folder, "scancel") == ["--state=PENDING 18"]


def test_supervisor_that_breaks_leaves_no_successor_in_the_queue(folder: Path) -> None:
    put_state(folder, "PENDING")
    with pytest.raises(OSError, match="disk"), make_chain(folder) as chain:
        add_successors(chain, "18")
        raise OSError("disk")
    assert asked(folder, "scancel") == ["--state=PENDING 18"]


def test_slurms_signals_do_not_end_the_command_that_takes_successors_away(folder: Path) -> None:
    put_state(folder, "PENDING")
    survive = f'kill -TERM $$; kill -USR2 $$; echo "scancel $*" >> {folder}/asked'
    put_executable(folder / "bin", "scancel", survive)
    with make_chain(folder) as chain:
        add_successors(chain, "18")
    assert asked(folder, "scancel") == ["--state=PENDING 18"]


def test_superseded_supervisor_touches_no_successor(folder: Path) -> None:
    put_state(folder, "PENDING")
    with pytest.raises(SupersededError), make_chain(folder) as chain:
        add_successors(chain, "18")
        raise SupersededError
    assert asked(folder, "scancel") == []


def test_successor_of_another_job_is_not_taken_away(folder: Path) -> None:
    put_state(folder, "PENDING")
    with make_chain(folder) as chain:
        chain.run.append_event("submitted", attempt=1, job_id="19", route="successor", predecessor="18")
    assert asked(folder, "scancel") == []


def test_all_that_were_put_in_beforehand_are_taken_away(folder: Path) -> None:
    put_state(folder, "PENDING")
    with make_chain(folder, submit_from="login") as chain:
        add_successors(chain, "18", "19")
        chain.begin()
    assert (asked(folder, "sbatch"), asked(folder, "scancel")) == ([], ["--state=PENDING 18 19"])


def test_run_goes_on_in_the_successor_that_waits(folder: Path) -> None:
    put_state(folder, "PENDING")
    with make_chain(folder) as chain:
        add_successors(chain, "18")
        chain.go_on("time limit", 1)
    event = chain.run.read_events()[-1]
    assert [event[key] for key in ("event", "cause", "successor")] == ["requeued", "time limit", "18"]
    assert asked(folder, "scancel") == asked(folder, "sbatch") == asked(folder, "scontrol") == []


def test_successor_that_its_user_took_away_is_not_replaced(folder: Path) -> None:
    put_state(folder, "CANCELLED")
    with make_chain(folder) as chain:
        chain.begin()
        chain.go_on("time limit", 1)
    assert (len(asked(folder, "sbatch")), chain.run.read_events()[-1]["event"]) == (1, "submitted")


def test_successors_that_are_used_up_are_not_replaced(folder: Path) -> None:
    put_state(folder, "COMPLETED")
    with make_chain(folder, submit_from="login") as chain:
        add_successors(chain, "18")
        chain.go_on("time limit", 1)
    assert (asked(folder, "sbatch"), chain.run.read_events()[-1]["event"]) == ([], "submitted")


def test_refused_requeue_is_replaced_by_a_successor(folder: Path) -> None:
    refuse = f'{shown_job(folder / "demo" / "a")}; echo "{DISABLED}" >&2; exit 1'
    put_executable(folder / "bin", "scontrol", refuse)
    with make_chain(folder, is_used=False) as chain:
        chain.go_on("preempted", 1)
    assert [words.split()[1] for words in asked(folder, "sbatch")] == ["--dependency=afterany:17"]
    assert [event["event"] for event in chain.run.read_events()] == ["submitted", "submitted", "requeued"]


def test_job_that_slurm_requeues_has_no_successor(folder: Path) -> None:
    with make_chain(folder, is_used=False) as chain:
        chain.begin()
        chain.go_on("preempted", 1)
    assert (asked(folder, "scontrol"), asked(folder, "sbatch")) == (["requeue 17"], [])
    assert "successor" not in chain.run.read_events()[-1]


def test_requeued_job_does_without_the_nodes_that_were_excluded(folder: Path) -> None:
    with make_chain(folder, is_used=False) as chain:
        chain.own_excluded = "n9"
        chain.run.append_event("node_excluded", attempt=1, job_id="17", node="n2")
        for attempt in (1, 2):
            nodes = {"nodes": ["n1", "n2"], "world_size": 2}
            chain.run.append_event("attempt_started", attempt=attempt, job_id="17", **nodes)
            verdict = '{"time": "2999-01-01T00:00:00.000Z", "cause": "killed", "rank": 1}'
            chain.run.verdict(attempt).write_text(verdict)
        chain.go_on("killed", 2)
    assert asked(folder, "scontrol") == ["requeue 17", "update JobId=17 ExcNodeList=n9,n2"]


@pytest.mark.parametrize(("is_used", "updated"), [(False, "17"), (True, "18")], ids=["requeued by Slurm", "successor"])
def test_job_that_waits_when_slurm_has_decided_gets_the_excluded_nodes_too(
    folder: Path, is_used: bool, updated: str
) -> None:
    put_state(folder, "PENDING")
    with make_chain(folder, is_used=is_used) as chain:
        add_successors(chain, "18")
        chain.leave_to_slurm()
        assert asked(folder, "scontrol") == []
        chain.own_excluded = "n[8-9]"
        chain.run.append_event("node_excluded", attempt=1, job_id="17", node="n8")
        chain.leave_to_slurm()
    assert asked(folder, "scontrol") == [f"update JobId={updated} ExcNodeList=n9"]
    assert asked(folder, "scancel") == []


@pytest.mark.parametrize(("is_used", "is_marked"), [(True, True), (False, False)])
def test_users_cancel_is_marked_where_successors_could_start(folder: Path, is_used: bool, is_marked: bool) -> None:
    chain = make_chain(folder, is_used=is_used)
    chain.end("user cancel")
    assert chain.run.cancel_mark.exists() is is_marked
    chain.end("exception")


@pytest.mark.parametrize(
    ("errors", "exit_code", "bad"),
    [("", 0, ("n2",)), ("allocation failure: Requested node configuration is not available\n", 1, ())],
    ids=["enough others", "too few others"],
)
def test_node_is_blamed_only_when_the_job_can_do_without_it(
    folder: Path, errors: str, exit_code: int, bad: tuple[str, ...]
) -> None:
    put_answer(folder / "bin", "sbatch", errors=errors, exit_code=exit_code)
    chain = make_chain(folder)
    for attempt in (1, 2):
        nodes = {"nodes": ["n1", "n2"], "world_size": 2}
        chain.run.append_event("attempt_started", attempt=attempt, job_id="17", **nodes)
    killed = Verdict("failed", "killed", "", 1, rank=1)
    assert chain.blame(1, killed).bad == ()
    chain.run.verdict(1).write_text('{"time": "2999-01-01T00:00:00.000Z", "cause": "killed", "rank": 1}')
    assert chain.blame(2, killed).bad == bad


def test_successor_whose_script_cannot_be_written_is_told_and_ends_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(folder)
    chain.run.successor_script.mkdir()
    put_state(folder, "RUNNING")
    chain.begin()
    assert (chain.maybe_next, asked(folder, "sbatch")) == (None, [])
    assert caplog.messages[-1].startswith(f"no successor was submitted: {chain.run.successor_script}: ")


def test_start_does_not_wait_for_a_squeue_that_is_not_there(folder: Path) -> None:
    chain = make_chain(folder)
    add_successors(chain, "18")
    chain.begin()
    assert (chain.maybe_next, asked(folder, "sbatch")) == (None, [])


def test_successor_that_is_in_no_event_is_known_to_the_chain_that_submitted_it(folder: Path) -> None:
    chain = make_chain(folder)
    chain.maybe_next = "18"
    put_state(folder, "PENDING")
    assert chain.waiting() == ["18"]
