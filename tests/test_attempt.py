"""Run folder and attempt of ranks that a supervisor started, and of those that start by themselves."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import ATTEMPT_VARIABLE
from cluster.runs import FORMAT_VERSION, RELEASE, RunError, RunFolder
from cluster.spec import JobSpec, load_spec
from jobs.attempt import join_attempt, own_job_id
from tests.small_run import make_spec, place

SLURM = {"SLURM_JOB_ID": "4711"}

FORM = {"format_version": FORMAT_VERSION, "release": RELEASE}


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return make_spec(tmp_path)


def join_all(
    spec: JobSpec, maybe_run_dir: Path | None = None, store: Store | None = None
) -> list[tuple[RunFolder, int] | str]:
    """What two ranks without a supervisor come to: folder and attempt, or the text of an error."""
    store = store or HashStore()

    def join(rank: int) -> tuple[RunFolder, int] | str:
        try:
            return join_attempt(spec, maybe_run_dir, place(rank, 2), store, SLURM)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, (1, 0)))


def join_both(spec: JobSpec, maybe_run_dir: Path | None = None, store: Store | None = None) -> tuple[RunFolder, int]:
    """The run and attempt that two ranks agree on."""
    first, second = join_all(spec, maybe_run_dir, store)
    assert first == second
    assert not isinstance(first, str), first
    return first


def told_of(run: RunFolder) -> list[dict[str, Any]]:
    """Events without what differs between machines and moments."""
    return [{key: value for key, value in event.items() if key not in ("time", "nodes")} for event in run.read_events()]


def test_supervisors_attempt_is_taken_without_asking_anybody(spec: JobSpec, tmp_path: Path) -> None:
    environ = {ATTEMPT_VARIABLE: "3"}
    assert join_attempt(spec, tmp_path, place(1, 2), HashStore(), environ) == (RunFolder(tmp_path), 3)
    assert list(tmp_path.iterdir()) == []


def test_ranks_by_themselves_make_a_run_and_agree_on_it(spec: JobSpec) -> None:
    run, attempt = join_both(spec)
    assert (run.path.parent, attempt) == (spec.run_root / spec.name, 1)
    assert load_spec(run.spec, cwd=run.path) == spec
    assert told_of(run) == [
        {"event": "submitted", "attempt": 0, "job_id": "4711", "route": "direct", **FORM},
        {"event": "attempt_started", "attempt": 1, "job_id": "4711", "world_size": 2},
    ]
    assert run.read_attempt(1)["job_id"] == "4711"


def test_run_that_is_named_is_gone_on_with(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    assert join_both(spec, run.path) == (run, 2)
    assert [event["event"] for event in run.read_events()] == ["submitted", "attempt_started", "attempt_started"]


def test_run_that_goes_on_with_other_code_without_a_supervisor_says_so(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    assert join_both(spec, run.path)[1] == 2
    assert [event["event"] for event in run.read_events()].count("code_drift") == 0
    sums = run.code_sums.read_text().splitlines()
    digest, path = next(line for line in sums if line.endswith("jobs/optim.py")).split("  ")
    run.code_sums.write_text("\n".join(line.replace(digest, "0" * 64) for line in sums))
    assert join_both(spec, run.path)[1] == 3
    drift = [event for event in run.read_events() if event["event"] == "code_drift"]
    assert [(event["attempt"], event["files"]) for event in drift] == [(3, [path])]


def test_finished_run_gets_no_further_attempt(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    run.summary.write_text("{}")
    assert join_both(spec, run.path) == (run, 1)
    assert run.latest_attempt() == 1


def test_two_starts_without_a_name_are_two_runs(spec: JobSpec) -> None:
    assert join_both(spec)[0] != join_both(spec)[0]


def test_run_of_another_spec_is_refused_on_every_rank(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    other = spec.model_copy(update={"train": spec.train.model_copy(update={"lr": 0.5, "seed": 9})})
    message = f"{run.path} holds a run with another spec (train.lr, train.seed): resume it with {run.spec}"
    assert join_all(other, run.path) == [message, message]
    assert run.latest_attempt() == 1


def test_frozen_spec_that_cannot_be_read_is_told_to_every_rank(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    run.spec.write_text("lr\n")
    first, second = join_all(spec, run.path)
    assert isinstance(first, str)
    assert first == second


def test_run_of_another_release_is_refused_on_every_rank(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    claim = json.loads((run.attempts / "0001").read_text()) | {"format_version": 2, "release": "0.2.0"}
    (run.attempts / "0001").write_text(json.dumps(claim))
    first, second = join_all(spec, run.path)
    assert (
        first
        == second
        == (
            f"{run.attempts}/0001: format_version 2, and this is slurm-ddp {RELEASE}, which reads 1: "
            "install slurm-ddp 0.2.0; nothing was changed"
        )
    )
    assert run.latest_attempt() == 1


def test_workers_that_torchrun_restarts_go_on_with_their_run(spec: JobSpec) -> None:
    agents = HashStore()
    run, attempt = join_both(spec, store=PrefixStore("torchrun.0", agents))
    again = join_both(spec, store=PrefixStore("torchrun.1", agents))
    assert (attempt, again) == (1, (run, 2))


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        ({"SLURM_JOB_ID": "12", "SUBMITIT_LOCAL_JOB_ID": "13"}, "12"),
        ({"SUBMITIT_LOCAL_JOB_ID": "13"}, "13"),
    ],
)
def test_job_id_is_slurms_or_submitits(environ: dict[str, str], job_id: str) -> None:
    assert own_job_id(environ) == job_id


def test_claim_says_who_holds_it(spec: JobSpec) -> None:
    run, _ = join_both(spec)
    content = json.loads((run.attempts / "0001").read_text())
    assert list(content) == ["format_version", "release", "attempt", "time", "job_id", "host", "pid"]
