"""Digests against a second implementation from their definition, and against fixed values."""

import hashlib
import struct

import numpy as np
import pytest
import torch

from jobs.digest import NO_SAMPLES, next_samples_digest, weights_sha256

WEIGHTS = {
    "é.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "z.count": torch.tensor(7),
    "a.bias": torch.tensor([0.5, -1.0]),
    "Z": torch.zeros(0, 4),
}
WEIGHTS_SHA256 = "1b49be8323e4dcd37be2f44f8be80320445c8f0e31881991c7137672e434623f"
SAMPLES_SHA256 = "9f086c6755bf4378971dfdec950633e9ab1eb258c1215db523b6f7ad00813433"


def weights_again(arrays: dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]) -> str:
    """The definition once more, without torch."""
    text = b""
    for name in sorted(arrays, key=lambda name: name.encode("utf-8")):
        array = arrays[name]
        shape = ",".join(str(length) for length in array.shape)
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        text += name.encode("utf-8") + b"\0" + array.dtype.name.encode() + b"\0" + shape.encode() + b"\0"
        text += little_endian.tobytes(order="C")
    return hashlib.sha256(text).hexdigest()


def test_weights_digest_follows_its_definition() -> None:
    arrays = {name: tensor.numpy() for name, tensor in WEIGHTS.items()}
    assert weights_sha256(WEIGHTS) == weights_again(arrays) == WEIGHTS_SHA256


def test_weights_digest_does_not_depend_on_the_order_of_keys_or_on_strides() -> None:
    strided = {name: WEIGHTS[name] for name in reversed(WEIGHTS)}
    strided["é.weight"] = WEIGHTS["é.weight"].t().contiguous().t()
    strided["a.bias"] = torch.tensor([0.5, 9.0, -1.0, 9.0])[::2].requires_grad_()
    assert not strided["é.weight"].is_contiguous()
    assert weights_sha256(strided) == WEIGHTS_SHA256


@pytest.mark.parametrize(
    "change",
    [
        {"a.bias": torch.tensor([0.5, -1.0], dtype=torch.float64)},
        {"a.bias": torch.tensor([[0.5, -1.0]])},
        {"a.bias": torch.tensor([0.5, -1.0000001])},
        {"z.count": torch.tensor([7])},
        {"Z": torch.zeros(4, 0)},
        {"another": torch.zeros(0)},
    ],
)
def test_weights_digest_depends_on_names_types_shapes_and_values(change: dict[str, torch.Tensor]) -> None:
    assert weights_sha256(WEIGHTS | change) != WEIGHTS_SHA256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8])
def test_weights_digest_takes_types_that_numpy_may_lack(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    raw = {"bfloat16": b"\x80\x3f\0\0\x80\x3f", "float16": b"\0\x3c\0\0\0\x3c"}.get(name, b"\1\0\1")
    assert weights_sha256({"x": tensor}) == hashlib.sha256(f"x\0{name}\x003\0".encode() + raw).hexdigest()


def test_samples_digest_is_chained_over_global_batches() -> None:
    digest = again = NO_SAMPLES
    for batch in ([3, 1, 2], [2**40], [0, 5]):
        digest = next_samples_digest(digest, torch.tensor(batch))
        again = hashlib.sha256(again + struct.pack(f"<{len(batch)}q", *batch)).digest()
    assert digest.hex() == again.hex() == SAMPLES_SHA256


def test_samples_digest_depends_on_where_batches_end() -> None:
    one = next_samples_digest(NO_SAMPLES, torch.tensor([1, 2]))
    two = next_samples_digest(next_samples_digest(NO_SAMPLES, torch.tensor([1])), torch.tensor([2]))
    assert one != two


def test_samples_digest_hashes_int64_whatever_type_and_strides_the_ids_have() -> None:
    ids = torch.tensor([4, 9, 8, 9], dtype=torch.int32)[::2]
    assert next_samples_digest(NO_SAMPLES, ids) == next_samples_digest(NO_SAMPLES, torch.tensor([4, 8]))
