"""Job spec: YAML file -> [spec] -> plan.  Frozen, strict pydantic models; a docstring per field says what it means.

A key without a value (`key:` or `key: null`) is refused everywhere: a key that isn't wanted is left out.  A dumped
spec names the keys that aren't set in comments, and so loads again.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cluster.runs import UsageError
from cluster.spec_explain import explain, explain_rules
from cluster.spec_fields import (
    AbsolutePath,
    Count,
    Expanded,
    FlagName,
    FlagValue,
    Fraction,
    Gpus,
    Interpreter,
    Line,
    LogFolder,
    MailType,
    Memory,
    Mount,
    NodeCount,
    NotNegative,
    Positive,
    RunName,
    Seed,
    ShellLine,
    Time,
    VariableName,
    VariableValue,
    Word,
    check_once,
)
from cluster.spec_rules import contradictions
from cluster.spec_units import memory_mib, node_range, num_gpus, slurm_time, time_s
from cluster.spec_yaml import (
    MAX_BYTES,
    WHOLE_FILE,
    Document,
    Key,
    Problem,
    apply_overrides,
    read_document,
    read_plain,
    where,
)

FORMAT_VERSION: Literal[1] = 1
MUON_SINCE = (2, 9)  # of torch: torch.optim.Muon

SMALL_LENGTH = MAX_BYTES // 8  # of a text whose dump fits for sure: it is at most twice as long, and the defaults
MAX_PROBLEMS = 50  # that are shown

FAULTS_VARIABLE = "CLUSTER_ALLOW_FAULTS"


class SpecError(UsageError):
    """A spec that can't be used.  Its text has one line for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Keep the lines apart as well: `problems`."""
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class _Section(BaseModel):
    """What all sections share: unknown keys and wrong types are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


class TrainSpec(_Section):
    """The training program: model, length, optimizer, numerics.  Training ends at epochs or max_steps, if earlier."""

    model: Literal["resnet18", "small"] = "resnet18"
    """resnet18 for images of 32x32; small is a few convolutions, for a first run and for tests."""
    epochs: Count = 30
    """Passes over the training images."""
    max_steps: Count | None = None
    """Optimizer steps after which training ends even within an epoch."""
    global_batch_size: Count | None = None
    """Images per step over all ranks; the run stays the same when the number of ranks changes."""
    micro_batch_size: Count | None = None
    """Images of one forward pass, whatever the number of ranks; global_batch_size over the most ranks by default."""
    batch_size_per_rank: Count | None = Field(
        default_factory=lambda data: 128 if data.get("global_batch_size") is None else None
    )
    """Images per step and rank, instead of global_batch_size.  Default 128."""
    optimizer: Literal["sgd", "muon"] = "sgd"
    """muon orthogonalises the updates of all convolutions but the first; SGD does the rest.  Needs torch 2.9."""
    lr: Positive = 0.1
    """Peak learning rate of SGD, reached after the warm-up."""
    momentum: Fraction = 0.9
    """Momentum of SGD, with Nesterov's step."""
    muon_lr: Positive = 0.02
    """Peak learning rate of Muon; read with optimizer muon only."""
    muon_momentum: Fraction = 0.95
    """Momentum of Muon, with Nesterov's step; read with optimizer muon only."""
    weight_decay: NotNegative = 5e-4
    """L2 penalty; with Muon a share of the weight, times the learning rate, at each step."""
    label_smoothing: Fraction = 0.0
    """Share of the target spread over all classes."""
    warmup_epochs: NotNegative = 1.0
    """Epochs in which the learning rate rises from 0; part of epochs."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls to 0 after the warm-up."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the gradient over all parameters; without it nothing is clipped."""
    eval_every_epochs: Count = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    log_every_steps: Count = 10
    """Steps between two lines of metrics.jsonl."""
    ema_decay: Fraction | None = None
    """Evaluate and export an average of the weights; a step leaves this share of it, after few steps (1+n)/(10+n)."""
    eval_flip: bool = False
    """Average the answers to each test image and its mirror image; an evaluation takes twice as long."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 runs the forward pass under autocast; weights stay fp32.  auto: bf16 where all ranks have units for it."""
    tf32: bool = False
    """Let GPUs round what they multiply to 10 bits of mantissa in fp32 convolutions and matrix products."""
    compile: bool = False
    """Compile the model with torch.compile: a minute at each start, then faster steps on GPUs; needs a C++ compiler."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """bf16 halves what ranks send each other, and rounds it; for slow networks."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA where a rank sees a GPU."""
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads within an operator; another number gives other bits."""
    bucket_cap_mb: Positive = 25.0
    """Mebibytes of gradients that DDP sums at once, while the backward pass goes on."""
    seed: Seed = 0
    """Of weights, sample order and augmentation."""
    deterministic: bool = True
    """Slower kernels with the same result on every run; needed for bit-equal resumption."""
    tensorboard: bool = False
    """Write metrics.jsonl as event files to the run folder's tensorboard/ too; needs the package tensorboard."""
    start_timeout_s: Positive = 600.0
    """Seconds for all ranks to meet, and again from there to the end of the first step; then the run is restarted."""
    step_timeout_s: Positive | None = None
    """Seconds a step may last before the run is restarted.  Default: ten times the slowest so far, 120 to 1800."""

    def global_batch(self, world_size: int) -> int:
        """Images per step over all ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size_per_rank is not None  # the default when neither is given
        return self.batch_size_per_rank * world_size


class DatasetSpec(_Section):
    """The images.  They are staged once, before the ranks start."""

    kind: Literal["cifar10", "cifar100", "image_folder", "synthetic"] = "cifar10"
    """image_folder reads root/train/<class>/ and root/test/<class>/; synthetic needs no download."""
    root: AbsolutePath = Path("data")
    """Folder on storage that all nodes see."""
    augment: Annotated[tuple[Literal["flip", "crop", "cutout"], ...], AfterValidator(check_once)] = ("flip", "crop")
    """What is done to the training images at random: crop, flip, then cutout, in whatever order they are listed."""
    accept_unpublished_md5: bool = False
    """Take a mirror of CIFAR whose files don't have the published MD5 sums."""
    num_train: Count | None = Field(default_factory=lambda data: 2048 if data.get("kind") == "synthetic" else None)
    """Training images to make up; synthetic only.  Default 2048."""
    num_test: Count | None = Field(default_factory=lambda data: 512 if data.get("kind") == "synthetic" else None)
    """Test images to make up; synthetic only.  Default 512."""

    @property
    def staged_path(self) -> Path:
        """The one file that ranks open."""
        sizes = f"_{self.num_train}_{self.num_test}" if self.kind == "synthetic" else ""
        return self.root / "staged" / f"{self.kind}{sizes}.pt"

    @property
    def staged_note(self) -> Path:
        """What the staged file holds, in numbers; for those who do not load torch."""
        return self.staged_path.with_suffix(".json")


