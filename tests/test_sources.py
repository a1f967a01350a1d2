"""Image folders and made-up images, as sources of a data set."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from jobs.augment import Normalization
from jobs.data import DataError
from jobs.model import build_model
from jobs.sources import Source, make_synthetic, read_image_folder


def save(path: Path, grey: int = 0, size: tuple[int, int] = (32, 32), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, grey, grey)).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes; the grey level tells which file a sample is."""
    for grey, name in enumerate(["train/dog/b.png", "train/dog/a.png", "train/cat/9.bmp", "train/cat/10.png"]):
        save(tmp_path / name, grey)
    save(tmp_path / "test/dog/a.png", 50)
    return tmp_path


def error_of(root: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_image_folder(root)
    return str(caught.value)


def test_sample_ids_follow_the_sorted_paths_and_labels_the_sorted_classes(root: Path) -> None:
    source = read_image_folder(root)
    assert source.classes == ("cat", "dog")
    assert source.train.labels.tolist() == [0, 0, 1, 1]
    assert source.train.images[:, 0, 0, 0].tolist() == [3, 2, 1, 0]
    assert source.test.labels.tolist() == [1]
    assert source.test.images.shape == (1, 3, 32, 32)
    assert (source.origin, source.md5_checked) == (str(root), False)


def test_channels_rows_and_columns_keep_their_places(root: Path) -> None:
    image = Image.new("RGB", (32, 32))
    image.putpixel((5, 7), (10, 20, 30))  # column 5, row 7
    image.save(root / "test/dog/a.png")
    pixels = read_image_folder(root).test.images[0]
    assert pixels[:, 7, 5].tolist() == [10, 20, 30]
    assert int(pixels.sum()) == 60


def test_hidden_files_and_folders_are_passed_over(root: Path) -> None:
    (root / "train/dog/.DS_Store").write_bytes(b"x")
    (root / "train/.cache").mkdir()
    (root / "test/.hidden").write_bytes(b"x")
    assert len(read_image_folder(root).train.labels) == 4


@pytest.mark.parametrize(
    ("size", "mode", "found"), [((28, 32), "RGB", "28x32, mode RGB"), ((32, 32), "L", "32x32, mode L")]
)
def test_other_size_or_mode_is_named(root: Path, size: tuple[int, int], mode: str, found: str) -> None:
    path = root / "train/dog/c.png"
    save(path, size=size, mode=mode)
    assert error_of(root) == f"{path} is {found}; expected 32x32, mode RGB: convert it"


def test_file_that_is_no_image_is_named(root: Path) -> None:
    path = root / "train/dog/notes.txt"
    path.write_text("hello")
    reason = f"cannot identify image file '{path}'"
    assert error_of(root) == f"{path} cannot be read as an image ({reason}): remove it or mend it"


def test_truncated_image_is_named(root: Path) -> None:
    path = root / "train/dog/a.png"
    Image.effect_noise((32, 32), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:-500])
    assert error_of(root).startswith(f"{path} cannot be read as an image (")


def test_class_without_train_images_is_named(root: Path) -> None:
    (root / "train/bird").mkdir()
    assert error_of(root) == f"{root}/train/bird holds no images: fill it or remove it"


def test_class_only_in_the_test_set_is_named(root: Path) -> None:
    save(root / "test/fox/a.png")
    assert error_of(root) == f"{root}/test/fox is a class that {root}/train lacks: the classes are those of train"


def test_missing_split_is_named(root: Path) -> None:
    (root / "test").rename(root / "val")
    expected = f"{root}/test does not exist: an image folder holds train/<class>/ and test/<class>/"
    assert error_of(root) == expected


def test_file_among_the_classes_is_named(root: Path) -> None:
    (root / "train/labels.csv").write_text("")
    expected = f"{root}/train/labels.csv is no folder: {root}/train holds one folder per class and nothing else"
    assert error_of(root) == expected


def test_empty_test_set_is_named(root: Path) -> None:
    (root / "test/dog/a.png").unlink()
    assert error_of(root) == f"{root}/test holds no images, expected {root}/test/<class>/*"


def test_synthetic_images_are_a_function_of_the_sizes() -> None:
    def pixels(source: Source) -> torch.Tensor:
        return torch.cat([source.train.images, source.test.images])

    torch.manual_seed(1)
    first = make_synthetic(60, 20)
    torch.manual_seed(2)
    assert torch.equal(pixels(first), pixels(make_synthetic(60, 20)))
    assert (len(first.train.labels), len(first.test.labels)) == (60, 20)
    assert not torch.equal(first.train.images[:20], first.test.images)


def test_synthetic_classes_are_equally_likely_and_differ() -> None:
    train = make_synthetic(4000, 1).train
    assert all(300 < int((train.labels == label).sum()) < 500 for label in range(10))
    means = torch.stack([train.images[train.labels == label].float().mean(dim=0) for label in range(10)])
    distances = torch.cdist(means.flatten(1), means.flatten(1)) + 1e6 * torch.eye(10)
    assert float(distances.min()) > 10 * 3072**0.5 / 2  # 5 grey levels a pixel


def test_synthetic_classes_are_learnt_over_some_hundred_steps_not_at_once() -> None:
    source = make_synthetic(1024, 256)
    normalize = Normalization(torch.full((3,), 0.5), torch.full((3,), 0.26), channels_last=False)
    torch.manual_seed(0)
    model = build_model("small", len(source.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    accuracies: dict[int, float] = {}
    for step in range(101):
        if step in (4, 100):
            with torch.no_grad():
                answers = model(normalize(source.test.images)).argmax(dim=1)
            accuracies[step] = float((answers == source.test.labels).float().mean())
        ids = torch.randint(1024, (64,))
        loss = cross_entropy(model(normalize(source.train.images[ids])), source.train.labels[ids])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert accuracies[4] < 0.5 < 0.8 < accuracies[100]
