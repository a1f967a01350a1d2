"""The usual recipe: ResNet-18 in fp32, contiguous, torchvision's loader, DistributedDataParallel, SGD.

As pytorch/examples and the CIFAR tutorials train; one process per rank, no evaluation, no save.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.reference.torchvision_loader import loader


def usual_images_per_s(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, batch_size: int, num_warm: int, num_steps: int
) -> float:
    """Images per second over all ranks.

    model: on the CPU, float32.  images: uint8 (N, 3, 32, 32), with N at least batch_size * (num_warm + num_steps).
    batch_size: of this rank.
    """
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    criterion = nn.CrossEntropyLoss()
    began = 0.0
    for step, (inputs, targets) in enumerate(loader(images, labels, batch_size)):
        if step == num_warm:
            dist.barrier()
            began = time.perf_counter()
        if step == num_warm + num_steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()  # for the progress bar that such scripts have
    dist.barrier()
    return batch_size * num_steps * dist.get_world_size() / (time.perf_counter() - began)
