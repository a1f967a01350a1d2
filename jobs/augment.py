"""Augmentation: data -> [augment] -> batch.  Flip, crop and cutout on the device, then normalisation.

What happens to a sample depends on (seed, epoch, sample id) alone: each draw hashes these with splitmix64, so the
pixels are the same whichever rank reads the sample and in whatever company.  No random state exists.

Sources: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), for splitmix64; DeVries and
Taylor, "Improved regularization of convolutional neural networks with cutout" (2017).
"""

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor

MAX_SHIFT = 4  # pixels; the crop out of an image with 4 pixels of reflected border
CUTOUT_SIZE = 16  # pixels; half the side, the paper's choice for CIFAR-10; hangs over the border, as in the paper
CUTOUT_GREY = 128  # the paper fills with the mean colour; CIFAR's channel means are 114 to 125

_CHOICES = {  # how many outcomes each draw of a sample has
    "flip": 2,
    "crop row": 2 * MAX_SHIFT + 1,
    "crop column": 2 * MAX_SHIFT + 1,
    "cutout row": 32,
    "cutout column": 32,
}
_GREY_WORD = int.from_bytes(bytes([CUTOUT_GREY] * 8), "little", signed=True)  # eight grey pixels
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def augment(images: Tensor, rows: Tensor, *, ops: Collection[str], seed: int, epoch: int, sample_ids: Tensor) -> Tensor:
    """Read a batch and change it at random, reproducibly.  The order of ops has no meaning: crop, flip, then cutout.

    images: uint8 (N, 3, 32, 32), contiguous, on any device; only read.  rows: int64 (B,), which of them.
    ops: some of "flip", "crop", "cutout".  sample_ids: int64 (B,), the keys of the draws.
    Returns uint8 (B, 3, 32, 32), contiguous.
    """
    assert set(ops) <= {"flip", "crop", "cutout"}, f"unknown augmentation in {sorted(ops)}"
    if not ops:
        return take(images, rows)
    draws = _draw(seed, epoch, sample_ids)
    batch = _crop(images, rows, draws) if "crop" in ops else take(images, rows)
    if "crop" in ops or "flip" in ops:
        batch = _choose_columns(batch, ops, draws)
    return _cutout(batch, draws) if "cutout" in ops else batch


def take(images: Tensor, rows: Tensor) -> Tensor:
    """Some of the images as they are: (B, ...) of (N, ...), contiguous."""
    # On a CPU index_select copies whole rows at once; images[rows] goes byte by byte and takes 10 times as long.
    return images.flatten(1).index_select(0, rows).view(-1, *images.shape[1:])


def normalize(images: Tensor, mean: Tensor, std: Tensor, *, channels_last: bool = False) -> Tensor:
    """Scale pixels to mean 0 and standard deviation 1.

    images: uint8 (B, 3, 32, 32), contiguous.  mean, std: float32 (3,), of pixels scaled to [0, 1], same device.
    Returns float32 (B, 3, 32, 32).
    """
    scale, shift = (1 / (255 * std)).view(3, 1, 1), (-mean / std).view(3, 1, 1)
    # Two passes on purpose: a fused multiply-add may round differently in the vector loop and in its tail, and then
    # a pixel would depend on its place in the batch.
    if not channels_last:
        return images.to(torch.float32).mul_(scale).add_(shift)
    batch, channels, height, width = images.shape
    pixels = torch.empty((batch, height, width, channels), device=images.device)
    for channel in range(channels):  # on a CPU 7 times as fast as a conversion to another memory format
        pixels[..., channel] = images[:, channel]
    for factor_or_term, change in ((scale, pixels.mul_), (shift, pixels.add_)):
        # Written out: a row of 3 is too short for vector instructions (12 times as slow).
        change(factor_or_term.expand(channels, height, width).permute(1, 2, 0).contiguous())
    return pixels.permute(0, 3, 1, 2)


def _crop(images: Tensor, rows: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """The lines of each image that a crop leaves, or reflects; reads nothing else."""
    _, channels, height, width = images.shape
    lines = torch.arange(height, device=images.device)
    source = _reflect(lines + draws["crop row"][:, None] - MAX_SHIFT, height)  # (B, 32)
    planes = rows[:, None] * channels + torch.arange(channels, device=images.device)  # (B, 3)
    chosen = planes[:, :, None] * height + source[:, None]
    return images.view(-1, width).index_select(0, chosen.flatten()).view(*chosen.shape, width)


def _choose_columns(images: Tensor, ops: Collection[str], draws: dict[str, Tensor]) -> Tensor:
    """Flip, and a crop's other direction: both choose a source for each column, so one gather does them."""
    batch, channels, height, width = images.shape
    columns = torch.arange(width, device=images.device).expand(batch, width)
    if "flip" in ops:
        columns = torch.where(draws["flip"][:, None] == 1, width - 1 - columns, columns)
    if "crop" in ops:
        columns = _reflect(columns + draws["crop column"][:, None] - MAX_SHIFT, width)
    lines = images.view(batch, channels * height, width)
    return lines.gather(2, columns[:, None].expand_as(lines)).view_as(images)


def _cutout(images: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """Eight pixels at a time, as bits: torch.where takes 30 times as long for uint8 on a CPU."""
    _, _, height, width = images.shape
    columns = _in_square(draws["cutout column"], width).mul_(255).view(torch.int64)  # (B, 4)
    rows = -_in_square(draws["cutout row"], height).to(torch.int64)  # (B, 32): all bits, or none
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]  # (B, 1, 32, 4)
    words = images.view(torch.int64)  # (B, 3, 32, 4)
    return (words ^ _GREY_WORD).bitwise_and_(inside).bitwise_xor_(words).view(torch.uint8)


def _in_square(centres: Tensor, length: int) -> Tensor:
    """1 for coordinates within half a cutout of their centre, else 0: uint8 (B, length)."""
    offsets = torch.arange(length, device=centres.device) - centres[:, None]
    return ((offsets >= -CUTOUT_SIZE // 2) & (offsets < CUTOUT_SIZE // 2)).to(torch.uint8)


def _reflect(coordinates: Tensor, length: int) -> Tensor:
    """Fold coordinates outside [0, length) back, without repeating the border pixel."""
    return length - 1 - (length - 1 - coordinates.abs()).abs()


def _draw(seed: int, epoch: int, sample_ids: Tensor) -> dict[str, Tensor]:
    """All draws of each sample: int64 (B,), in [0, _CHOICES).  The bias is below 32 / 2**31."""
    streams = torch.tensor([_stream(seed, epoch, name) for name in _CHOICES], device=sample_ids.device)
    choices = torch.tensor(list(_CHOICES.values()), device=sample_ids.device)
    hashes = _splitmix64(sample_ids * _GOLDEN + streams[:, None])  # (5, B)
    return dict(zip(_CHOICES, _shift_right(hashes, 33) % choices[:, None], strict=True))


def _stream(seed: int, epoch: int, name: str) -> int:
    """Where a sequence of splitmix64 starts: 64 bits as a signed integer."""
    digest = hashlib.sha256(f"{name}, seed {seed}, epoch {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _splitmix64(state: Tensor) -> Tensor:
    """The output function of splitmix64; int64 arithmetic wraps around, as the algorithm wants."""
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own repeats the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
