"""Numerics: spec, what all ranks can compute -> [numerics] -> precision and memory layout, equal on every rank.

Sources: proc(5), "/proc/cpuinfo"; torch, "Automatic Mixed Precision package"; torch tutorial "Channels last".
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Precision = Literal["fp32", "bf16"]

# Units that multiply bf16: AVX512-BF16 and AMX of x86, BF16 of Arm.  Elsewhere bf16 is slower than fp32.
BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True, slots=True)
class Numerics:
    """In what numbers, and in what order of bytes, a rank computes."""

    device: torch.device
    precision: Precision

    @property
    def channels_last(self) -> bool:
        """Whether pixels and filters lie channels last.

        On CPUs that pays in either precision, on GPUs where their matrix units work, which fp32 leaves idle.
        """
        return self.device.type == "cpu" or self.precision == "bf16"

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout as torch names it."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def place(self, model: nn.Module) -> nn.Module:
        """The model itself, on the device and in the layout."""
        return model.to(self.device).to(memory_format=self.memory_format)

    def autocast(self) -> torch.autocast:
        """A context for forward passes; weights stay fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


def choose_precision(wanted: Literal["auto", "fp32", "bf16"], *, all_have_bf16: bool) -> Precision:
    """Precision of a new run; one that goes on keeps what it began with.

    all_have_bf16: whether the device of every rank has units for it.
    """
    if wanted == "auto":
        return "bf16" if all_have_bf16 else "fp32"
    return wanted


def has_bf16_units(device: torch.device, cpu_info: str) -> bool:
    """Whether bf16 is faster than fp32 on a device.

    cpu_info: the text of /proc/cpuinfo.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    names = ("flags", "Features")  # on x86, on Arm
    flags = next((line.partition(":")[2] for line in cpu_info.splitlines() if line.startswith(names)), "")
    return not BF16_FLAGS.isdisjoint(flags.split())
