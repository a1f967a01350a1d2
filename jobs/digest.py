"""Digests: what proves that two runs are the same run.  Both are contracts that other tools rely on."""

import hashlib
from collections.abc import Mapping

import torch

NO_SAMPLES = bytes(32)  # samples digest before the first step


def weights_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a state dict, independent of its order and device; hexadecimal.

    Keys sorted by their UTF-8 bytes; per key: name, 0x00, dtype (`float32`), 0x00, shape as `3,3,64`, 0x00, then the
    raw little-endian bytes of the contiguous tensor.  state_dict: of the unwrapped, uncompiled module.
    """
    digest = hashlib.sha256()
    for name in sorted(state_dict, key=str.encode):
        tensor = state_dict[name].detach().cpu().contiguous()
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def next_samples_digest(digest: bytes, sample_ids: torch.Tensor) -> bytes:
    """SHA-256 of the digest so far followed by the sample ids of one global batch.

    sample_ids: int64 (n,), in global order, hashed little-endian.  Chained, so that 32 bytes in a checkpoint carry it:
    a running hash object cannot be stored.
    """
    return hashlib.sha256(digest + raw_bytes(sample_ids.to(torch.int64).contiguous())).digest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; little-endian on every machine that torch runs on."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