class CheckpointSpec(_Section):
    """When rank 0 saves, apart from the end of the run and a stop."""

    every_steps: Count | None = None
    """Steps between saves."""
    every_minutes: Positive | None = Field(
        default_factory=lambda data: 10.0 if data.get("every_steps") is None else None
    )
    """Minutes between saves; with every_steps, whichever comes first.  Default 10, or none with every_steps."""
    keep_last: Count = 2
    """Newest checkpoints that are kept, beside the best one; with 2, one may turn out damaged."""
    keep_size: Memory | None = None
    """Such as 50G, of all checkpoints: older ones go earlier, the newest never.  A save needs its room beside that."""
    max_failed_saves: Count = 3
    """Saves in a row that may fail, of a full disk for instance, before the run stops."""
    save_timeout_s: Positive = 1800.0
    """Seconds a save may last before the run is restarted."""

    @property
    def keep_size_bytes(self) -> int | None:
        """Bytes of all checkpoints together."""
        return memory_mib(self.keep_size) << 20 if self.keep_size else None


Cause = Literal[
    "preempted", "time limit", "killed", "hang", "connection", "port", "launch", "unfit node", "srun killed",
    "out of memory", "exception", "nan", "disk", "unknown",
]  # fmt: skip


class RequeueSpec(_Section):
    """When a run that didn't finish is tried again.  Preemption, node failure and time limit always are."""

    max_failures: Annotated[int, Field(ge=0, le=1000)] = 0
    """Failures of the program, such as an exception, to survive; counted since the last progress."""
    policy: dict[Cause, Literal["restart", "requeue", "stop"]] = {}
    """What is done after an attempt, by what ended it, in place of the default: `{exception: stop, disk: requeue}`."""
    mode: Literal["auto", "requeue", "successor"] = "auto"
    """How the run gets its next job: it is requeued, or has a successor wait behind it; auto: as Slurm lets it."""
    submit_from: Literal["job", "login"] = "job"
    """Who submits successors: each job the next one, or cluster.submit some beforehand where jobs can't do that."""
    successors: Annotated[int, Field(ge=1, le=100)] = 3
    """How many are put in beforehand, with submit_from: login."""


