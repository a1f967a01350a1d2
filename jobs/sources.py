"""Sources of images: an image folder, a formula -> [sources] -> stage.  CIFAR's own files are in cifar.py.

What others wrote is checked file by file, and an error names the file.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from jobs.data import IMAGE_SHAPE, DataError

NUM_READERS = 8  # threads; small files on shared storage wait for the network, not for the CPU
SYNTHETIC_CLASSES = 10
SYNTHETIC_SEED = 20_240_917
SYNTHETIC_CONTRAST = 24.0  # grey levels per unit of pattern
SYNTHETIC_NOISE = 64.0  # grey levels, standard deviation


@dataclass(frozen=True)
class Split:
    """The train or the test half of a data set, in sample order."""

    images: Tensor  # uint8 (N, 3, 32, 32)
    labels: Tensor  # int64 (N,)


@dataclass(frozen=True)
class Source:
    """What a source held, checked."""

    train: Split
    test: Split
    classes: tuple[str, ...]  # index = label
    origin: str  # where it came from, for people
    md5_checked: bool  # every file had its published MD5 sum


def read_image_folder(root: Path) -> Source:
    """Images under root/train/<class>/ and root/test/<class>/; sample ids follow the sorted paths.

    Hidden files are passed over.
    Raises DataError: a file is no 32x32 RGB image, a class has no train images, or the test set has other classes.
    """
    classes = tuple(path.name for path in _class_folders(root / "train"))
    for folder in _class_folders(root / "test"):
        if folder.name not in classes:
            raise DataError(f"{folder} is a class that {root / 'train'} lacks: the classes are those of train")
    train, test = (_read_split(root / split, classes) for split in ("train", "test"))
    for label in sorted(set(range(len(classes))) - set(train.labels.tolist())):
        raise DataError(f"{root / 'train' / classes[label]} holds no images: fill it or remove it")
    return Source(train, test, classes, origin=str(root), md5_checked=False)


def make_synthetic(num_train: int, num_test: int) -> Source:
    """Ten classes of coloured clouds under noise; a pure function of the two sizes.

    A class is a smooth pattern, shown shifted by up to 4 pixels and weak against the noise, so that a small net reaches
    80% after some hundred steps, not at once.
    """
    generator = torch.Generator().manual_seed(SYNTHETIC_SEED)
    coarse = torch.randn(SYNTHETIC_CLASSES, 3, 8, 8, generator=generator)
    patterns = functional.interpolate(coarse, size=(40, 40), mode="bilinear", align_corners=False)
    train, test = (_draw_synthetic(patterns, count, generator) for count in (num_train, num_test))
    names = tuple(f"cloud_{label}" for label in range(SYNTHETIC_CLASSES))
    return Source(train, test, names, origin="generated", md5_checked=False)


def _draw_synthetic(patterns: Tensor, count: int, generator: torch.Generator) -> Split:
    """patterns: float32 (10, 3, 40, 40); each image shows a 32x32 part of its class's."""
    labels = torch.randint(SYNTHETIC_CLASSES, (count,), generator=generator)
    corners = torch.randint(9, (count, 2), generator=generator)
    images = torch.randn(count, *IMAGE_SHAPE, generator=generator).mul_(SYNTHETIC_NOISE).add_(128)
    for image, label, (top, left) in zip(images, labels.tolist(), corners.tolist(), strict=True):
        image += SYNTHETIC_CONTRAST * patterns[label, :, top : top + 32, left : left + 32]
    return Split(images.clamp_(0, 255).to(torch.uint8), labels)


def _class_folders(split: Path) -> list[Path]:
    if not split.is_dir():
        raise DataError(f"{split} does not exist: an image folder holds train/<class>/ and test/<class>/")
    entries = [path for path in sorted(split.iterdir()) if not path.name.startswith(".")]
    for path in entries:
        if not path.is_dir():
            raise DataError(f"{path} is no folder: {split} holds one folder per class and nothing else")
    if not entries:
        raise DataError(f"{split} is empty, expected one folder per class")
    return entries


def _read_split(split: Path, classes: tuple[str, ...]) -> Split:
    labelled = [
        (path, label)
        for label, name in enumerate(classes)
        if (split / name).is_dir()  # a class may lack test images
        for path in sorted((split / name).iterdir())
        if not path.name.startswith(".")
    ]
    if not labelled:
        raise DataError(f"{split} holds no images, expected {split}/<class>/*")
    with ThreadPoolExecutor(NUM_READERS) as readers:
        pixels = np.stack(list(readers.map(_read_image, (path for path, _ in labelled))))
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return Split(images, torch.tensor([label for _, label in labelled]))


def _read_image(path: Path) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    """Returns uint8 (32, 32, 3)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.size != (32, 32) or image.mode != "RGB":
                width, height = image.size
                raise DataError(f"{path} is {width}x{height}, mode {image.mode}; expected 32x32, mode RGB: convert it")
            return np.array(image, dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as an image ({error}): remove it or mend it") from error
