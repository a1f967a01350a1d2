"""Ranks: supervise -> [launch] -> the processes of one attempt.  Standard library only.

On Slurm one srun starts them; on one machine they are our own children with torchrun's variables.  Either way the ranks
run in sessions of their own, so that a terminal's Ctrl-C reaches the supervisor alone and it decides.
Source: srun(1), Slurm 22.05 and 24.11.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cluster import rank
from cluster.early_signals import begun_blocked
from cluster.plan import LaunchPlan
from cluster.runs import EXIT_FINISHED, EXIT_STOPPED
from cluster.signals import STOP_SIGNALS, held_back
from cluster.slurm import literal_path
from cluster.start_watch import StartWatch
from cluster.step import cpus_per_task, step_environment

log = logging.getLogger("run")

END_TOGETHER_S = 30  # srun --wait: ranks leave within seconds of each other, or hang
KILL_SRUN_AFTER_S = 20.0  # from TERM, for srun to end a step that has not begun
KILL_AFTER_S = 5.0  # local ranks: from TERM to KILL once one of them has failed


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks start where; from the allocation, which wins over the spec."""

    num_nodes: int
    num_tasks: int
    num_tasks_per_node: int | None  # None: uneven, srun places them as the allocation says


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """What is known of the ranks once all are gone."""

    exit_codes: Mapping[int, int]  # rank -> exit code, minus the signal's number when killed; local ranks only
    ended: frozenset[int] = frozenset()  # ranks that ran on when another had failed, and were ended for that
    launcher_lines: tuple[str, ...] = ()  # what srun wrote to its standard error
    launcher_code: int = 0  # srun's exit status, minus the signal's number when killed; nothing about a single rank
    given_up: str = ""  # why the supervisor ended the launcher; empty where it ended by itself


class Ranks(Protocol):
    """The running ranks of one attempt."""

    def is_over(self) -> bool:
        """Whether all ranks are gone."""

    def ask_to_stop(self) -> None:
        """Ask them to save and leave together."""

    def end(self) -> RanksEnd:
        """What is known of them; call it once they are over."""


def rank_variables(master_addr: str, master_ports: str, token: str, attempt: int) -> dict[str, str]:
    """The variables by which the supervisor tells its ranks where to meet and which attempt they are.

    master_ports: numbers with commas between; the ranks check them.
    """
    return {
        rank.MASTER_ADDR_VARIABLE: master_addr,
        rank.MASTER_PORTS_VARIABLE: master_ports,
        rank.TOKEN_VARIABLE: token,
        rank.ATTEMPT_VARIABLE: str(attempt),
    }


def srun_command(plan: LaunchPlan, shape: Shape, log_path: Path, environ: Mapping[str, str]) -> list[str]:
    """The srun line that starts all ranks of an attempt; environ: the job's."""
    per_node = [] if shape.num_tasks_per_node is None else [f"--ntasks-per-node={shape.num_tasks_per_node}"]
    num_cpus = cpus_per_task(plan, shape.num_tasks_per_node, environ)
    cpus = [] if num_cpus is None else [f"--cpus-per-task={num_cpus}"]
    return [
        "srun",
        f"--nodes={shape.num_nodes}",
        f"--ntasks={shape.num_tasks}",
        *per_node,
        *cpus,
        "--mem=0",  # all that the job has: with CPUs given the step gets these alone, and of memory per CPU their share
        "--kill-on-bad-exit=1",
        f"--wait={END_TOGETHER_S}",
        "--mpi=none",
        "--export=ALL",
        f"--output={literal_path(log_path)}",
        f"--error={literal_path(log_path)}",
        "--open-mode=append",
        *plan.srun,
        # A plugin of srun's changes into the image before it begins the command, and an image need not have a shell.
        *(plan.rank if plan.srun else begun_blocked(plan.rank)),
    ]


