"""The usual way to come back: save at the end of each epoch, load at the start; a signal ends it where it stands.

    python -m benchmarks.reference.usual_resume STAGED FOLDER EPOCHS BATCH_SIZE_PER_RANK

As a careful user writes it after pytorch/examples: DistributedDataParallel, DistributedSampler with set_epoch, model,
optimizer, schedule and epoch in one file, written beside the old one and renamed.  No evaluation.  The same net and
images as the run that it is compared with.  Started with torchrun's variables, and again by whoever requeues it.
Rank 0 prints `stepped` after each step; FOLDER/epochs.jsonl gets one line for each epoch that is saved.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from jobs.model import build_model


def main() -> None:
    """Train from the newest saved epoch to the last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference.usual_resume", description=__doc__)
    parser.add_argument("staged", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("batch_size", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    staged = torch.load(args.staged, weights_only=True, mmap=True)
    data = TensorDataset(staged["train_images"], staged["train_labels"])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(build_model("resnet18", len(staged["classes"])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    checkpoint = args.folder / "checkpoint.pt"
    first_epoch = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"]
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        seconds = train(loader, model, optimizer)
        scheduler.step()
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, checkpoint)
            with (args.folder / "epochs.jsonl").open("a") as file:
                file.write(json.dumps({"epoch": epoch, "step_seconds": seconds}) + "\n")
    dist.destroy_process_group()


def train(
    loader: "DataLoader[tuple[torch.Tensor, ...]]", model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> float:
    """One epoch; the seconds that it took."""
    began = time.perf_counter()
    for images, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        inputs = (images.float() / 255 - 0.5) / 0.25
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        if dist.get_rank() == 0:
            print("stepped", flush=True)
    return time.perf_counter() - began


def save(state: dict[str, Any], path: Path) -> None:
    """Write beside the old file and rename, so that a kill leaves one that can be read."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


if __name__ == "__main__":
    main()
