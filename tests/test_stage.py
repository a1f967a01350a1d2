"""Staging: one file, published at once, by a command that may be repeated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.spec import DatasetSpec
from jobs.data import DataError, open_staged
from jobs.stage import channel_statistics, main, stage

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: staging\n"
        "cluster: local\n"
        f"dataset: {{kind: synthetic, root: {tmp_path}/data, num_train: 50, num_test: 20}}\n"
    )
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetSpec:
    """What the spec says."""
    return DatasetSpec(kind="synthetic", root=tmp_path / "data", num_train=50, num_test=20)


def start(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "jobs.stage", *arguments]
    environ = {**os.environ, **variables}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_staged_file_tells_kind_origin_and_classes(dataset: DatasetSpec) -> None:
    path = stage(dataset)
    staged = torch.load(path, weights_only=True)
    primitives = {key: value for key, value in staged.items() if not isinstance(value, torch.Tensor)}
    assert path == dataset.staged_path
    assert primitives == {
        "format_version": 1,
        "kind": "synthetic",
        "classes": [f"cloud_{label}" for label in range(10)],
        "origin": "generated",
        "md5_checked": False,
    }


def test_nothing_but_the_staged_file_and_its_note_is_left(dataset: DatasetSpec) -> None:
    assert sorted(stage(dataset).parent.iterdir()) == [dataset.staged_note, dataset.staged_path]
    noted = json.loads(dataset.staged_note.read_text())
    assert noted == {"format_version": 1, "num_train": 50, "num_test": 20, "num_classes": 10}


def test_channel_statistics_are_those_of_the_pixels() -> None:
    images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 3
    pixels = images.double() / 255
    mean, std = channel_statistics(images)
    assert torch.equal(mean, pixels.mean(dim=(0, 2, 3)).float())
    assert torch.equal(std, pixels.std(dim=(0, 2, 3), unbiased=False).float())


def test_second_staging_says_that_the_file_is_there(
    spec: Path, dataset: DatasetSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"staging synthetic into {dataset.staged_path}",
        "staged 50 train and 20 test images, 10 classes",
    ]
    before = dataset.staged_path.stat()
    assert main([str(spec)]) == 0
    assert capsys.readouterr().out == f"{dataset.staged_path} is staged already; --force stages it anew\n"
    assert dataset.staged_path.stat().st_ino == before.st_ino


def test_force_and_a_truncated_file_stage_anew(spec: Path, dataset: DatasetSpec) -> None:
    stage(dataset)
    content = dataset.staged_path.read_bytes()
    for damaged, arguments in ((content, ["--force"]), (content[:1000], [])):
        dataset.staged_path.write_bytes(damaged)
        before = dataset.staged_path.stat()
        assert main([str(spec), *arguments]) == 0
        assert dataset.staged_path.stat().st_ino != before.st_ino
        assert len(open_staged(dataset).train_labels) == 50


def test_overrides_change_the_spec_on_either_side_of_force(spec: Path, dataset: DatasetSpec) -> None:
    assert main([str(spec), "dataset.num_train=30", "--force", "dataset.num_test=10"]) == 0
    smaller = dataset.model_copy(update={"num_train": 30, "num_test": 10})
    assert len(open_staged(smaller).train_labels) == 30


def test_wrong_spec_ends_with_2_and_its_problems(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(spec.read_text() + "colour: red\n")
    assert main([str(spec)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{spec}:4: colour: ")


def test_root_that_cannot_be_written_is_named(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    assert main([str(spec)]) == 2
    path = tmp_path / "data/staged/synthetic_50_20.pt"
    reason = f"[Errno 20] Not a directory: '{path.parent}'"
    assert capsys.readouterr().err == f"cannot stage into {path}: {reason}: check the path, its rights and quota\n"


def test_missing_image_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        stage(DatasetSpec(kind="image_folder", root=tmp_path))
    expected = f"{tmp_path}/train does not exist: an image folder holds train/<class>/ and test/<class>/"
    assert str(caught.value) == expected


def test_two_stagings_at_once_both_succeed(spec: Path, dataset: DatasetSpec) -> None:
    processes = [start(str(spec), "--force") for _ in range(2)]
    results = [(process.communicate()[1], process.returncode) for process in processes]
    assert results == [("", 0)] * 2
    assert sorted(dataset.staged_path.parent.iterdir()) == [dataset.staged_note, dataset.staged_path]
    assert len(open_staged(dataset).test_labels) == 20


def test_no_network_is_one_line_and_exit_code_2_and_leaves_nothing(spec: Path, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: refused at once
    spec.write_text(f"name: staging\ncluster: local\ndataset: {{kind: cifar10, root: {tmp_path}/data}}\n")
    process = start(str(spec), https_proxy=nobody, http_proxy=nobody, no_proxy="")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.splitlines() == [
        "cannot download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz "
        "(<urlopen error [Errno 111] Connection refused>): where there is no network, run this on a login node, "
        f"or put cifar-10-batches-py/ under {tmp_path}/data"
    ]
    assert list((tmp_path / "data").iterdir()) == []


def test_ranks_import_neither_torchvision_nor_pillow() -> None:
    modules = "jobs.data, jobs.augment, jobs.model, jobs.optim, jobs.evaluate, jobs.stage"
    code = f"import sys, {modules}; print(sorted({{'torchvision', 'PIL'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
