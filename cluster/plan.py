"""Launch plan: spec -> [plan] -> submit, supervise.  Pure: the same spec and run folder give the same plan.

The plan says what Slurm is asked for, which command runs as the batch step, and which command each rank runs.  It is
kept as plan.json, so that the supervisor needs neither YAML nor pydantic to start.
Sources: sbatch(1), srun(1), Slurm 22.05.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.code import STARTER, packages_folder
from cluster.container import Entrance, entrance
from cluster.early_signals import STOP_SIGNAL, shell_function
from cluster.runs import FORMAT_VERSION, RunError, RunFolder, write_json
from cluster.setup import ended_by, preamble
from cluster.slurm import literal_path

if TYPE_CHECKING:  # the supervisor reads a plan without loading pydantic
    from cluster.spec import JobSpec

FlagValue = str | int | bool


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One run as it will be started; every value is text, a number or a list of them."""

    run_dir: str  # absolute
    name: str
    cluster: str  # slurm or local
    sbatch: Mapping[str, FlagValue]  # long options of sbatch without dashes; True is a bare flag
    preamble: tuple[str, ...]  # shell lines before the supervisor: the spec's env and setup
    supervisor: tuple[str, ...]  # command of the batch step
    rank: tuple[str, ...]  # command of each rank
    num_nodes: int  # the most, where the run takes what is free
    num_tasks_per_node: int
    cpus_per_task: int | None
    signal_lead_s: int
    time_limit_s: int | None
    threads_per_rank: int
    max_failures: int  # of the program, since the last progress
    policy: Mapping[str, str]  # cause -> action, in place of requeue.POLICY's
    requeue_mode: str  # auto, requeue or successor
    num_successors: int  # put in beforehand, where submit_from says so
    submit_from: str  # who submits successors: job or login
    srun: tuple[str, ...] = ()  # further options of the srun that starts the ranks
    image_variables: tuple[str, ...] = ()  # names whose values win over those of the ranks' image; empty without one
    image_prefix: str = ""  # they are given under this prefix as well
    is_elastic: bool = False  # takes fewer nodes than num_nodes; the allocation says how many
    maybe_visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES at a local submission, put back for the ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.num_tasks_per_node

    @property
    def opening(self) -> tuple[str, ...]:
        """What a shell does first: the spec's env and setup, on Slurm with an eye to nodes that lack something."""
        python, starter, *_, run_dir = self.supervisor
        script = Path(starter).with_name("node_check.sh")
        return (*((node_check(script, run_dir, python),) if self.cluster == "slurm" else ()), *self.preamble)

    @property
    def shell_lines(self) -> tuple[str, ...]:
        """What a batch script does before it starts the supervisor: the preamble, then a look at the interpreter.

        They know `begin_blocked`, by which it is started.
        """
        python, starter, *_, run_dir = self.supervisor
        needed = ("submitit", "pydantic", "yaml", *(() if self.image_variables else ("torch",)))
        check = shlex.join((python, starter, "--check", run_dir, *needed))
        return (
            *self.opening,
            *shell_function(python, starter),
            refusal("-x", python, "python", "name one that is on all nodes with the key python"),
            refusal("-r", starter, "code", "run_root has to be on storage that all nodes see"),
            f"node_problem=$({check} 2>&1) || " + ended_by('"$node_problem"'),
        )


def node_check(script: Path, run_dir: str, python: str) -> str:
    """A shell line that reads what is done about a node that lacks something; a node without even that does nothing."""
    return f"if [ -r {shlex.quote(str(script))} ]; then . {shlex.join((str(script), run_dir, python))}; fi"


def refusal(test: str, path: str, key: str, advice: str) -> str:
    """A shell line that ends the job where a file is missing on its node."""
    words = f"""{shlex.quote(f"{key}: {path} is not on ")}"$HOSTNAME"{shlex.quote(f"; {advice}")}"""
    return f"[ {test} {shlex.quote(path)} ] || {ended_by(words)}"


