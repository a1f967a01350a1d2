"""A real run of three ranks, one of which is slow: it is named, and the steps of all are as slow as its own."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.plan import read_plan, write_plan
from cluster.runs import read_lines
from tests.slow_train import SLEEP_S
from tests.test_local_runs import prepared_run, supervise
from tests.training import events_of, write_spec


@pytest.mark.long
def test_slow_rank_is_named_though_all_ranks_take_equally_long(tmp_path: Path, staged_data: Path) -> None:
    spec = write_spec(tmp_path, staged_data, "cluster: local\ntasks_per_node: 3")
    spec.write_text(spec.read_text().replace("  epochs: 4\n", "  epochs: 4\n  max_steps: 33\n"))
    run = prepared_run(tmp_path, spec, "slow")
    plan = read_plan(run)
    place = plan.rank.index("jobs.train")
    slowed = (*plan.rank[:place], "tests.slow_train", "1", *plan.rank[place + 1 :])
    write_plan(replace(plan, rank=slowed), run)
    done = supervise(run, tmp_path)
    assert done.returncode == 0, done.stderr
    (event,) = events_of(run, "slow_rank")
    assert (event["rank"], event["host"]) == (1, socket.gethostname())
    assert event["factor"] > 1.5
    lines = list(read_lines(run.metrics))
    assert lines[-1]["slowest_rank"] == 1
    assert min(line["step_ms_p50"] for line in lines[1:]) >= 1000 * SLEEP_S * 0.9
    warnings = [line.split(" W ")[1] for line in run.attempt_log(1).read_text().splitlines() if "is slow" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"rank 1 on {socket.gethostname()} is slow: its own part of a step takes ")
