"""CIFAR-10 and CIFAR-100: the published archive or its batches -> [cifar] -> stage.

Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Dataset layout"; address and MD5 sums are torchvision's.
"""

import hashlib
import pickle
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from jobs.data import IMAGE_SHAPE, DataError
from jobs.sources import Source, Split

DOWNLOAD_TIMEOUT_S = 30  # without an answer; a compute node's firewall may drop packets instead of refusing them


@dataclass(frozen=True)
class CifarLayout:
    """How one CIFAR archive is laid out."""

    torchvision_name: str  # the class that knows address and MD5 sums
    folder: str  # of the batches, under the root
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    labels_key: str
    names_key: str
    num_classes: int
    num_train: int = 50_000
    num_test: int = 10_000


LAYOUTS = {
    "cifar10": CifarLayout(
        torchvision_name="CIFAR10",
        folder="cifar-10-batches-py",
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_file="test_batch",
        meta_file="batches.meta",
        labels_key="labels",
        names_key="label_names",
        num_classes=10,
    ),
    "cifar100": CifarLayout(
        torchvision_name="CIFAR100",
        folder="cifar-100-python",
        train_files=("train",),
        test_file="test",
        meta_file="meta",
        labels_key="fine_labels",
        names_key="fine_label_names",
        num_classes=100,
    ),
}


def read_cifar(kind: str, root: Path, *, accept_unpublished_md5: bool) -> Source:
    """CIFAR from the batches under root, else from the published archive, downloaded when it is not there either.

    kind: a key of LAYOUTS.  accept_unpublished_md5: read the batches whatever their MD5 sums; download nothing.
    Raises DataError: no network, or a file is missing, damaged or, unless accepted, not the published one.
    """
    layout = LAYOUTS[kind]
    batches = root / layout.folder
    if accept_unpublished_md5:
        if not batches.is_dir():
            raise DataError(
                f"{batches} does not exist: put the batches there, or remove dataset.accept_unpublished_md5 "
                "to download the published ones"
            )
        return _read_batches(batches, layout, origin=str(batches), md5_checked=False)
    if batches.is_dir():
        _check_md5(batches, layout)
        return _read_batches(batches, layout, origin=str(batches), md5_checked=True)
    with _fetched(layout, root) as (fetched, address):
        return _read_batches(fetched, layout, origin=address, md5_checked=True)


def load_pickle(file: BinaryIO) -> Any:  # noqa: ANN401  a pickle may hold anything; callers check
    """Read a pickle of numpy arrays, bytes, str, int, lists and dicts; anything else in it is refused.

    Raises pickle.UnpicklingError: it names another type; any exception: it is damaged.
    """
    return _PlainUnpickler(file, encoding="latin1").load()  # Python 2 wrote the published files


class _PlainUnpickler(pickle.Unpickler):
    """Python's unpickler calls whatever a file names; this one knows what an array needs and no more."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  the type that the base class states
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # numpy 2 moved it
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return np.empty(1).__reduce_ex__(5)[0]
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _encode_latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR batch does")


def _encode_latin1(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")


def _read_batches(folder: Path, layout: CifarLayout, *, origin: str, md5_checked: bool) -> Source:
    rows = layout.num_train // len(layout.train_files)
    parts = [_read_batch(folder / name, layout, rows) for name in layout.train_files]
    train = Split(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    test = _read_batch(folder / layout.test_file, layout, layout.num_test)
    return Source(train, test, _read_names(folder / layout.meta_file, layout), origin, md5_checked)


def _read_batch(path: Path, layout: CifarLayout, num_rows: int) -> Split:
    record = _read_record(path)
    data, labels = record.get("data"), record.get(layout.labels_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (num_rows, 3072):
        raise DataError(f"{path}: data is {_describe(data)}, expected uint8 ({num_rows}, 3072)")
    if not isinstance(labels, list) or len(labels) != num_rows:
        raise DataError(f"{path}: {layout.labels_key} is {_describe(labels)}, expected a list of {num_rows} labels")
    for label in labels:
        if type(label) is not int or not 0 <= label < layout.num_classes:
            raise DataError(f"{path}: a label is {label!r}, expected 0 to {layout.num_classes - 1}")
    images = torch.from_numpy(data.copy()).view(num_rows, *IMAGE_SHAPE)  # a row is three planes of 32x32
    return Split(images, torch.tensor(labels))


def _read_names(path: Path, layout: CifarLayout) -> tuple[str, ...]:
    names = _read_record(path).get(layout.names_key)
    if not isinstance(names, list) or len(names) != layout.num_classes:
        raise DataError(f"{path}: {layout.names_key} is {_describe(names)}, expected {layout.num_classes} names")
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            record = load_pickle(file)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: copy the whole folder again") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is damaged or no CIFAR batch ({error}): copy it again") from error
    if not isinstance(record, dict):
        raise DataError(f"{path} holds a {type(record).__name__}, expected the dict of a CIFAR batch")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in record.items()}


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return f"a list of {len(value)}" if isinstance(value, list) else "missing" if value is None else repr(type(value))


def _check_md5(folder: Path, layout: CifarLayout) -> None:
    published = _published(layout)
    wanted = {name: md5 for name, md5 in published.train_list + published.test_list}
    wanted[published.meta["filename"]] = published.meta["md5"]
    for name, md5 in wanted.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing: copy the whole folder again, or remove it to download")
        found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if found != md5:
            raise DataError(
                f"{path} has MD5 {found}, the published file {md5}: set dataset.accept_unpublished_md5: true to use "
                "this mirror, or remove the folder to download"
            )


@contextmanager
def _fetched(layout: CifarLayout, root: Path) -> Iterator[tuple[Path, str]]:
    """The batches of the published archive, in a folder of our own, and the archive's address.

    Two processes may fetch at once: each has its folder, and the finished archive is kept by one rename.
    """
    published = _published(layout)
    root.mkdir(parents=True, exist_ok=True)
    kept = root / published.filename
    with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as name:
        folder = Path(name)
        if kept.is_file():
            shutil.copyfile(kept, folder / kept.name)  # torchvision checks it, and downloads when it is damaged
        _download(published, folder, root / layout.folder)
        (folder / kept.name).replace(kept)
        yield folder / layout.folder, published.url


def _download(published: Any, folder: Path, batches: Path) -> None:  # noqa: ANN401  torchvision has no types
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)  # torchvision sets none
    try:
        published(folder, download=True)
    except (OSError, HTTPException, RuntimeError, EOFError, tarfile.TarError) as error:
        raise DataError(
            f"cannot download {published.url} ({error}): where there is no network, run this on a login node, "
            f"or put {batches.name}/ under {batches.parent}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_before)


def _published(layout: CifarLayout) -> Any:  # noqa: ANN401  torchvision has no types
    """torchvision's class; imported here because that takes seconds."""
    from torchvision import datasets

    return getattr(datasets, layout.torchvision_name)
