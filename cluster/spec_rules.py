"""Rules between keys: job spec, each field of it valid -> [what contradicts what].  Used by load_spec."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cluster.allocation import fills_node_after_node
from cluster.spec_yaml import Key, entry, shown

if TYPE_CHECKING:
    from cluster.spec import JobSpec

START_S = 90  # Slurm signals up to 60 s early, and a run needs some time to start

SLURM_ONLY = (
    "memory_per_node", "memory_per_cpu", "memory_per_gpu", "partition", "account", "qos", "constraint", "nodelist",
    "exclude", "reservation", "exclusive", "comment", "mail_user", "mail_type", "sbatch",
)  # fmt: skip


class Contradiction(NamedTuple):
    """A rule that the spec breaks."""

    keys: tuple[Key, ...]  # all keys that the rule reads; those left out of the file have their defaults
    message: str
    maybe_missing: Key | None = None  # the key that ought to be there


def contradictions(spec: "JobSpec") -> Iterator[Contradiction]:
    """Every rule between keys that a spec breaks."""
    yield from _local_rules(spec) if spec.cluster == "local" else _slurm_rules(spec)
    yield from _resource_rules(spec)
    yield from _train_rules(spec)
    yield from _dataset_rules(spec)
    yield from _requeue_rules(spec)
    yield from _variable_rules(spec)
    yield from _container_rules(spec)
    yield from _distribution_rules(spec)
    yield from _fault_rules(spec)


def _local_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    if spec.nodes != 1:
        message = f"nodes is {spec.nodes}, but cluster is local, which is one node; leave nodes out"
        yield Contradiction((("nodes",), ("cluster",)), message)
    for key in SLURM_ONLY:
        if getattr(spec, key):
            yield Contradiction(((key,), ("cluster",)), f"{key} is for Slurm, but cluster is local; leave {key} out")


def _slurm_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    if spec.time_limit is None:
        message = "is required on Slurm; give the time one allocation may take, such as 8:00:00"
        yield Contradiction((("cluster",), ("time_limit",)), message, maybe_missing=("time_limit",))
    if spec.train.device == "cuda" and spec.gpus_per_node is None:
        message = "train.device is cuda, but no GPUs are asked for; give gpus_per_node"
        yield Contradiction((("train", "device"), ("gpus_per_node",), ("cluster",)), message)
    gres = spec.sbatch.get("gres")
    if isinstance(gres, str) and any(part.split(":")[0].split("/")[-1] == "gpu" for part in gres.split(",")):
        yield Contradiction((("sbatch", "gres"),), f"{shown(gres)} asks for GPUs; use the key gpus_per_node")


def _resource_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    if spec.min_nodes < spec.max_nodes and spec.train.global_batch_size is None:
        message = f"nodes {spec.nodes} needs train.global_batch_size, or the batch would change with the nodes; give it"
        yield Contradiction((("nodes",), ("train", "global_batch_size")), message)
    given = [key for key in ("memory_per_node", "memory_per_cpu", "memory_per_gpu") if getattr(spec, key)]
    if len(given) > 1:
        yield Contradiction(tuple((key,) for key in given), f"{' and '.join(given)} exclude each other; keep one")
    if spec.memory_per_gpu and spec.gpus_per_node is None:
        message = "memory_per_gpu needs gpus_per_node; give it, or use memory_per_node"
        yield Contradiction((("memory_per_gpu",), ("gpus_per_node",)), message)
    if spec.num_gpus_per_node and spec.train.device != "cpu" and spec.tasks_per_node > spec.num_gpus_per_node:
        message = (
            f"tasks_per_node {spec.tasks_per_node} is more than the GPUs of gpus_per_node {spec.gpus_per_node}; "
            "each rank needs its own"
        )
        yield Contradiction((("tasks_per_node",), ("gpus_per_node",), ("train", "device")), message)
    if spec.time_limit_s is not None and spec.time_limit_s <= (least := spec.signal_lead_s + START_S):
        message = (
            f"time_limit {spec.time_limit} is {spec.time_limit_s} s and must exceed signal_lead_s + {START_S} s = "
            f"{least} s; give more time or a shorter lead"
        )
        yield Contradiction((("time_limit",), ("signal_lead_s",)), message)


def _train_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    train = spec.train
    if train.batch_size_per_rank is not None and train.global_batch_size is not None:
        message = "batch_size_per_rank and global_batch_size exclude each other; keep one"
        yield Contradiction((("train", "batch_size_per_rank"), ("train", "global_batch_size")), message)
    if train.micro_batch_size is not None and train.micro_batch_size > (train.global_batch_size or 0):
        message = (
            f"micro_batch_size {train.micro_batch_size} needs a train.global_batch_size of at least as much; "
            "give that, or leave it out"
        )
        yield Contradiction((("train", "micro_batch_size"), ("train", "global_batch_size")), message)
    if train.warmup_epochs > train.epochs:
        message = f"warmup_epochs {train.warmup_epochs} is more than epochs {train.epochs}"
        yield Contradiction((("train", "warmup_epochs"), ("train", "epochs")), message)


def _dataset_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    dataset = spec.dataset
    for key in ("num_train", "num_test"):
        if dataset.kind != "synthetic" and getattr(dataset, key) is not None:
            message = f"{key} is for kind synthetic, but kind is {dataset.kind}; leave {key} out"
            yield Contradiction((("dataset", key), ("dataset", "kind")), message)
    if dataset.accept_unpublished_md5 and not dataset.kind.startswith("cifar"):
        message = f"accept_unpublished_md5 is for the CIFAR archives, but kind is {dataset.kind}; leave it out"
        yield Contradiction((("dataset", "accept_unpublished_md5"), ("dataset", "kind")), message)


def _requeue_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    if spec.requeue.submit_from == "login" and spec.requeue.mode != "successor":
        message = (
            f"submit_from: login puts successors in beforehand, but mode is {spec.requeue.mode}; use mode: successor"
        )
        yield Contradiction((("requeue", "submit_from"), ("requeue", "mode")), message)


def _variable_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    port = spec.env.get("MASTER_PORT", "1")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        message = f"{shown(port)} is no TCP port; use a number from 1 to 65535, in quotes"
        yield Contradiction((("env", "MASTER_PORT"),), message)


def _container_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    container = spec.container
    image, runtime = ("container", "image"), ("container", "runtime")
    if container.image and container.runtime is None:
        message = "is required with an image; use pyxis, apptainer or singularity, whichever your cluster has"
        yield Contradiction((image, runtime), message, maybe_missing=runtime)
    if container.image is None:
        for key in ("runtime", "mounts", "python"):
            if getattr(container, key) != type(container).model_fields[key].default:
                message = f"{key} is for a container, but there is no container.image; give one, or leave {key} out"
                yield Contradiction((("container", key), image), message)
        return
    if container.runtime == "pyxis" and spec.cluster == "local":
        message = (
            "pyxis is a plugin of Slurm, but cluster is local; use apptainer or singularity, or leave container out"
        )
        yield Contradiction((runtime, ("cluster",)), message)
    for keys, path in ((("run_root",), spec.run_root), (("dataset", "root"), spec.dataset.root)):
        if {",", ":"} & set(str(path)):
            yield Contradiction((keys, image), f"{path} holds , or :, which no container can mount; use another folder")


def _distribution_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    distribution = spec.sbatch.get("distribution")
    if distribution is not None and not fills_node_after_node(str(distribution)):
        message = (
            f"{shown(str(distribution))} does not fill one node after the other, and a rank's number has to tell its "
            "node; use block, as in block:cyclic, or leave it out"
        )
        yield Contradiction((("sbatch", "distribution"),), message)


def _fault_rules(spec: "JobSpec") -> Iterator[Contradiction]:
    for number, fault in enumerate(spec.faults):
        key = ("faults", entry(number), "rank")
        if fault.do in ("enospc", "slow_save", "kill_save", "port") and fault.rank != 0:
            does = "serves no store" if fault.do == "port" else "never saves"
            yield Contradiction((key,), f"{fault.rank} {does}; {fault.do} needs rank 0")
        elif fault.rank >= spec.world_size:
            message = f"{fault.rank} is no rank of a run with {spec.world_size}; they count from 0"
            yield Contradiction((key, ("nodes",), ("tasks_per_node",)), message)