class ContainerSpec(_Section):
    """An image that the ranks run in.  The supervisor stays outside of it, so that the run comes back.

    The run folder, the data set's root and the code are mounted where they are.
    """

    image: Expanded | None = None
    """For pyxis as its --container-image has it, or a .sqsh; for apptainer a .sif or docker://...  Needs runtime."""
    runtime: Literal["pyxis", "apptainer", "singularity"] | None = None
    """What starts it; pyxis is a plugin of Slurm."""
    mounts: tuple[Mount, ...] = ()
    """Further folders: /scratch, /here:/there or /here:/there:ro."""
    python: Word = "python3"
    """Interpreter in the image, with torch, pydantic and pyyaml."""


class FaultSpec(_Section):
    """A run broken on purpose, for drills and tests: a list of these.  Refused without CLUSTER_ALLOW_FAULTS=1."""

    at_step: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """Steps done when it happens: before the next one, or in the first save from then on."""
    rank: Annotated[int, Field(ge=0)]
    """Which rank breaks."""
    do: Literal["kill", "stop", "signal", "raise", "pause", "enospc", "slow_save", "kill_save", "port"]
    """kill, stop, signal: KILL, STOP, USR2 to itself; raise: an exception; pause: nothing until it is asked to stop.
    On rank 0: enospc, slow_save, kill_save: a full disk, 5 s more, KILL in a save; port: its first is taken."""
    every_attempt: bool = False
    """Whether it happens again after a restart; otherwise in the first attempt only."""


class JobSpec(_Section):
    """One training run: what Slurm is asked for, and what is trained.

    Made by load_spec, which also checks the rules between keys.
    """

    format_version: Literal[1] = FORMAT_VERSION
    """Of this file's form."""
    name: RunName
    """Of the run, its folder and the job."""
    cluster: Literal["slurm", "local"] = "slurm"
    """local starts the ranks on this machine, without Slurm."""
    nodes: NodeCount = 1
    """Machines to reserve: 4, or 2-4 for whatever is free; the latter needs train.global_batch_size."""
    gpus_per_node: Gpus | None = None
    """8, or with a type: a100:8.  Without it no GPUs are asked for."""
    tasks_per_node: Annotated[int, Field(ge=1, le=4096)] = Field(
        default_factory=lambda data: num_gpus(data.get("gpus_per_node") or "1")
    )
    """Ranks on each node.  Default: gpus_per_node, or 1 without GPUs."""
    cpus_per_task: Annotated[int, Field(ge=1, le=65_533)] | None = None
    """CPUs of each rank; without it Slurm's default, which is 1 on most sites."""
    memory_per_node: Memory | None = None
    """Such as 64G.  At most one of the three memory keys; without one, the site's default."""
    memory_per_cpu: Memory | None = None
    """Such as 4G."""
    memory_per_gpu: Memory | None = None
    """Such as 32G; needs gpus_per_node."""
    partition: Word | None = None
    """Slurm's queue, or several with commas between."""
    account: Word | None = None
    """Whom the run is charged to."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Expanded | None = None
    """Features that the nodes must have: "a100|h100"."""
    nodelist: Expanded | None = None
    """Nodes that must be part of the allocation: n[1-2]."""
    exclude: Expanded | None = None
    """Nodes that must not: n[3,5]."""
    reservation: Word | None = None
    """Reservation to run in."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    time_limit: Time | None = None
    """Of one allocation; a requeue starts a new one.  8:00:00, 1-12, or minutes.  Required on Slurm."""
    signal_lead_s: Annotated[int, Field(ge=10, le=65_535)] = 120
    """Seconds between Slurm's warning signal and the end of the allocation; must cover one step and one save."""
    comment: Line | None = None
    """Free text, shown by Slurm."""
    mail_user: Word | None = None
    """Who gets Slurm's mails."""
    mail_type: MailType | None = None
    """When: END,FAIL."""
    setup: tuple[ShellLine, ...] = ()
    """Shell lines that run before the ranks start, such as `module load cuda`; a failing one ends the job."""
    env: dict[VariableName, VariableValue] = {}
    """Variables of all ranks, in place of the submitting shell's and the image's.  MASTER_PORT here wins over the port
    the program draws."""
    python: Interpreter | None = None
    """Absolute path of the interpreter of supervisor and ranks, with all that this program needs.  Default: the one
    that submits."""
    code: Literal["snapshot", "live"] = "snapshot"
    """What runs: the code as it was at submission, copied into the run folder, or what lies there at each start."""
    sbatch: dict[FlagName, FlagValue] = {}
    """Further flags of sbatch by their long names without dashes; true gives a flag without a value."""
    run_root: LogFolder = Path("runs")
    """Where run folders are made; on storage that all nodes see."""
    run_root_mode: Literal["private", "group", "world"] = "private"
    """Who may read a new run folder: its owner alone, the owner's group too, or everybody."""
    train: TrainSpec = Field(default_factory=TrainSpec)
    """What is trained, and how."""
    dataset: DatasetSpec = Field(default_factory=DatasetSpec)
    """On what."""
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """When the state is saved."""
    requeue: RequeueSpec = Field(default_factory=RequeueSpec)
    """When it is tried again."""
    container: ContainerSpec = Field(default_factory=ContainerSpec)
    """In which image it runs."""
    faults: tuple[FaultSpec, ...] = ()
    """How it is broken on purpose."""

    @property
    def min_nodes(self) -> int:
        """Fewest machines that the run goes on with."""
        return node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """Most machines that it asks for."""
        return node_range(self.nodes)[1]

    @property
    def run_folder_mode(self) -> int:
        """Permissions of a new run folder."""
        return {"private": 0o700, "group": 0o750, "world": 0o755}[self.run_root_mode]

    @property
    def num_gpus_per_node(self) -> int:
        """GPUs on each node, whatever their type; 0 without."""
        return num_gpus(self.gpus_per_node) if self.gpus_per_node else 0

    @property
    def num_tasks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node

    @property
    def world_size(self) -> int:
        """Ranks of the run, on the most nodes that it asks for."""
        return self.max_nodes * self.tasks_per_node

    @property
    def time_limit_s(self) -> int | None:
        """Seconds of one allocation."""
        return time_s(self.time_limit) if self.time_limit else None

    @property
    def slurm_time(self) -> str | None:
        """The limit as `[D-]HH:MM:SS`, the form that has one reading."""
        return slurm_time(self.time_limit_s) if self.time_limit_s else None

    @property
    def memory_per_node_mib(self) -> int | None:
        """MiB of each node."""
        return memory_mib(self.memory_per_node) if self.memory_per_node else None

    @property
    def memory_per_cpu_mib(self) -> int | None:
        """MiB for each CPU."""
        return memory_mib(self.memory_per_cpu) if self.memory_per_cpu else None

    @property
    def memory_per_gpu_mib(self) -> int | None:
        """MiB for each GPU."""
        return memory_mib(self.memory_per_gpu) if self.memory_per_gpu else None


