"""What a successor finds when it starts: answers of squeue from Slurm 22.05.8, given by stand-ins."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.chain import Chain
from cluster.identity import RunJob
from cluster.job import Job
from cluster.predecessor import judge_predecessor, maybe_exit_code_by_predecessor
from cluster.runs import RunFolder, write_json
from tests.executables import put_answer, put_executable, shown_job
from tests.test_launch import make_plan


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "TIMEOUT", "FAILED", "OUT_OF_MEMORY", "COMPLETED", None])
def test_run_goes_on_after_every_end_but_a_users(state: str | None) -> None:
    assert judge_predecessor(state, [], {}, ["17"]) == "open"
    assert judge_predecessor("CANCELLED", [], {}, ["17"]) == "cancelled"


@pytest.mark.parametrize(
    ("verdict", "end"),
    [
        ({"job_id": "17", "action": "stop"}, "failed"),
        ({"job_id": "17", "action": "leave", "cause": "usage"}, "failed"),
        ({"job_id": "17", "action": "requeue", "cause": "preempted"}, "open"),
        ({"job_id": "9", "action": "stop"}, "open"),
    ],
    ids=["failed for good", "wrong spec", "goes on", "before the run was resumed by hand"],
)
def test_verdict_of_an_earlier_job_ends_the_run(verdict: dict[str, str], end: str) -> None:
    assert judge_predecessor("FAILED", [], verdict, ["17", "18"]) == end


def test_nothing_is_decided_while_another_job_runs_the_run() -> None:
    assert judge_predecessor("CANCELLED", ["16"], {"job_id": "16", "action": "stop"}, ["16", "17"]) == "alive"


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Job 19 of a run that was submitted as job 17."""
    run = RunFolder(tmp_path / "demo" / "a")
    run.make()
    run.append_event("submitted", attempt=0, job_id="17", route="slurm")
    for job_id in ("18", "19", "20"):
        run.append_event("submitted", attempt=1, job_id=job_id, route="successor", predecessor=str(int(job_id) - 1))
    job = Job(RunJob("19", run.path), is_on_slurm=True, environ={"PATH": str(tmp_path / "bin")})
    plan = replace(make_plan("true"), cluster="slurm", requeue_mode="successor", submit_from="login")
    return Chain(run, plan, job, is_used=True, may_begin=True)


def answer(chain: Chain, *lines: str) -> None:
    folder = Path(chain.job.environ["PATH"])
    put_answer(folder, "squeue", "".join(f"{line.split('|')[0]}|{line}|None|n1|0:00\n" for line in lines))
    put_executable(folder, "scontrol", shown_job(chain.run.path))


def test_first_to_see_a_users_cancel_leaves_the_mark(chain: Chain) -> None:
    answer(chain, "17|PREEMPTED", "18|CANCELLED", "20|PENDING")
    assert maybe_exit_code_by_predecessor(chain, "18") == 1
    assert chain.run.cancel_mark.exists()


def test_successor_whose_predecessor_was_taken_away_leaves_the_running_job_alone(chain: Chain) -> None:
    answer(chain, "17|RUNNING", "18|CANCELLED", "20|PENDING")
    assert maybe_exit_code_by_predecessor(chain, "18") == 0
    assert (chain.run.cancel_mark.exists(), chain.is_kept) == (False, True)


def test_successor_goes_on_after_a_preemption(chain: Chain) -> None:
    answer(chain, "17|COMPLETED", "18|PREEMPTED", "20|PENDING")
    assert maybe_exit_code_by_predecessor(chain, "18") is None


def test_forgotten_predecessor_is_looked_up_in_accounting(chain: Chain) -> None:
    answer(chain, "20|PENDING")
    assert maybe_exit_code_by_predecessor(chain, "18") is None  # no sacct here
    put_answer(Path(chain.job.environ["PATH"]), "sacct", "CANCELLED by 1000\n")
    assert maybe_exit_code_by_predecessor(chain, "18") == 1
    assert chain.run.cancel_mark.exists()


def test_run_that_failed_for_good_is_not_begun_again(chain: Chain) -> None:
    answer(chain, "17|FAILED", "18|COMPLETED", "20|PENDING")
    chain.run.claim_attempt({})
    write_json(chain.run.verdict(1), {"job_id": "17", "action": "stop", "cause": "exception"})
    assert maybe_exit_code_by_predecessor(chain, "18") == 1
    assert not chain.run.cancel_mark.exists()
