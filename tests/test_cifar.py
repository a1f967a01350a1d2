"""CIFAR batches: what is read, and what is refused."""

import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cluster.spec import DatasetSpec
from jobs.cifar import LAYOUTS, load_pickle, read_cifar
from jobs.data import DataError, open_staged
from jobs.sources import Source, read_image_folder
from jobs.stage import stage

SHARED = Path(__file__).parents[1].parent / "shared"

# What Python 2 wrote, as in the published files: {"data": uint8 [[1, 2, 255, 0, 128, 127]], "labels": [3]}.
PYTHON_2_PICKLE = (
    b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    b"(K\x01K\x01K\x06\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89U\x06\x01\x02\xff\x00\x80\x7ftbU\x06labels]K\x03au."
)


def write_batches(kind: str, root: Path) -> None:
    """CIFAR-shaped files; the first pixel of each image is its place in the file, modulo 256."""
    layout = LAYOUTS[kind]
    folder = root / layout.folder
    folder.mkdir(parents=True)
    for name in (*layout.train_files, layout.test_file):
        num_rows = layout.num_test if name == layout.test_file else layout.num_train // len(layout.train_files)
        data = np.zeros((num_rows, 3072), dtype=np.uint8)
        data[:, 0] = np.arange(num_rows) % 256
        labels = [row % layout.num_classes for row in range(num_rows)]
        (folder / name).write_bytes(pickle.dumps({"data": data, layout.labels_key: labels}, protocol=4))
    names = {layout.names_key: [f"class {label}" for label in range(layout.num_classes)]}
    (folder / layout.meta_file).write_bytes(pickle.dumps(names))


@pytest.fixture(scope="module")
def cifar10_root() -> Iterator[Path]:
    """184 MB, so not left to pytest, which keeps the folders of three sessions."""
    with tempfile.TemporaryDirectory() as folder:
        write_batches("cifar10", Path(folder))
        yield Path(folder)


@pytest.fixture
def batches(cifar10_root: Path) -> Iterator[Path]:
    """The batches as hard links, to be replaced one by one."""
    with tempfile.TemporaryDirectory(dir=cifar10_root) as root:
        name = LAYOUTS["cifar10"].folder
        yield shutil.copytree(cifar10_root / name, Path(root) / name, copy_function=os.link)


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def error_of(batches: Path, *, accept: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        read_cifar("cifar10", batches.parent, accept_unpublished_md5=accept)
    return str(caught.value)


def test_unpublished_batches_are_read_when_accepted(batches: Path) -> None:
    source = read_cifar("cifar10", batches.parent, accept_unpublished_md5=True)
    places = [row % 256 for row in range(10_000)]
    assert source.train.images[:, 0, 0, 0].tolist() == places * 5
    assert source.test.images.shape == (10_000, 3, 32, 32)
    assert source.train.labels.tolist() == [row % 10 for row in range(50_000)]
    assert source.classes == tuple(f"class {label}" for label in range(10))
    assert (source.origin, source.md5_checked) == (str(batches), False)


def test_cifar100_has_one_train_file_and_fine_labels() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_batches("cifar100", Path(folder))
        source = read_cifar("cifar100", Path(folder), accept_unpublished_md5=True)
    assert (len(source.train.labels), len(source.test.labels), len(source.classes)) == (50_000, 10_000, 100)
    assert source.test.labels.tolist() == [row % 100 for row in range(10_000)]


def test_other_md5_without_the_key_is_an_error_that_names_the_key(batches: Path) -> None:
    path = batches / "data_batch_1"
    replace(path, b"other")
    assert error_of(batches, accept=False) == (
        f"{path} has MD5 795f3202b17cb6bc3d4b771d8c6c9eaf, the published file c99cafc152244af753f735de768cd75f: set "
        "dataset.accept_unpublished_md5: true to use this mirror, or remove the folder to download"
    )


def test_missing_batches_with_the_key_are_not_downloaded(tmp_path: Path) -> None:
    assert error_of(tmp_path / "cifar-10-batches-py") == (
        f"{tmp_path}/cifar-10-batches-py does not exist: put the batches there, or remove "
        "dataset.accept_unpublished_md5 to download the published ones"
    )


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_missing_file_is_named(batches: Path, name: str) -> None:
    (batches / name).unlink()
    assert error_of(batches) == f"{batches}/{name} is missing: copy the whole folder again"


@pytest.mark.parametrize("kept_bytes", [0, 100, 1_000_000])
def test_truncated_file_is_named(batches: Path, kept_bytes: int) -> None:
    path = batches / "data_batch_2"
    replace(path, path.read_bytes()[:kept_bytes])
    message = error_of(batches)
    assert message.startswith(f"{path} is damaged or no CIFAR batch (")
    assert message.endswith("): copy it again")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": None}, "data is missing, expected uint8 (10000, 3072)"),
        ({"data": np.zeros((3, 3072), np.uint8)}, "data is uint8 (3, 3072), expected uint8 (10000, 3072)"),
        ({"data": np.zeros((10_000, 3072), np.int8)}, "data is int8 (10000, 3072), expected uint8 (10000, 3072)"),
        ({"labels": None}, "labels is missing, expected a list of 10000 labels"),
        ({"labels": [0] * 9_999}, "labels is a list of 9999, expected a list of 10000 labels"),
        ({"labels": [0] * 9_999 + [10]}, "a label is 10, expected 0 to 9"),
        ({"labels": [-1] + [0] * 9_999}, "a label is -1, expected 0 to 9"),
        ({"labels": ["cat"] * 10_000}, "a label is 'cat', expected 0 to 9"),
    ],
)
def test_odd_content_is_named(batches: Path, changes: dict[str, Any], problem: str) -> None:
    path = batches / "data_batch_1"
    good = {"data": np.zeros((10_000, 3072), np.uint8), "labels": [0] * 10_000}
    replace(path, pickle.dumps({**good, **changes}))
    assert error_of(batches) == f"{path}: {problem}"