SECTIONS = ("train", "dataset", "checkpoint", "requeue", "container")
SECTION_MODELS: Mapping[str, type[BaseModel]] = {  # "" is the top level
    "": JobSpec, "train": TrainSpec, "dataset": DatasetSpec, "checkpoint": CheckpointSpec, "requeue": RequeueSpec,
    "container": ContainerSpec, "faults": FaultSpec,
}  # fmt: skip
FAULTS: Key = ("faults",)
FAULTS_REFUSED = (
    f"only drills and tests may break a run on purpose; set {FAULTS_VARIABLE}=1 in the environment, or leave it out"
)


def faults_allowed(environ: Mapping[str, str]) -> bool:
    """Whether a spec may ask for faults."""
    return environ.get(FAULTS_VARIABLE) == "1"


def load_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cwd: Path,
    allow_faults: bool = False,
    maybe_text: str | None = None,
) -> JobSpec:
    """Read and check a spec file; arguments and errors as of read_spec."""
    return read_spec(path, overrides, cwd=cwd, allow_faults=allow_faults, maybe_text=maybe_text).spec


@dataclass(frozen=True, slots=True)
class SourcedSpec:
    """A spec that knows where each of its values stands."""

    spec: JobSpec
    source: str  # the file, as it was named
    document: Document

    def origin(self, key: Key) -> str:
        """Who gave a key its value: `file:line`, `command line` or `default`."""
        given = self.document.places.get(key)
        return "default" if given is None else where(self.source, given.line)


def read_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cwd: Path,
    allow_faults: bool = False,
    maybe_text: str | None = None,
) -> SourcedSpec:
    """Read and check a spec file.

    overrides: `section.key=value` or `key=value`, in place of what the file says.
    cwd: absolute folder that relative paths start from, `path` included.
    allow_faults: whether the spec may break its run on purpose; faults_allowed() says.
    maybe_text: what the file holds, where somebody has read it already.
    Raises SpecError: anything is wrong; every problem is in it, the file's in the order of lines.
    """
    text = _read_text(path, cwd) if maybe_text is None else maybe_text
    document = read_document(text)
    if document.values or not document.problems:
        apply_overrides(document, overrides)
        spec = _checked(document, cwd)
        if spec.faults and not allow_faults:
            document.complain(document.place(FAULTS).line, FAULTS, FAULTS_REFUSED)
    if document.problems:
        raise SpecError(_listed(document.problems, path))
    if len(text) + sum(map(len, overrides)) > SMALL_LENGTH:
        _check_size(spec, path)
    return SourcedSpec(spec, str(path), document)