@dataclass
class SrunRanks:
    """Ranks under one srun."""

    process: subprocess.Popen[str]
    watch: StartWatch
    lines: list[str] = field(default_factory=list)
    given_up: str = ""  # why srun was ended before any rank had begun
    kill_s: float = math.inf  # time.monotonic() at which it is killed then
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Read what srun says from now on."""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str], watch: StartWatch) -> "SrunRanks":
        """Start srun."""
        return cls(
            subprocess.Popen(
                command,
                env=step_environment(environ),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",  # a reader that stops at an odd byte would block srun once the pipe is full
                start_new_session=True,
            ),
            watch,
        )

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))
                log.info("%s", self.lines[-1])

    def is_over(self) -> bool:
        """Whether srun has ended, and with it all ranks.  One that starts none is ended: TERM, then KILL."""
        if not self.given_up and self.watch.is_overdue():
            self.given_up, self.kill_s = self.watch.why(self.lines), time.monotonic() + KILL_SRUN_AFTER_S
            log.error("%s", self.given_up)
            self.process.terminate()
        elif time.monotonic() > self.kill_s:
            self.process.kill()
        return self.process.poll() is not None

    def ask_to_stop(self) -> None:
        """srun forwards USR2 to all ranks."""
        self.process.send_signal(signal.SIGUSR2)

    def end(self) -> RanksEnd:
        """srun's lines and exit status."""
        self.reader.join(timeout=5.0)
        code = self.process.returncode
        return RanksEnd({}, launcher_lines=tuple(self.lines), launcher_code=code, given_up=self.given_up)


@dataclass
class LocalRanks:
    """Ranks that are children of this process, all on this machine."""

    processes: list[subprocess.Popen[bytes]]
    failed_s: float | None = None  # time.monotonic() of the first bad exit
    ended: frozenset[int] = frozenset()  # ranks that were still running then

    @classmethod
    def start(cls, plan: LaunchPlan, environ: Mapping[str, str], log_path: Path) -> "LocalRanks":
        """Start plan.world_size processes with torchrun's six variables."""
        processes = []
        with log_path.open("ab") as output, held_back():
            for number in range(plan.world_size):
                variables = local_variables(number, plan.world_size, environ)
                processes.append(
                    subprocess.Popen(
                        plan.rank,
                        env={**environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        return cls(processes)

    def is_over(self) -> bool:
        """Whether all ranks are gone.  Once one has failed, the others are ended: TERM, then KILL."""
        codes = [process.poll() for process in self.processes]
        if self.failed_s is None and any(code not in (None, EXIT_FINISHED, EXIT_STOPPED) for code in codes):
            self.failed_s = time.monotonic()
            self.ended = frozenset(number for number, code in enumerate(codes) if code is None)
            self._signal(signal.SIGTERM)
        elif self.failed_s is not None and time.monotonic() > self.failed_s + KILL_AFTER_S:
            self._signal(signal.SIGKILL)
        return None not in codes

    def ask_to_stop(self) -> None:
        """TERM to every rank."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)  # does nothing once the process has been reaped

    def end(self) -> RanksEnd:
        """Each rank's exit code."""
        return RanksEnd({number: process.wait() for number, process in enumerate(self.processes)}, self.ended)


def local_variables(number: int, world_size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's six variables for one rank of a single machine."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": environ[rank.MASTER_ADDR_VARIABLE],
        "MASTER_PORT": environ[rank.MASTER_PORTS_VARIABLE].split(",")[0],
    }


def leave_terminal() -> None:
    """Go on in a session of its own while the parent only waits and hands signals on.

    submitit's local controller sends INT and, a second later, KILL to the process that it started; a save takes longer.
    That process becomes a parent that relays what it gets and may be killed without harm to the run.  The stop
    signals stay blocked in the child until its StopFlag is installed, so none is lost on the way.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child == 0:
        os.setsid()
        return

    def relay(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in STOP_SIGNALS:
        signal.signal(number, relay)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)
