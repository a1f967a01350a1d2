"""Chaos on a real Slurm: runs of 4 ranks, disturbed at random moments by random means until they have finished.

Each must end bit-equal to the undisturbed run.  The seed is in the test's name, and gives the same means at the same
steps again: `python -m pytest tests/slurm/test_chaos.py -m long -k seed-7`.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster import slurm
from cluster.drill_run import flip_bit, truncate
from cluster.runs import RunFolder, manifest_steps
from tests import training
from tests.slurm.test_comeback import hold_still, where
from tests.slurm.test_jobs import has_rank, sbatch, wait_until_gone
from tests.training import command, environment, events_of, submit, summary_of, write_spec

EPOCHS = 6
NUM_STEPS = 11 * EPOCHS
GAP_STEPS = (1, 20)  # from the first new checkpoint to the next fault
SLOW_SAVE_STEP = 21
NUM_RUNS = 30


@dataclass
class Chaos:
    """One run and what befalls it."""

    run: RunFolder
    job_id: str
    environ: Mapping[str, str]
    random: random.Random
    highest: int = 0  # step of the newest checkpoint before the last fault
    done: list[str] = field(default_factory=list)

    def is_finished(self) -> bool:
        return self.run.summary.exists()

    def rank_pids(self) -> list[tuple[int, int]]:
        """(rank, process) of every rank that runs now."""
        return [(rank, pid) for pid in training.processes_of(self.run) for rank in range(4) if has_rank(pid, rank)]

    def newest(self) -> int:
        return max(manifest_steps(self.run.checkpoints), default=0)

    def wait_for_the_moment(self) -> bool:
        """Wait for a new checkpoint and a random number of steps more; False when the run has finished by then."""
        gap = self.random.randint(*GAP_STEPS)
        training.wait_for(
            "a new checkpoint", lambda: self.is_finished() or self.is_gone() or self.newest() > self.highest
        )
        first = self.newest()
        training.wait_for(
            f"step {first + gap}",
            lambda: self.is_finished() or self.is_gone() or training.last_step(self.run) >= first + gap,
        )
        return not self.is_finished()

    def is_gone(self) -> bool:
        """Whether the job has left the queue."""
        return slurm.has_ended(slurm.maybe_job_state(self.job_id, self.environ))

    def disturb(self, name: str, act: Callable[["Chaos"], None]) -> None:
        """Do it once, and wait until the ranks of a later attempt train."""
        self.highest = self.newest()
        attempt = self.run.latest_attempt()
        self.done.append(f"{name} at step {training.last_step(self.run)}")
        act(self)
        training.wait_for(
            f"attempt {attempt + 1} after {self.done}",
            lambda: (
                self.is_finished()
                or self.is_gone()
                or any(e["attempt"] > attempt for e in events_of(self.run, "resumed"))
            ),
        )


def send(pid: int, number: int) -> None:
    """A signal to a process that may have gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        assert pid > 0


def kill_a_rank(chaos: Chaos) -> None:
    ranks = chaos.rank_pids()
    if ranks:
        send(chaos.random.choice(ranks)[1], signal.SIGKILL)


def kill_all_ranks(chaos: Chaos) -> None:
    for _, pid in chaos.rank_pids():
        send(pid, signal.SIGKILL)


def kill_the_supervisor(chaos: Chaos) -> None:
    """Nobody is left to bring the run back: its user does."""
    send(int(chaos.run.read_attempt(chaos.run.latest_attempt())["pid"]), signal.SIGKILL)
    wait_until_gone(chaos.job_id, chaos.environ)
    if not chaos.is_finished():
        done = submit("--resume", chaos.run.path, "--json", environ=chaos.environ)
        assert done.returncode == 0, done.stderr
        chaos.job_id = [e["job_id"] for e in events_of(chaos.run, "submitted")][-1]


def requeue(chaos: Chaos) -> None:
    subprocess.run(["scontrol", "requeue", chaos.job_id], env=chaos.environ, check=False)


def preempt(chaos: Chaos) -> None:
    hold_still(chaos.run)
    sbatch("-phigh", "-N4", "--exclusive", "-t2", "-o/dev/null", "--wrap=sleep 1", environ=chaos.environ)


def signal_a_rank(chaos: Chaos) -> None:
    ranks = chaos.rank_pids()
    number = chaos.random.choice([signal.SIGTERM, signal.SIGUSR2])
    if ranks:
        send(chaos.random.choice(ranks)[1], number)


def damage_the_newest_checkpoint(chaos: Chaos) -> None:
    """While the run is down, which goes back to the one before."""
    how = chaos.random.choice([truncate, flip_bit])
    attempt = chaos.run.latest_attempt()
    subprocess.run(command("cluster.stop", chaos.run.path, "--requeue"), env=dict(chaos.environ), check=False)
    training.wait_for("the end of the attempt", lambda: chaos.is_finished() or chaos.run.verdict(attempt).exists())
    steps = manifest_steps(chaos.run.checkpoints)
    if not chaos.is_finished() and len(steps) > 1:
        chaos.highest = steps[-1]
        how(chaos.run.checkpoints / f"step_{steps[-1]:08d}.pt")


