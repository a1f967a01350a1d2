"""The shortest program that trains in parallel: import torch, gloo, DDP, SGD, one step.

Started with torchrun's variables, RANK and so on.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Take one step and say so."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    print("stepped", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
