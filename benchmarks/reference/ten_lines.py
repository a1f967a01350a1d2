"""A submission as submitit's README writes it: python -m benchmarks.reference.ten_lines FOLDER PARTITION."""

import sys

import submitit


def train() -> None:
    """Nothing: only the submission is measured."""


executor = submitit.AutoExecutor(folder=sys.argv[1])
executor.update_parameters(
    name="4node", nodes=4, tasks_per_node=2, gpus_per_node=2, cpus_per_task=4, timeout_min=480,
    slurm_partition=sys.argv[2],
)  # fmt: skip
print(executor.submit(train).job_id)
