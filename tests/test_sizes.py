"""Sizes that a dry run tells, against the models and the files that they are about."""

from pathlib import Path

import pytest
import torch

from cluster.runs import write_json
from cluster.sizes import MODELS, Sizes, sizes_of
from cluster.spec import JobSpec, load_spec
from jobs.learner import Learner
from jobs.model import build_model

SPEC = "name: demo\ntime_limit: 60\nnodes: 2\ntasks_per_node: 2\n"


def spec_of(folder: Path, text: str) -> JobSpec:
    (folder / "spec.yaml").write_text(SPEC + text)
    return load_spec(Path("spec.yaml"), cwd=folder)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_classes", [10, 100])
def test_sizes_of_models_are_those_of_the_models(name: str, num_classes: int) -> None:
    model, size = build_model(name, num_classes), MODELS[name]
    assert sum(weight.numel() for weight in model.parameters()) == size.fixed + size.per_class * num_classes
    assert sum(buffer.nbytes for buffer in model.buffers()) == size.buffer_bytes


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_checkpoint_is_as_large_as_was_told_to_one_percent(tmp_path: Path, momentum: float) -> None:
    spec = spec_of(tmp_path, f"train: {{momentum: {momentum}}}\n")
    model = build_model("resnet18", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    torch.stack([weight.sum() for weight in model.parameters()]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    told = sizes_of(spec).checkpoint_bytes
    assert told is not None
    assert (tmp_path / "checkpoint.pt").stat().st_size == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize("train", ["{optimizer: muon}", "{optimizer: muon, momentum: 0}", "{ema_decay: 0.9}"])
def test_size_of_a_checkpoint_holds_with_other_optimizers_and_an_average(tmp_path: Path, train: str) -> None:
    spec = spec_of(tmp_path, f"train: {train}\n")
    learner = Learner.of(build_model("resnet18", 10), spec.train)
    for weight in learner.model.parameters():
        weight.grad = torch.zeros_like(weight)
    learner.update(lambda peak: peak)
    torch.save(learner.state(), tmp_path / "checkpoint.pt")
    told = sizes_of(spec).checkpoint_bytes
    assert told is not None
    assert (tmp_path / "checkpoint.pt").stat().st_size == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize(
    ("text", "batch", "per_epoch", "steps"),
    [
        ("", 512, 98, 2940),
        ("train: {global_batch_size: 1000, epochs: 2}\n", 1000, 50, 100),
        ("train: {global_batch_size: 1000, max_steps: 70}\n", 1000, 50, 70),
        ("dataset: {kind: synthetic, num_train: 100}\ntrain: {batch_size_per_rank: 8, epochs: 1}\n", 32, 4, 4),
    ],
)
def test_length_follows_from_images_and_batch(
    tmp_path: Path, text: str, batch: int, per_epoch: int, steps: int
) -> None:
    told = sizes_of(spec_of(tmp_path, text))
    assert (told.global_batch_size, told.steps_per_epoch, told.total_steps) == (batch, per_epoch, steps)


def test_folder_of_images_is_known_once_it_is_staged(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dataset: {kind: image_folder, root: images}\ntrain: {epochs: 3}\n")
    assert sizes_of(spec) == Sizes(512, None, None, None, None, None)
    spec.dataset.staged_note.parent.mkdir(parents=True)
    write_json(spec.dataset.staged_note, {"num_train": 1025, "num_test": 1, "num_classes": 2})  # as jobs.stage does
    told = sizes_of(spec)
    assert (told.num_train, told.num_classes, told.steps_per_epoch, told.total_steps) == (1025, 2, 3, 9)
    assert told.checkpoint_bytes == 89_397_424
