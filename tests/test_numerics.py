"""Precision and memory layout: what the spec says, and what the devices of all ranks can do."""

from typing import Literal

import pytest
import torch
from torch import nn

from jobs.numerics import Numerics, Precision, choose_precision, has_bf16_units

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EPYC_9004 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
flags\t\t: fpu sse2 avx2 avx512f avx512dq avx512_bf16 avx512vbmi
"""
XEON_8481 = EPYC_9004.replace("avx512_bf16", "avx512_fp16 amx_bf16")
XEON_8176 = EPYC_9004.replace("avx512_bf16", "avx512cd")
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 dgh\n"
GRAVITON_2 = "processor\t: 0\nFeatures\t: fp asimd crc32 atomics fphp\n"


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [(EPYC_9004, True), (XEON_8481, True), (XEON_8176, False), (GRAVITON_3, True), (GRAVITON_2, False), ("", False)],
)
def test_cpu_has_units_for_bf16_where_its_flags_say_so(cpu_info: str, expected: bool) -> None:
    assert has_bf16_units(CPU, cpu_info) is expected


@pytest.mark.parametrize(
    ("wanted", "all_have_bf16", "expected"),
    [
        ("auto", True, "bf16"),
        ("auto", False, "fp32"),
        ("fp32", True, "fp32"),
        ("bf16", False, "bf16"),
    ],
)
def test_auto_takes_bf16_where_all_ranks_have_it(
    wanted: Literal["auto", "fp32", "bf16"], all_have_bf16: bool, expected: Precision
) -> None:
    assert choose_precision(wanted, all_have_bf16=all_have_bf16) == expected


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        (CPU, "fp32", torch.channels_last),
        (CPU, "bf16", torch.channels_last),
        (GPU, "bf16", torch.channels_last),
        (GPU, "fp32", torch.contiguous_format),
    ],
)
def test_channels_come_last_but_for_fp32_on_gpus(
    device: torch.device, precision: Precision, expected: torch.memory_format
) -> None:
    assert Numerics(device, precision).memory_format == expected


def test_forward_pass_is_in_the_precision_and_weights_are_not() -> None:
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        numerics = Numerics(CPU, precision)  # type: ignore[arg-type]  # a row of two literals
        model = numerics.place(nn.Conv2d(3, 8, 3))
        assert isinstance(model.weight, nn.Parameter)
        with numerics.autocast():
            assert model(torch.zeros(1, 3, 8, 8)).dtype == dtype
        assert model.weight.dtype == torch.float32
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
