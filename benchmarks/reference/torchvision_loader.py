"""CIFAR as torchvision's documentation loads it: transforms sample by sample, batched by a DataLoader.

Source: torchvision.transforms, "RandomCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"; the usual CIFAR recipe.
"""

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images as PIL, as torchvision's CIFAR10 gives them, transformed one by one."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """images: uint8 (N, 3, 32, 32).  labels: int64 (N,)."""
        self.images = [to_pil_image(image) for image in images]
        self.labels = labels.tolist()
        self.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ])  # fmt: skip

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One transformed image, float32 (3, 32, 32), and its label."""
        return self.transform(self.images[index]), self.labels[index]


def loader(images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> "DataLoader[tuple[torch.Tensor, int]]":
    """Batches in the loading process itself, so that images per second are those of one core."""
    return DataLoader(Images(images, labels), batch_size=batch_size, shuffle=True, num_workers=0, drop_last=True)
