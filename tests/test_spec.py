import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from cluster.spec import JobSpec, SpecError, TrainSpec, changed_keys, check_packages, dump_spec, load_spec
from tests.specs import load, problems, spec_with

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# One right value for every key; test_every_key_has_a_right_value holds it complete.
RIGHT = {
    "format_version": "1",
    "name": "demo",
    "cluster": "slurm",
    "nodes": "2",
    "gpus_per_node": "a100:8",
    "tasks_per_node": "4",
    "cpus_per_task": "6",
    "memory_per_node": "64G",
    "memory_per_cpu": "4G",
    "memory_per_gpu": "32G",
    "partition": "gpu",
    "account": "'0042'",
    "qos": "low",
    "constraint": "a100|h100",
    "nodelist": "n[1-2]",
    "exclude": "n[3,5]",
    "reservation": "maintenance",
    "exclusive": "true",
    "time_limit": "12:00:00",
    "signal_lead_s": "60",
    "comment": "for the paper",
    "mail_user": "me@example.org",
    "mail_type": "END,FAIL",
    "setup": "[module load cuda]",
    "env": "{NCCL_DEBUG: INFO}",
    "python": "/opt/venv/bin/python",
    "code": "live",
    "sbatch": "{licenses: 'fluent:1', nice: 100, hold: true}",
    "run_root": "/shared/runs",
    "run_root_mode": "group",
    "train": "{epochs: 1}",
    "train.model": "small",
    "train.epochs": "3",
    "train.max_steps": "100",
    "train.global_batch_size": "512",
    "train.micro_batch_size": "64",
    "train.batch_size_per_rank": "64",
    "train.optimizer": "muon",
    "train.lr": "1e-3",
    "train.momentum": "0.8",
    "train.muon_lr": "0.01",
    "train.muon_momentum": "0.9",
    "train.weight_decay": "0",
    "train.label_smoothing": "0.1",
    "train.warmup_epochs": "2",
    "train.schedule": "linear",
    "train.clip_grad_norm": "1",
    "train.eval_every_epochs": "2",
    "train.log_every_steps": "5",
    "train.ema_decay": "0.99",
    "train.eval_flip": "true",
    "train.precision": "bf16",
    "train.tf32": "true",
    "train.compile": "true",
    "train.gradient_compression": "bf16",
    "train.device": "cpu",
    "train.threads_per_rank": "2",
    "train.bucket_cap_mb": "1",
    "train.seed": "7",
    "train.deterministic": "false",
    "train.tensorboard": "true",
    "train.start_timeout_s": "300",
    "train.step_timeout_s": "60",
    "dataset": "{kind: cifar100}",
    "dataset.kind": "cifar100",
    "dataset.root": "/shared/data",
    "dataset.augment": "[flip, cutout]",
    "dataset.accept_unpublished_md5": "true",
    "dataset.num_train": "100",
    "dataset.num_test": "50",
    "checkpoint": "{keep_last: 3}",
    "checkpoint.every_steps": "50",
    "checkpoint.every_minutes": "0.5",
    "checkpoint.keep_last": "3",
    "checkpoint.keep_size": "50G",
    "checkpoint.max_failed_saves": "5",
    "checkpoint.save_timeout_s": "900",
    "requeue": "{max_failures: 1}",
    "requeue.max_failures": "2",
    "requeue.policy": "{exception: stop, time limit: requeue}",
    "requeue.mode": "successor",
    "requeue.submit_from": "login",
    "requeue.successors": "5",
    "container": "{image: nvcr.io#nvidia/pytorch:25.09-py3, runtime: pyxis}",
    "container.image": "/images/torch.sif",
    "container.runtime": "apptainer",
    "container.mounts": "[/scratch, '/here:/there:ro']",
    "container.python": "/opt/conda/bin/python",
    "faults": "[{at_step: 5, rank: 0, do: kill}]",
}
COMPANIONS = {
    "requeue.submit_from": ["requeue.mode=successor"],
    "container.image": ["container.runtime=apptainer"],
    "container.runtime": ["container.image=/images/torch.sif"],
    "container.mounts": ["container.image=/images/torch.sif", "container.runtime=apptainer"],
    "container.python": ["container.image=/images/torch.sif", "container.runtime=apptainer"],
    "memory_per_gpu": ["gpus_per_node=1"],
    "train.micro_batch_size": ["train.global_batch_size=512"],
    "dataset.num_train": ["dataset.kind=synthetic"],
    "dataset.num_test": ["dataset.kind=synthetic"],
}