def make_plan(
    spec: "JobSpec",
    run: RunFolder,
    *,
    python: str,
    maybe_code_root: Path | None = None,
    maybe_visible_gpus: str | None = None,
) -> LaunchPlan:
    """Lay out how a spec is started in a run folder.

    python: absolute path of the interpreter that supervisor and ranks use, unless the spec names another.
    maybe_code_root: the folder whose packages run; those of this process by default.
    """
    code_root = maybe_code_root or packages_folder()
    starter = (spec.python or python, str(code_root / STARTER))
    entered = entrance(spec, run.path, code_root)
    return LaunchPlan(
        run_dir=str(run.path),
        name=spec.name,
        cluster=spec.cluster,
        sbatch=sbatch_flags(spec, run) if spec.cluster == "slurm" else {},
        preamble=preamble(spec.env, spec.setup, (*starter, "cluster.setup", str(run.path))),
        supervisor=(*starter, "cluster.supervise", str(run.path)),
        rank=rank_command(spec, run, starter, entered),
        num_nodes=spec.max_nodes,
        num_tasks_per_node=spec.num_tasks_per_node,
        cpus_per_task=spec.cpus_per_task,
        signal_lead_s=spec.signal_lead_s,
        time_limit_s=spec.time_limit_s,
        threads_per_rank=spec.train.threads_per_rank,
        max_failures=spec.requeue.max_failures,
        policy={str(cause): action for cause, action in spec.requeue.policy.items()},
        requeue_mode=spec.requeue.mode,
        num_successors=spec.requeue.successors,
        submit_from=spec.requeue.submit_from,
        srun=entered.srun,
        image_variables=entered.variables,
        image_prefix=entered.prefix,
        is_elastic=spec.min_nodes < spec.max_nodes,
        maybe_visible_gpus=maybe_visible_gpus,
    )


def rank_command(spec: "JobSpec", run: RunFolder, starter: tuple[str, str], entered: Entrance) -> tuple[str, ...]:
    """The command of each rank.  starter: interpreter and script outside of an image."""
    python = spec.container.python if spec.container.image else starter[0]
    train = (python, starter[1], "jobs.train", str(run.spec), "--run-dir", str(run.path))
    return (*entered.command, *train)


def sbatch_flags(spec: "JobSpec", run: RunFolder) -> dict[str, FlagValue]:
    """The long options of sbatch for a spec; keys that the spec leaves out are not given to Slurm at all."""
    asked: dict[str, FlagValue | None] = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks-per-node": spec.num_tasks_per_node,
        "cpus-per-task": spec.cpus_per_task,
        "gpus-per-node": spec.gpus_per_node,
        "mem": mebibytes(spec.memory_per_node_mib),
        "mem-per-cpu": mebibytes(spec.memory_per_cpu_mib),
        "mem-per-gpu": mebibytes(spec.memory_per_gpu_mib),
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
        "nodelist": spec.nodelist,
        "exclude": spec.exclude,
        "reservation": spec.reservation,
        "exclusive": spec.exclusive or None,
        "time": spec.slurm_time,
        "comment": spec.comment,
        "mail-user": spec.mail_user,
        "mail-type": spec.mail_type,
        # Explicit, since a site's JobRequeue=0 would refuse `scontrol requeue` otherwise; append, since a requeued
        # job truncates its files by default; no B:, since the ranks are job steps and the batch step is not signalled.
        ("no-requeue" if spec.requeue.mode == "successor" else "requeue"): True,
        "open-mode": "append",
        "signal": f"{STOP_SIGNAL}@{spec.signal_lead_s}",
        "output": f"{literal_path(run.logs)}/{run.batch_log('%j').name}",
    }
    if spec.min_nodes < spec.max_nodes:  # with --ntasks-per-node Slurm gives the fewest nodes, always
        asked["ntasks-per-node"] = None
        asked["cpus-per-task"] = spec.tasks_per_node * (spec.cpus_per_task or 1)
    return {key: value for key, value in asked.items() if value is not None} | dict(spec.sbatch)


def mebibytes(amount: int | None) -> str | None:
    """An amount of memory as Slurm reads it without doubt."""
    return None if amount is None else f"{amount}M"


def write_plan(plan: LaunchPlan, run: RunFolder) -> None:
    """Publish plan.json."""
    write_json(run.plan, asdict(plan))


def read_plan(run: RunFolder) -> LaunchPlan:
    """Read plan.json back; a supervisor's first look at a run.

    Raises RunError: there is none, or it is damaged.  Raises FormatError: another release wrote a file of the run.
    """
    run.check_formats()
    try:
        kept: dict[str, Any] = dict(json.loads(run.plan.read_text()))
    except FileNotFoundError:
        raise RunError(f"{run.path} is no run folder: it holds no plan.json") from None
    except (TypeError, ValueError) as error:
        raise RunError(f"{run.plan} is damaged: {error}") from None
    if (version := kept.pop("format_version", None)) != FORMAT_VERSION:
        raise RunError(f"{run.plan} is damaged: format_version {version!r}")
    differing = set(kept) ^ {field.name for field in fields(LaunchPlan)}
    if differing:
        raise RunError(f"{run.plan} is damaged: missing or unknown keys: {', '.join(sorted(differing))}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}
    return LaunchPlan(**values)


def python_at(executable: str) -> str:
    """Absolute path of an interpreter, with a virtual environment's link kept as it is."""
    return str(Path(executable).absolute())
