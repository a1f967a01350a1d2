"""The pixels of a sample depend on (seed, epoch, sample id), and on nothing else."""

import pytest
import torch
from torch import Tensor

from jobs.augment import CUTOUT_GREY, CUTOUT_SIZE, MAX_SHIFT, Augmentation, Normalization

CPU = torch.device("cpu")
ALL_OPS = ("flip", "crop", "cutout")
MEAN, STD = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])


def random_images(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def changed(images: Tensor, *ops: str, seed: int = 0, epoch: int = 0, sample_ids: Tensor | None = None) -> Tensor:
    ids = torch.arange(len(images)) if sample_ids is None else sample_ids
    return Augmentation(ops, seed, CPU).read(images, torch.arange(len(images)), epoch=epoch, sample_ids=ids)


def splitmix64(state: int) -> int:
    """The published algorithm on Python's integers, without the addition to the state."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("ops", [("flip",), ("crop",), ("cutout",), ALL_OPS])
def test_pixels_are_equal_however_the_batch_is_split_and_ordered(ops: tuple[str, ...]) -> None:
    images = random_images(64)
    whole = changed(images, *ops, seed=3, epoch=5)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    parts = [
        changed(images[part].contiguous(), *ops, seed=3, epoch=5, sample_ids=part)
        for part in (order[:1], order[1:21], order[21:])
    ]
    assert torch.equal(torch.cat(parts), whole[order])


@pytest.mark.parametrize("op", ALL_OPS)
def test_seed_and_epoch_change_the_pixels_and_are_not_interchangeable(op: str) -> None:
    images = random_images(64)
    results = [changed(images, op, seed=seed, epoch=epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for index, result in enumerate(results):
        assert all(not torch.equal(result, other) for other in results[index + 1 :])


def test_rows_are_read_out_of_the_whole_data_set() -> None:
    images = random_images(64)
    rows = torch.tensor([63, 0, 17, 17])
    for ops in ([], ["flip"], ["crop"], ["cutout"], ["flip", "crop", "cutout"]):
        few = Augmentation(ops, 3, CPU).read(images, rows, epoch=5, sample_ids=rows)
        assert torch.equal(few, changed(images, *ops, seed=3, epoch=5)[rows])


def test_no_operation_leaves_the_images() -> None:
    images = random_images(4)
    assert torch.equal(changed(images), images)


def test_the_images_themselves_are_never_written() -> None:
    images = random_images(8)
    before = images.clone()
    changed(images, *ALL_OPS)
    changed(images, "cutout")
    assert torch.equal(images, before)


def test_an_empty_batch_stays_empty() -> None:
    assert changed(random_images(0), *ALL_OPS).shape == (0, 3, 32, 32)


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(AssertionError):
        changed(random_images(1), "flips")


def test_half_of_the_images_are_flipped_and_none_is_torn() -> None:
    images = random_images(1000)
    result = changed(images, "flip")
    same = (result == images).flatten(1).all(dim=1)
    mirrored = (result == images.flip(-1)).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert 450 < int(mirrored.sum()) < 550


def test_crop_is_a_window_of_the_reflected_image_and_each_shift_comes_up() -> None:
    images = random_images(1000)
    bordered = torch.nn.functional.pad(images.float(), [MAX_SHIFT] * 4, mode="reflect").to(torch.uint8)
    windows = bordered.unfold(2, 32, 1).unfold(3, 32, 1)  # (1000, 3, 9, 9, 32, 32)
    hits = (windows == changed(images, "crop")[:, :, None, None]).all(dim=1).flatten(3).all(dim=3)  # (1000, 9, 9)
    assert hits.flatten(1).sum(dim=1).tolist() == [1] * 1000
    assert int(hits.sum(dim=0).count_nonzero()) == (2 * MAX_SHIFT + 1) ** 2


def test_cutout_greys_one_square_that_the_border_clips() -> None:
    images = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8)
    grey = changed(images, "cutout") == CUTOUT_GREY
    assert torch.equal(grey, grey[:, :1].expand(-1, 3, -1, -1))
    rows, columns = grey[:, 0].any(dim=2).sum(dim=1), grey[:, 0].any(dim=1).sum(dim=1)  # sides of each square
    assert torch.equal(grey[:, 0].flatten(1).sum(dim=1), rows * columns)
    assert (int(rows.min()), int(rows.max())) == (CUTOUT_SIZE // 2, CUTOUT_SIZE)
    assert (int(columns.min()), int(columns.max())) == (CUTOUT_SIZE // 2, CUTOUT_SIZE)


def test_draws_are_those_of_the_published_splitmix64() -> None:
    from jobs import augment as module

    ids = torch.tensor([0, 1, 49_999, 2**40])
    draws = Augmentation(("flip",), 7, CPU)._draw(2, ids)
    for name, choices in module._CHOICES.items():
        stream = module._stream(7, 2, name)
        states = [(sample * 0x9E3779B97F4A7C15 + stream) % 2**64 for sample in ids.tolist()]
        assert draws[name].tolist() == [(splitmix64(state) >> 33) % choices for state in states]


def test_normalize_gives_mean_zero_and_deviation_one() -> None:
    images = random_images(256)
    pixels = images.double() / 255
    mean, std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3), unbiased=False)
    result = Normalization(mean.float(), std.float(), channels_last=False)(images)
    assert (result.dtype, result.shape) == (torch.float32, images.shape)
    torch.testing.assert_close(result.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


def test_normalize_is_bit_equal_in_any_batch_and_memory_format() -> None:
    images = random_images(33)
    contiguous, last = (Normalization(MEAN, STD, channels_last=is_last) for is_last in (False, True))
    whole, channels_last = contiguous(images), last(images)
    parts = torch.cat([contiguous(part) for part in (images[:1], images[1:6], images[6:])])
    assert torch.equal(whole, parts)
    assert torch.equal(whole, channels_last)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