def check_packages(spec: JobSpec) -> None:
    """Look whether this interpreter has the packages that a spec needs beside those we always need; none is imported.

    Raises SpecError: it lacks one, or has it in a version that is too old.
    """
    if spec.train.optimizer == "muon" and (found := _torch_version()) < MUON_SINCE:
        raise SpecError(
            [
                f"train.optimizer: muon needs torch {shown_version(MUON_SINCE)}, and {sys.executable} has "
                f"{shown_version(found) or 'none'}: upgrade torch, or use sgd"
            ]
        )
    if spec.train.tensorboard and find_spec("tensorboard") is None:
        raise SpecError(
            [
                f"train.tensorboard: the package tensorboard is not installed for {sys.executable}; "
                f"install it ({sys.executable} -m pip install tensorboard), or leave the key out"
            ]
        )


def _torch_version() -> tuple[int, ...]:
    """Major and minor version of the torch that this interpreter would import; empty without one."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2])


def shown_version(parts: tuple[int, ...]) -> str:
    """(2, 9) as 2.9."""
    return ".".join(map(str, parts))


def dump_spec(spec: JobSpec) -> str:
    """The spec as YAML with every default written out; load_spec of it gives an equal spec."""
    return "".join(_dumped(spec))


def changed_keys(old: JobSpec, new: JobSpec) -> tuple[str, ...]:
    """Dotted keys whose values differ, in the order of the spec: ("time_limit", "train.epochs")."""
    after = dict(_settings(new))
    return tuple(key for key, value in _settings(old) if value != after[key])


def _listed(problems: Iterable[Problem], path: Path) -> list[str]:
    """Problems as their user reads them, in the order of lines; of very many the first."""
    lines = [problem.render(str(path)) for problem in sorted(problems)]
    rest = len(lines) - MAX_PROBLEMS
    return [*lines[:MAX_PROBLEMS], f"{path}: {rest:,} more problems are not shown"] if rest > 0 else lines


def _check_size(spec: JobSpec, path: Path) -> None:
    """Raises SpecError: the run folder's copy, with every default, would be too long to be read again."""
    size = len(dump_spec(spec).encode())
    if size > MAX_BYTES:
        message = f"with every default written out it has {size:,} bytes; the most is {MAX_BYTES:,}"
        raise SpecError(_listed([Problem(WHOLE_FILE, "", message)], path))


def _read_text(path: Path, cwd: Path) -> str:
    try:
        with (cwd / path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            return data.decode("utf-8-sig")
        message = f"has more than {MAX_BYTES:,} bytes, which no spec needs; is this the right file?"
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8; save the file as UTF-8"
    except OSError as error:
        message = f"can't be read: {error.strerror}"
    raise SpecError([Problem(WHOLE_FILE, "", message).render(str(path))])


def _checked(document: Document, cwd: Path) -> JobSpec:
    """The spec of a document.  Notes what is wrong: of single keys, and between those keys that are right."""
    values: dict[str, Any] = {name: {} for name in SECTIONS} | document.values
    refused: dict[Key, Problem] = {}
    try:
        spec = JobSpec.model_validate(values, context={"cwd": cwd})
    except ValidationError as error:
        refused = explain(error, document, JobSpec)
        spec = JobSpec.model_validate(_without(values, refused))
    document.problems.extend(refused.values())
    document.problems.extend(explain_rules(contradictions(spec), document, refused))
    return spec


def _without(values: dict[str, Any], refused: Iterable[Key]) -> dict[str, Any]:
    """Values that are right, with a stand-in for the one required key; what is left out gets its default."""
    kept = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for key in refused:
        if len(key) == 1 or not isinstance(kept.get(key[0]), dict):
            kept.pop(key[0], None)
        else:
            kept[key[0]].pop(key[1], None)
    return {"name": "unnamed"} | kept


def _dumped(section: BaseModel) -> Iterator[str]:
    """One piece of YAML for each key of a section."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield f"{name}:\n" + textwrap.indent("".join(_dumped(value)), "  ")
        elif value is None:
            yield f"# {name}: not set\n"
        else:
            yield yaml.dump(
                {name: _plain(value)}, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=sys.maxsize
            )


def _plain(value: object) -> object:
    """A value in YAML's own types."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return value.model_dump()
    return str(value) if isinstance(value, Path) else value


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes wherever a spec's reader would see something else: "1e-3" is text, 1e-3 is a number."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(read_plain(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
