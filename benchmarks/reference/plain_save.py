"""A save as most training scripts do it: torch.save of model and optimizer, then fsync, while the training waits."""

import os
from pathlib import Path
from typing import Any

import torch


def plain_save(state: dict[str, Any], path: Path) -> None:
    """Write one checkpoint; it is on the disk when this returns."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
