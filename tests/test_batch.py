"""Batches: the same images and labels wherever the data set lies."""

import torch

from jobs.augment import Normalization
from jobs.batch import Reader, placed
from jobs.numerics import Numerics
from tests.small_run import NUM_TRAIN, make_data

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")  # shapes without contents: a device that is not the host


def test_batch_without_augmentation_is_the_samples_normalised() -> None:
    data, ids = make_data(), torch.tensor([7, 0, 7])
    images, labels = Reader(data, Numerics(CPU, "bf16"), (), seed=0).read(ids, epoch=0)
    assert torch.equal(images, Normalization(data.mean, data.std, channels_last=False)(data.train_images[ids]))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == data.train_labels[ids].tolist()


def test_sample_looks_the_same_in_every_batch() -> None:
    reader = Reader(make_data(), Numerics(CPU, "fp32"), ("flip", "crop", "cutout"), seed=4)
    alone, _ = reader.read(torch.tensor([5]), epoch=2)
    whole, _ = reader.read(torch.arange(NUM_TRAIN), epoch=2)
    assert torch.equal(alone[0], whole[5])


def test_images_that_do_not_fit_the_device_are_sent_batch_by_batch() -> None:
    kept = placed(make_data(), ELSEWHERE, limit=0)
    assert (kept.train_images.device, kept.train_labels.device) == (CPU, ELSEWHERE)
    images, labels = Reader(kept, Numerics(ELSEWHERE, "bf16"), ("flip", "crop", "cutout"), seed=0).read(
        torch.tensor([1, 2, 3]), epoch=0
    )
    assert (images.device, images.shape, labels.device, labels.shape) == (ELSEWHERE, (3, 3, 32, 32), ELSEWHERE, (3,))


def test_images_are_placed_while_there_is_room() -> None:
    data = make_data()
    for limit, train, test in (
        (data.train_images.nbytes + data.test_images.nbytes, ELSEWHERE, ELSEWHERE),
        (data.train_images.nbytes, CPU, ELSEWHERE),
        (data.test_images.nbytes - 1, CPU, CPU),
    ):
        moved = placed(data, ELSEWHERE, limit=limit)
        assert (moved.train_images.device, moved.test_images.device) == (train, test)