def test_batch_that_is_no_dict_is_named(batches: Path) -> None:
    path = batches / "data_batch_1"
    replace(path, pickle.dumps([1]))
    assert error_of(batches) == f"{path} holds a list, expected the dict of a CIFAR batch"


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An HTTP server that shows the test's folder."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def published(batches: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive on the server that torchvision takes for the published one."""
    from torchvision.datasets import CIFAR10

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes()).hexdigest()

    layout = LAYOUTS["cifar10"]
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(batches, layout.folder)
    monkeypatch.setattr(CIFAR10, "url", f"{address}/{archive.name}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(batches / name)] for name in layout.train_files])
    monkeypatch.setattr(CIFAR10, "test_list", [[layout.test_file, md5(batches / layout.test_file)]])
    meta = {"filename": layout.meta_file, "key": layout.names_key, "md5": md5(batches / layout.meta_file)}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    return archive


def test_published_archive_is_downloaded_once_and_kept(published: Path, address: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    source = read_cifar("cifar10", root, accept_unpublished_md5=False)
    assert (source.origin, source.md5_checked) == (f"{address}/{published.name}", True)
    assert source.train.labels.tolist() == [row % 10 for row in range(50_000)]
    assert [path.name for path in root.iterdir()] == [published.name]
    published.unlink()
    assert len(read_cifar("cifar10", root, accept_unpublished_md5=False).test.labels) == 10_000


def test_truncated_archive_under_the_root_is_fetched_again(published: Path, tmp_path: Path) -> None:
    kept = tmp_path / "data" / published.name
    kept.parent.mkdir()
    kept.write_bytes(published.read_bytes()[:1000])
    assert len(read_cifar("cifar10", kept.parent, accept_unpublished_md5=False).test.labels) == 10_000
    assert kept.stat().st_size == published.stat().st_size


def test_published_batches_are_read_with_their_md5_checked(published: Path, batches: Path) -> None:
    source = read_cifar("cifar10", batches.parent, accept_unpublished_md5=False)
    assert (source.origin, source.md5_checked) == (str(batches), True)


def test_download_of_another_archive_is_refused_and_leaves_nothing(
    published: Path, address: str, tmp_path: Path
) -> None:
    published.write_bytes(published.read_bytes()[:-1])
    root = tmp_path / "data"
    assert error_of(root / "cifar-10-batches-py", accept=False) == (
        f"cannot download {address}/{published.name} (File not found or corrupted.): where there is no network, run "
        f"this on a login node, or put cifar-10-batches-py/ under {root}"
    )
    assert list(root.iterdir()) == []


def test_batches_with_bytes_for_keys_are_read(batches: Path) -> None:
    path = batches / "test_batch"
    record = {b"data": np.ones((10_000, 3072), np.uint8), b"labels": [7] * 10_000}
    replace(path, pickle.dumps(record, protocol=2))
    source = read_cifar("cifar10", batches.parent, accept_unpublished_md5=True)
    assert source.test.labels.tolist() == [7] * 10_000


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_of_any_protocol_is_read(protocol: int) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    record = load_pickle(io.BytesIO(pickle.dumps({"data": array, "raw": b"\x00\xff", "labels": [1, 2]}, protocol)))
    assert (record["data"].tolist(), record["raw"], record["labels"]) == (array.tolist(), b"\x00\xff", [1, 2])


def test_pickle_of_python_2_is_read() -> None:
    record = load_pickle(io.BytesIO(PYTHON_2_PICKLE))
    assert (record["data"].dtype, record["data"].tolist()) == (np.dtype(np.uint8), [[1, 2, 255, 0, 128, 127]])
    assert record["labels"] == [3]


def test_pickle_that_calls_a_function_is_refused_before_the_call(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    attack = f"cos\nmkdir\n(V{mark}\ntR.".encode()
    with pytest.raises(pickle.UnpicklingError) as caught:
        load_pickle(io.BytesIO(attack))
    assert str(caught.value) == "it names os.mkdir, which no CIFAR batch does"
    assert not mark.exists()


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Path, Source]]:
    """The folder of the real CIFAR-10 and what is read from it."""
    script = SHARED / "data" / "unpack_cifar10.py"
    if not script.is_file():
        pytest.skip(f"the real CIFAR-10 comes from {script}, which is not there")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(script), folder], check=True, capture_output=True)
        yield Path(folder), read_cifar("cifar10", Path(folder), accept_unpublished_md5=True)


