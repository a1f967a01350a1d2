"""Which device a rank takes, and when it refuses."""

from pathlib import Path

import pytest
import torch

from cluster.rank import RankEnv
from cluster.spec import DatasetSpec, JobSpec, TrainSpec
from jobs.device import DeviceError, choose_device, environment_of, use_device


def make_spec(device: str = "auto", gpus: str | None = None, **train: object) -> JobSpec:
    spec = JobSpec(
        name="device",
        run_root=Path("/runs"),
        train=TrainSpec.model_validate({"device": device} | train),
        dataset=DatasetSpec(root=Path("/data")),
    )
    return spec.model_copy(update={"gpus_per_node": gpus})


def make_rank(local_rank: int, local_world_size: int) -> RankEnv:
    return RankEnv(4 + local_rank, local_rank, 8, local_world_size, 1, 2, "n1", (23111,), "7.0", False, "srun")


@pytest.mark.parametrize(
    ("device", "gpus", "num_visible", "local_rank", "expected"),
    [
        pytest.param("cpu", None, 0, 1, "cpu", id="cpu asked for"),
        pytest.param("cpu", None, 4, 1, "cpu", id="cpu asked for on a node with GPUs"),
        pytest.param("auto", None, 0, 1, "cpu", id="no GPU asked for, none there"),
        pytest.param("auto", None, 2, 1, "cpu", id="no GPU asked for, too few there"),
        pytest.param("auto", None, 4, 3, "cuda:3", id="no GPU asked for, but one for each rank"),
        pytest.param("auto", "4", 4, 3, "cuda:3", id="all GPUs visible to all ranks"),
        pytest.param("auto", "a100:4", 8, 3, "cuda:3", id="more GPUs than ranks"),
        pytest.param("auto", "4", 1, 3, "cuda:0", id="each rank bound to its own"),
        pytest.param("cuda", None, 4, 2, "cuda:2", id="cuda asked for"),
        pytest.param("cuda", None, 1, 2, "cuda:0", id="cuda asked for, each rank bound to its own"),
    ],
)
def test_device_of_a_rank(device: str, gpus: str | None, num_visible: int, local_rank: int, expected: str) -> None:
    chosen = choose_device(make_spec(device, gpus), make_rank(local_rank, 4), {}, num_visible=num_visible)
    assert chosen == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "gpus", "num_visible", "environ", "visible"),
    [
        ("cuda", None, 0, {}, "None"),
        ("auto", "4", 0, {"CUDA_VISIBLE_DEVICES": ""}, "''"),
        ("auto", "4", 2, {"CUDA_VISIBLE_DEVICES": "GPU-1,MIG-2"}, "'GPU-1,MIG-2'"),
    ],
)
def test_missing_gpus_are_an_error_and_never_the_cpu_in_silence(
    device: str, gpus: str | None, num_visible: int, environ: dict[str, str], visible: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(make_spec(device, gpus), make_rank(1, 4), environ, num_visible=num_visible)
    assert str(caught.value) == (
        f"rank 5 sees {num_visible} GPUs (CUDA_VISIBLE_DEVICES={visible}), but its node has 4 ranks and the spec asks "
        "for GPUs: expected one for each rank; set train.device=cpu to train without, or ask Slurm for the GPUs"
    )


def test_environment_names_all_that_the_bits_depend_on() -> None:
    environment = environment_of(torch.device("cpu"), make_spec(threads_per_rank=3), make_rank(0, 4))
    expected = {"world_size": 8, "threads_per_rank": 3, "torch": torch.__version__, "device": "cpu"}
    assert environment == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_threads_and_determinism_are_the_specs(deterministic: bool) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        use_device(torch.device("cpu"), make_spec(threads_per_rank=2, deterministic=deterministic))
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, deterministic)
        assert torch.backends.cudnn.benchmark is not deterministic
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


@pytest.mark.parametrize(("tf32", "matmul"), [(False, "highest"), (True, "high")])
def test_fp32_means_fp32_unless_the_spec_says_tf32(tf32: bool, matmul: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    try:
        use_device(torch.device("cpu"), make_spec(tf32=tf32, deterministic=False))
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, tf32)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.set_num_threads(before[2])