def kill_rank_0_in_its_slow_save(chaos: Chaos) -> None:
    """The save takes seconds by the spec's fault; without one, that is a kill like another."""
    training.wait_for(
        "the temporary file",
        lambda: (
            list(chaos.run.checkpoints.glob("*.pt.*.tmp")) or chaos.is_finished() or chaos.newest() > SLOW_SAVE_STEP
        ),
    )
    for rank, pid in chaos.rank_pids():
        if rank == 0:
            send(pid, signal.SIGKILL)


MEANS: tuple[tuple[str, Callable[[Chaos], None]], ...] = (
    ("kill a rank", kill_a_rank),
    ("kill all ranks", kill_all_ranks),
    ("kill the supervisor", kill_the_supervisor),
    ("scontrol requeue", requeue),
    ("preempt", preempt),
    ("signal a rank", signal_a_rank),
    ("damage the newest checkpoint", damage_the_newest_checkpoint),
)


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, staged_data: Path, slurm_environ: dict[str, str]
) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    own = {**slurm_environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    spec = write_spec(folder, staged_data, where())
    done = submit(spec, f"train.epochs={EPOCHS}", "--wait", environ=own)
    assert done.returncode == 0, done.stderr
    return training.newest_run(folder)


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts over all runs of this module, told at its end."""
    counts: Counter[str] = Counter()
    began_s = time.monotonic()
    yield counts
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if name != "runs")
    total = sum(counts.values()) - counts["runs"]
    seconds = time.monotonic() - began_s
    reporter.write_line(f"\nchaos: {counts['runs']} runs, {total} faults ({kinds}), {seconds:.0f} s")


def start(seed: int, folder: Path, data: Path, environ: Mapping[str, str]) -> Chaos:
    """Submit the run of a seed."""
    chosen = random.Random(f"chaos {seed}")
    partition = chosen.choice(["low", "low-nograce", "low-cancel"])
    spec = write_spec(folder, data, where(partition))
    if chosen.random() < 0.3:
        spec.write_text(spec.read_text() + f"faults:\n- {{at_step: {SLOW_SAVE_STEP}, rank: 0, do: slow_save}}\n")
    own = {**environ, "CLUSTER_ALLOW_FAULTS": "1"}
    done = submit(spec, f"train.epochs={EPOCHS}", "--json", environ=own)
    assert done.returncode == 0, done.stderr
    run = training.newest_run(folder)
    return Chaos(run, events_of(run, "submitted")[-1]["job_id"], own, chosen)


def rage(chaos: Chaos, max_faults: int) -> None:
    """Disturb the run again and again, until it has finished."""
    if "slow_save" in chaos.run.spec.read_text():
        chaos.disturb("kill rank 0 in a slow save", kill_rank_0_in_its_slow_save)
    while len(chaos.done) < max_faults and chaos.wait_for_the_moment():
        assert not chaos.is_gone(), tell(chaos)
        chaos.disturb(*chaos.random.choice(MEANS))
    training.wait_for(f"the end after {chaos.done}", lambda: chaos.is_finished() or chaos.is_gone())


def tell(chaos: Chaos) -> str:
    """What befell a run, and what it says itself."""
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(chaos.run.logs.iterdir()))
    return f"{chaos.done}\n{chaos.run.path}\n{chaos.run.events.read_text()}\n{logs}"


def check(chaos: Chaos, undisturbed: RunFolder, figures: Counter[str]) -> None:
    """It has finished as the undisturbed run did, and its job is gone."""
    assert chaos.is_finished(), tell(chaos)
    wait_until_gone(chaos.job_id, chaos.environ)
    summary, straight = summary_of(chaos.run), summary_of(undisturbed)
    keys = ("steps", "weights_sha256", "samples_sha256", "bit_exact")
    assert {key: summary[key] for key in keys} == {key: straight[key] for key in keys}, tell(chaos)
    assert training.metrics_without_timing(chaos.run) == training.metrics_without_timing(undisturbed), tell(chaos)
    figures.update(["runs", *(what.rpartition(" at step ")[0] for what in chaos.done)])


def test_run_in_a_short_chaos_ends_as_the_undisturbed_one(
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    figures: Counter[str],
) -> None:
    chaos = start(1, tmp_path, staged_data, environ)
    rage(chaos, max_faults=2)
    assert len(chaos.done) >= 2, chaos.done
    check(chaos, undisturbed, figures)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_RUNS), ids=lambda seed: f"seed-{seed}")
def test_run_in_chaos_ends_as_the_undisturbed_one(
    seed: int,
    tmp_path: Path,
    staged_data: Path,
    environ: dict[str, str],
    undisturbed: RunFolder,
    figures: Counter[str],
) -> None:
    chaos = start(seed, tmp_path, staged_data, environ)
    rage(chaos, max_faults=NUM_STEPS)
    check(chaos, undisturbed, figures)