def schema(model: type[BaseModel] = JobSpec, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from schema(field.annotation, f"{name}.")


SCHEMA = dict(schema())


def first_line(key: str) -> int:
    return 4 if "." in key else 3


def test_every_key_has_a_right_value() -> None:
    assert list(RIGHT) == list(SCHEMA)


@pytest.mark.parametrize("key", SCHEMA)
def test_a_right_value_of_every_key_loads(tmp_path: Path, key: str) -> None:
    spec = load(tmp_path, spec_with(key, f"{key.split('.')[-1]}: {RIGHT[key]}"), *COMPANIONS.get(key, []))
    section, _, name = key.rpartition(".")
    part = getattr(spec, section) if section else spec
    assert name in part.model_fields_set


def words_for_a_list(annotation: object) -> str:
    """What a list of lists means to a field of some type; the types are those that the spec uses."""
    if get_origin(annotation) in (types.UnionType, Union):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        listed = " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]
        return f"a list is not known here; use {listed}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "expected a section of keys, got a list"
    words: dict[object, str] = {
        str: "expected text, got a list; put it in quotes if it is text",
        int: "a list is no whole number",
        float: "a list is no number",
        bool: "a list is neither true nor false",
        Path: "a list is no path; put it in quotes if it is one",
        tuple: "expected a list, such as [one, two], got 5",
        dict: "expected a mapping of names to values, got a list",
    }
    return words[get_origin(annotation) or annotation]


@pytest.mark.parametrize("key", SCHEMA)
def test_a_wrong_type_is_one_problem_at_its_line(tmp_path: Path, key: str) -> None:
    words = words_for_a_list(SCHEMA[key])
    wrong = "5" if words.endswith("got 5") else "[[1]]"
    found = problems(tmp_path, spec_with(key, f"{key.split('.')[-1]}: {wrong}"))
    assert found == [f"spec.yaml:{first_line(key)}: {key}: {words}"]


@pytest.mark.parametrize("nothing", ["", " null", " ~"])
@pytest.mark.parametrize("key", SCHEMA)
def test_a_key_without_a_value_is_one_problem_at_its_line(tmp_path: Path, key: str, nothing: str) -> None:
    found = problems(tmp_path, spec_with(key, f"{key.split('.')[-1]}:{nothing}"))
    assert found == [f"spec.yaml:{first_line(key)}: {key}: has no value; give one, or leave the key out"]


@pytest.mark.parametrize("key", SCHEMA)
def test_an_unknown_neighbour_is_one_problem_with_a_near_match(tmp_path: Path, key: str) -> None:
    name = key.split(".")[-1]
    found = problems(tmp_path, spec_with(key, f"{name}: {RIGHT[key]}", f"{name}x: 1"), *COMPANIONS.get(key, []))
    assert found == [f"spec.yaml:{first_line(key) + 1}: {key}x: unknown key; did you mean {name}?"]


@pytest.mark.parametrize("key", SCHEMA)
def test_a_duplicate_is_one_problem_at_the_second_line(tmp_path: Path, key: str) -> None:
    line = f"{key.split('.')[-1]}: {RIGHT[key]}"
    found = problems(tmp_path, spec_with(key, line, line), *COMPANIONS.get(key, []))
    number = first_line(key)
    assert found == [f"spec.yaml:{number + 1}: {key}: duplicate key; the first is on line {number}"]


def test_defaults_of_a_spec_with_the_required_keys_only(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: demo\ntime_limit: 60\n")
    assert (spec.cluster, spec.nodes, spec.num_gpus_per_node, spec.num_tasks_per_node) == ("slurm", 1, 0, 1)
    assert (spec.world_size, spec.signal_lead_s, spec.requeue.max_failures) == (1, 120, 0)
    assert (spec.run_root, spec.dataset.root) == (tmp_path / "runs", tmp_path / "data")
    assert (spec.checkpoint.every_steps, spec.checkpoint.every_minutes) == (None, 10.0)
    assert (spec.dataset.num_train, spec.dataset.num_test) == (None, None)
    assert spec.train.global_batch(4) == 512


def test_tasks_per_node_follows_the_gpus(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: demo\ntime_limit: 60\nnodes: 3\ngpus_per_node: a100:8\n")
    assert spec.gpus_per_node == "a100:8"
    assert (spec.num_gpus_per_node, spec.num_tasks_per_node, spec.world_size) == (8, 8, 24)


def test_a_number_of_gpus_is_kept_as_text(tmp_path: Path) -> None:
    assert load(tmp_path, "name: demo\ntime_limit: 60\ngpus_per_node: 8\n").gpus_per_node == "8"


def test_global_batch_size_replaces_the_batch_size_per_rank(tmp_path: Path) -> None:
    train = load(tmp_path, "name: demo\ntime_limit: 60\ntrain: {global_batch_size: 300}\n").train
    assert (train.batch_size_per_rank, train.global_batch(1), train.global_batch(4)) == (None, 300, 300)


def test_every_steps_replaces_every_minutes(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, "name: demo\ntime_limit: 60\ncheckpoint: {every_steps: 7}\n").checkpoint
    assert (checkpoint.every_steps, checkpoint.every_minutes) == (7, None)


def test_made_up_images_have_their_sizes_in_the_staged_name(tmp_path: Path) -> None:
    dataset = load(tmp_path, "name: demo\ntime_limit: 60\ndataset: {kind: synthetic, num_test: 64}\n").dataset
    assert dataset.staged_path == tmp_path / "data/staged/synthetic_2048_64.pt"
    dataset = load(tmp_path, "name: demo\ntime_limit: 60\n").dataset
    assert dataset.staged_path == tmp_path / "data/staged/cifar10.pt"


def test_relative_paths_start_from_the_working_folder(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: demo\ntime_limit: 60\nrun_root: ../out\ndataset: {root: /shared}\n")
    assert (spec.run_root, spec.dataset.root) == (tmp_path / "../out", Path("/shared"))


def test_a_whole_number_for_a_decimal_field_becomes_a_float(tmp_path: Path) -> None:
    train = load(tmp_path, "name: demo\ntime_limit: 60\ntrain: {lr: 1, weight_decay: 1e-3, momentum: .5}\n").train
    assert [(type(value), value) for value in (train.lr, train.weight_decay, train.momentum)] == [
        (float, 1.0), (float, 0.001), (float, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.name))
def test_a_dumped_config_loads_as_the_same_spec_from_anywhere(tmp_path: Path, config: Path) -> None:
    spec = load_spec(config, cwd=ROOT)
    (tmp_path / "spec.yaml").write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec(Path("spec.yaml"), cwd=tmp_path) == spec


@pytest.mark.parametrize("key", SCHEMA)
def test_every_key_survives_a_dump(tmp_path: Path, key: str) -> None:
    text = spec_with(key, f"{key.split('.')[-1]}: {RIGHT[key]}")
    spec = load(tmp_path, text, *COMPANIONS.get(key, []))
    assert load(tmp_path, dump_spec(spec)) == spec


@pytest.mark.parametrize(
    "text", ["1e-3", "no", "010", "null", "a #b", "a: b", "'", '"', "{a}", "*x", "12:00:00", "é 学 🙂"]
)
def test_text_that_yaml_would_read_otherwise_survives_a_dump(tmp_path: Path, text: str) -> None:
    spec = JobSpec(
        name=text, time_limit="60", comment=text, setup=(text, "x" * 300), env={"no": text}, sbatch={"nice": text},
        run_root=tmp_path / text,
    )  # fmt: skip
    assert load(tmp_path, dump_spec(spec), "dataset.root=data") == spec.model_copy(
        update={"dataset": spec.dataset.model_copy(update={"root": tmp_path / "data"})}
    )


def test_a_dump_names_every_key(tmp_path: Path) -> None:
    dumped = dump_spec(load(tmp_path, "name: demo\ntime_limit: 60\n")).splitlines()
    named = [line.strip().removeprefix("# ").split(":")[0] for line in dumped if ":" in line]
    assert named == [key.split(".")[-1] for key in SCHEMA]
    assert dumped[0] == "format_version: 1"


def test_changed_keys_are_named_with_their_section(tmp_path: Path) -> None:
    old = load(tmp_path, "name: demo\ntime_limit: 60\n")
    new = load(tmp_path, "name: demo\ntime_limit: 90\ntrain: {epochs: 99}\nenv: {A: b}\n")
    assert changed_keys(old, old) == ()
    assert changed_keys(old, new) == ("time_limit", "env", "train.epochs")


def test_the_shipped_configs() -> None:
    assert [config.name for config in CONFIGS] == [
        "4node.yaml", "cifar100.yaml", "drill.yaml", "image_folder.yaml", "local.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.name))
def test_a_config_opens_with_its_command(config: Path) -> None:
    first = config.read_text(encoding="utf-8").splitlines()[0]
    module = "cluster.drill" if config.name == "drill.yaml" else "cluster.submit"
    assert first.split()[:5] == ["#", "python", "-m", module, f"configs/{config.name}"]


def test_the_reference_config_is_four_nodes_of_two_gpus() -> None:
    spec = load_spec(ROOT / "configs/4node.yaml", cwd=ROOT)
    assert (spec.nodes, spec.gpus_per_node, spec.num_tasks_per_node, spec.world_size) == (4, "2", 2, 8)
    assert (spec.slurm_time, spec.train.model, spec.dataset.kind) == ("08:00:00", "resnet18", "cifar10")


def test_importing_the_spec_loads_nothing_heavy() -> None:
    probe = "import sys, cluster.spec; print([name for name in ('torch', 'submitit', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainSpec().epochs = 3


def test_muon_of_a_torch_that_is_too_old_is_refused_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load(tmp_path, spec_with("train.optimizer", "optimizer: muon"))
    check_packages(spec)
    monkeypatch.setattr("cluster.spec.MUON_SINCE", (99, 1))
    with pytest.raises(SpecError) as caught:
        check_packages(spec)
    have = ".".join(version("torch").split(".")[:2])
    assert str(caught.value) == (
        f"train.optimizer: muon needs torch 99.1, and {sys.executable} has {have}: upgrade torch, or use sgd"
    )
    check_packages(load(tmp_path, spec_with("train.optimizer", "optimizer: sgd")))
