from pathlib import Path

import pytest

from cluster.spec import JobSpec
from tests.specs import load, value_problem


@pytest.mark.parametrize(
    ("text", "seconds", "slurm"),
    [
        ("10", 600, "00:10:00"),
        ("'10'", 600, "00:10:00"),
        ("4:00", 240, "00:04:00"),
        ("0:30", 30, "00:00:30"),
        ("1:30", 90, "00:01:30"),
        ("1:5", 65, "00:01:05"),
        ("30:00", 1800, "00:30:00"),
        ("90:00", 5400, "01:30:00"),
        ("1:00:00", 3600, "01:00:00"),
        ("01:00:00", 3600, "01:00:00"),
        ("12:00:00", 43_200, "12:00:00"),
        ("72:00:00", 259_200, "3-00:00:00"),
        ("2-12", 216_000, "2-12:00:00"),
        ("0-1", 3600, "01:00:00"),
        ("1-00:00", 86_400, "1-00:00:00"),
        ("1-00:00:00", 86_400, "1-00:00:00"),
        ("1-02:03:04", 93_784, "1-02:03:04"),
    ],
)
def test_the_six_forms_of_a_time(text: str, seconds: int, slurm: str) -> None:
    spec = JobSpec(name="demo", time_limit=text.strip("'"))
    assert (spec.time_limit_s, spec.slurm_time) == (seconds, slurm)


@pytest.mark.parametrize("plain", ["60", "'60'", "60:00", "1:00:00", "0-1", "0-1:00", "0-1:00:00"])
def test_a_time_is_read_from_yaml_without_quotes(tmp_path: Path, plain: str) -> None:
    assert load(tmp_path, f"name: demo\ntime_limit: {plain}\n").slurm_time == "01:00:00"


@pytest.mark.parametrize(
    "text",
    ["10:00:", "1-24", "2-24:61", "2-25", "1:60:00", "1:00:60", "1:60", "1:005", "1-", "-1", "+1", "1-1-1", "1:2:3:4",
     "1h", "UNLIMITED", "INFINITE", "1.5", " 60", "1d", "٣", "1" * 9],
)  # fmt: skip
def test_another_form_of_a_time_is_refused(tmp_path: Path, text: str) -> None:
    assert value_problem(tmp_path, f"time_limit: '{text}'") == (
        f"time_limit: '{text}' is no Slurm time; use minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
    )


@pytest.mark.parametrize("text", ["0", "0:00", "0:00:00", "0-0", "0-00:00:00"])
def test_a_time_of_zero_is_refused(tmp_path: Path, text: str) -> None:
    assert value_problem(tmp_path, f"time_limit: {text}") == (
        f"time_limit: '{text}' is 0, which Slurm takes as no limit; give the time the run may take"
    )


@pytest.mark.parametrize(
    ("text", "mib"),
    [("16G", 16_384), ("1.5G", 1536), ("512M", 512), ("2T", 2_097_152), ("1K", 1), ("1025K", 2), ("0.3G", 308)],
)
def test_memory_is_whole_mebibytes_rounded_up(text: str, mib: int) -> None:
    spec = JobSpec(name="demo", memory_per_node=text, memory_per_cpu=text, memory_per_gpu=text)
    assert (spec.memory_per_node_mib, spec.memory_per_cpu_mib, spec.memory_per_gpu_mib) == (mib, mib, mib)


@pytest.mark.parametrize(
    ("written", "seen", "hint"),
    [
        ("16", "16", "; did you mean 16G?"),
        ("'16'", "16", "; did you mean 16G?"),
        ("1.5", "1.5", "; did you mean 1.5G?"),
        ("16GB", "16GB", "; did you mean 16G?"),
        ("16g", "16g", "; did you mean 16G?"),
        ("512 MiB", "512 MiB", "; did you mean 512M?"),
        ("all", "all", ", such as 16G"),
        ("-1G", "-1G", ", such as 16G"),
    ],
)
def test_memory_without_its_unit_is_refused(tmp_path: Path, written: str, seen: str, hint: str) -> None:
    assert value_problem(tmp_path, f"memory_per_cpu: {written}") == (
        f"memory_per_cpu: '{seen}' is no amount of memory; use a number with K, M, G or T{hint}"
    )


def test_memory_of_zero_is_refused(tmp_path: Path) -> None:
    assert value_problem(tmp_path, "memory_per_node: 0G") == (
        "memory_per_node: '0G' is 0, by which Slurm means all memory of the node; give the amount"
    )