def test_real_cifar10_has_its_sizes_and_classes(real: tuple[Path, Source]) -> None:
    _, source = real
    assert source.classes[:3] == ("airplane", "automobile", "bird")
    assert torch.bincount(source.train.labels).tolist() == [5000] * 10
    assert torch.bincount(source.test.labels).tolist() == [1000] * 10


def test_real_batches_and_a_folder_of_the_same_images_give_the_same_pixels(real: tuple[Path, Source]) -> None:
    folder, source = real
    count = 200
    for split, part in (("train", source.train), ("test", source.test)):
        for index in range(count):
            path = folder / split / source.classes[int(part.labels[index])] / f"{index:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(part.images[index].permute(1, 2, 0).numpy()).save(path)
    from_folder = read_image_folder(folder)
    for written, read in ((source.train, from_folder.train), (source.test, from_folder.test)):
        by_class = torch.argsort(written.labels[:count], stable=True)
        assert torch.equal(read.labels, written.labels[by_class])
        assert torch.equal(read.images, written.images[by_class])
    assert from_folder.classes == source.classes


def test_staged_real_cifar10_has_the_published_channel_statistics(real: tuple[Path, Source]) -> None:
    dataset = DatasetSpec(kind="cifar10", root=real[0], accept_unpublished_md5=True)
    stage(dataset)
    data = open_staged(dataset)
    assert torch.equal(data.train_images, real[1].train.images)
    assert torch.equal(data.test_labels, real[1].test.labels)
    assert [round(value, 4) for value in data.mean.tolist()] == [0.4914, 0.4822, 0.4465]
    assert [round(value, 4) for value in data.std.tolist()] == [0.247, 0.2435, 0.2616]
