"""Augmentation: data -> [augment] -> batch.  Flip, crop and cutout on the device, then normalisation.

What happens to a sample depends on (seed, epoch, sample id) alone: each draw hashes these with splitmix64, so the
pixels are the same whichever rank reads the sample and in whatever company.  No random state exists.

Sources: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), for splitmix64; DeVries and
Taylor, "Improved regularization of convolutional neural networks with cutout" (2017).
"""

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

CHANNELS, SIDE = 3, 32  # of an image, in pixels
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


class Augmentation:
    """Reads batches and changes them at random, reproducibly.

    Its tables are made once: on a CPU any operation takes microseconds, and a batch is read in some hundreds of them.
    """

    def __init__(self, ops: Collection[str], seed: int, device: torch.device) -> None:
        """ops: some of "flip", "crop", "cutout"; their order has no meaning: crop, flip, then cutout."""
        assert set(ops) <= {"flip", "crop", "cutout"}, f"unknown augmentation in {sorted(ops)}"
        self._ops, self._seed, self._device = frozenset(ops), seed, device
        self._choices = torch.tensor(list(_CHOICES.values()), device=device)[:, None]
        self._streams: tuple[int, Tensor] | None = None  # (epoch, int64 (5, 1))
        shifted = _reflect(torch.arange(SIDE) + torch.arange(-MAX_SHIFT, MAX_SHIFT + 1)[:, None], SIDE)
        mirrored = _reflect(SIDE - 1 - torch.arange(SIDE) + torch.arange(-MAX_SHIFT, MAX_SHIFT + 1)[:, None], SIDE)
        self._sources = torch.cat([shifted, mirrored]).to(device)  # int64 (18, 32): which column each one is read from
        self._planes = torch.arange(CHANNELS, device=device)[:, None] * SIDE  # (3, 1): where an image's planes begin
        offsets = torch.arange(SIDE) - torch.arange(SIDE)[:, None]  # from a centre to each coordinate
        inside = (offsets >= -CUTOUT_SIZE // 2) & (offsets < CUTOUT_SIZE // 2)
        self._columns_inside = (inside * 255).to(torch.uint8).view(torch.int64).to(device)  # (32, 4): bits of 8 pixels
        self._rows_inside = -inside.to(torch.int64).to(device)  # (32, 32): all bits, or none

    def read(self, images: Tensor, rows: Tensor, *, epoch: int, sample_ids: Tensor) -> Tensor:
        """Some of the images, changed: uint8 (B, 3, 32, 32), contiguous.

        images: uint8 (N, 3, 32, 32), contiguous; only read.  rows: int64 (B,), which of them.
        sample_ids: int64 (B,), the keys of the draws.
        """
        if not self._ops:
            return take(images, rows)
        draws = self._draw(epoch, sample_ids)
        batch = self._crop(images, rows, draws) if "crop" in self._ops else take(images, rows)
        if self._ops & {"crop", "flip"}:
            batch = self._choose_columns(batch, draws)
        return self._cutout(batch, draws) if "cutout" in self._ops else batch

    def _crop(self, images: Tensor, rows: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """The lines of each image that a crop leaves, or reflects; reads nothing else."""
        first = (rows * (CHANNELS * SIDE))[:, None, None] + self._planes  # (B, 3, 1)
        chosen = first + self._sources.index_select(0, draws["crop row"])[:, None]  # (B, 3, 32)
        return images.view(-1, SIDE).index_select(0, chosen.flatten()).view(*chosen.shape, SIDE)

    def _choose_columns(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Flip, and a crop's other direction: both choose a source for each column, so one gather does them."""
        number: Tensor | int = draws["crop column"] if "crop" in self._ops else MAX_SHIFT
        if "flip" in self._ops:
            number = number + draws["flip"] * (2 * MAX_SHIFT + 1)
        assert isinstance(number, Tensor)
        columns = self._sources.index_select(0, number)  # (B, 32)
        lines = images.view(len(images), CHANNELS * SIDE, SIDE)
        return lines.gather(2, columns[:, None].expand_as(lines)).view_as(images)

    def _cutout(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Eight pixels at a time, as bits: torch.where takes 30 times as long for uint8 on a CPU."""
        columns = self._columns_inside.index_select(0, draws["cutout column"])  # (B, 4)
        rows = self._rows_inside.index_select(0, draws["cutout row"])  # (B, 32)
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]  # (B, 1, 32, 4)
        words = images.view(torch.int64)  # (B, 3, 32, 4)
        return (words ^ _GREY_WORD).bitwise_and_(inside).bitwise_xor_(words).view(torch.uint8)

    def _draw(self, epoch: int, sample_ids: Tensor) -> dict[str, Tensor]:
        """All draws of each sample: int64 (B,), in [0, _CHOICES).  The bias is below 32 / 2**31."""
        if self._streams is None or self._streams[0] != epoch:
            streams = torch.tensor([_stream(self._seed, epoch, name) for name in _CHOICES], device=self._device)
            self._streams = (epoch, streams[:, None])
        hashes = _splitmix64(sample_ids * _GOLDEN + self._streams[1])  # (5, B)
        return dict(zip(_CHOICES, _shift_right(hashes, 33) % self._choices, strict=True))


class Normalization:
    """Scales pixels to mean 0 and standard deviation 1."""

    def __init__(self, mean: Tensor, std: Tensor, *, channels_last: bool) -> None:
        """mean, std: float32 (3,), of pixels scaled to [0, 1]."""
        self._channels_last = channels_last
        self._scale, self._shift = (1 / (255 * std)).view(3, 1, 1), (-mean / std).view(3, 1, 1)
        if channels_last:  # written out: a row of 3 is too short for vector instructions (12 times as slow)
            self._scale, self._shift = (
                factors.expand(CHANNELS, SIDE, SIDE).permute(1, 2, 0).contiguous()
                for factors in (self._scale, self._shift)
            )

    def __call__(self, images: Tensor) -> Tensor:
        """images: uint8 (B, 3, 32, 32), contiguous.  Returns float32 (B, 3, 32, 32)."""
        # Two passes on purpose: a fused multiply-add may round differently in the vector loop and in its tail, and then
        # a pixel would depend on its place in the batch.
        if not self._channels_last:
            return images.to(torch.float32).mul_(self._scale).add_(self._shift)
        pixels = torch.empty((len(images), SIDE, SIDE, CHANNELS), device=images.device)
        for channel in range(CHANNELS):  # on a CPU 7 times as fast as a conversion to another memory format
            pixels[..., channel] = images[:, channel]
        return pixels.mul_(self._scale).add_(self._shift).permute(0, 3, 1, 2)


def take(images: Tensor, rows: Tensor) -> Tensor:
    """Some of the images as they are: (B, ...) of (N, ...), contiguous."""
    # On a CPU index_select copies whole rows at once; images[rows] goes byte by byte and takes 10 times as long.
    return images.flatten(1).index_select(0, rows).view(-1, *images.shape[1:])


def _reflect(coordinates: Tensor, length: int) -> Tensor:
    """Fold coordinates outside [0, length) back, without repeating the border pixel."""
    return length - 1 - (length - 1 - coordinates.abs()).abs()


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
