"""The least that training can cost: forward, backward and update of one fixed batch, again and again.

Same model, ranks, threads, precision and memory format as the loop that it is compared with; no data, no
augmentation, no agreement between ranks but DDP's own, nothing logged.
"""

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bare_images_per_s(
    model: nn.Module, *, batch_size: int, bf16: bool, channels_last: bool, num_warm: int, num_steps: int
) -> float:
    """Images per second over all ranks.  model: on the CPU, float32.  batch_size: of this rank."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    inputs = torch.randn(batch_size, 3, 32, 32).to(memory_format=layout)
    targets = torch.randint(0, 10, (batch_size,))
    began = 0.0
    for step in range(num_warm + num_steps):
        if step == num_warm:
            dist.barrier()
            began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return batch_size * num_steps * dist.get_world_size() / (time.perf_counter() - began)
