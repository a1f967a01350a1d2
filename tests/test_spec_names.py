from pathlib import Path

import pytest

from tests.specs import load, problems


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("RANK: '0'", "env.RANK: may not be set: it is worked out for every rank"),
        ("LOCAL_RANK: 0", "env.LOCAL_RANK: may not be set: it is worked out for every rank"),
        ("WORLD_SIZE: '4'", "env.WORLD_SIZE: may not be set: it is worked out for every rank"),
        ("CLUSTER_TOKEN: x", "env.CLUSTER_TOKEN: may not be set: names that begin so are the program's own"),
        ("SLURM_JOB_ID: x", "env.SLURM_JOB_ID: may not be set: Slurm sets it"),
        ("CUDA_VISIBLE_DEVICES: '0'", "env.CUDA_VISIBLE_DEVICES: may not be set: Slurm chooses the GPUs of a task"),
        ("OMP_NUM_THREADS: '4'", "env.OMP_NUM_THREADS: may not be set: use the key train.threads_per_rank"),
        ("A-B: x", "env.A-B: 'A-B' is no name of a variable; use letters, digits and _"),
        ("A: 4", "env.A: 4 is read as a number; put it in quotes"),
        ("A: no", "env.A: no may be read as true or false; put it in quotes"),
        ("A:", "env.A: has no value; give one, or leave the key out"),
        ('A: "x\\ny"', "env.A: 'x\\ny' holds the control character U+000A; take it out"),
        ("MASTER_PORT: 29500", "env.MASTER_PORT: 29500 is read as a number; put it in quotes"),
        ("MASTER_PORT: '0'", "env.MASTER_PORT: '0' is no TCP port; use a number from 1 to 65535, in quotes"),
        ("MASTER_PORT: '65536'", "env.MASTER_PORT: '65536' is no TCP port; use a number from 1 to 65535, in quotes"),
        ("MASTER_PORT: port", "env.MASTER_PORT: 'port' is no TCP port; use a number from 1 to 65535, in quotes"),
    ],
)
def test_a_variable_that_may_not_be_set_says_why(tmp_path: Path, entry: str, expected: str) -> None:
    assert problems(tmp_path, f"name: demo\ntime_limit: 60\nenv:\n  {entry}\n") == [f"spec.yaml:4: {expected}"]


def test_variables_may_hold_any_text(tmp_path: Path) -> None:
    env = load(tmp_path, "name: demo\ntime_limit: 60\nenv: {A: '', MASTER_PORT: '29500', NO: $HOME 'x'}\n").env
    assert env == {"A": "", "MASTER_PORT": "29500", "NO": "$HOME 'x'"}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("partition: gpu", "sbatch.partition: sbatch's --partition is written by the key partition; use that"),
        ("p: gpu", "sbatch.p: sbatch's --partition is written by the key partition; use that"),
        ("part: gpu", "sbatch.part: sbatch's --partition is written by the key partition; use that"),
        ("N: 4", "sbatch.N: sbatch's --nodes is written by the key nodes; use that"),
        ("ntasks: 4", "sbatch.ntasks: sbatch's --ntasks is written by the key tasks_per_node; use that"),
        ("ntasks_per_node: 4",
         "sbatch.ntasks_per_node: sbatch's --ntasks-per-node is written by the key tasks_per_node; use that"),
        ("time: 60", "sbatch.time: sbatch's --time is written by the key time_limit; use that"),
        ("mem: 16G", "sbatch.mem: sbatch's --mem is written by the key memory_per_node; use that"),
        ("--signal: USR1@60", "sbatch.--signal: sbatch's --signal is written by the key signal_lead_s; use that"),
        ("export: NONE", "sbatch.export: sbatch's --export is written by the key env; use that"),
        ("no-requeue: true",
         "sbatch.no-requeue: sbatch's --no-requeue is not yours to set: use the key requeue.mode"),
        ("output: x.log", "sbatch.output: sbatch's --output is not yours to set: the log is kept in the run folder"),
        ("array: 0-9",
         "sbatch.array: sbatch's --array is not yours to set: one submission is one run; submit once per run"),
        ("test-only: true", "sbatch.test-only: sbatch's --test-only is not yours to set: use --dry-run"),
        ("gres: tmpdisk:5,gpu:2", "sbatch.gres: 'tmpdisk:5,gpu:2' asks for GPUs; use the key gpus_per_node"),
        ("mem_bind: local",
         "sbatch.mem_bind: 'mem_bind' is no long name of an sbatch flag without leading dashes; write mem-bind"),
        ("--nice: 5", "sbatch.--nice: '--nice' is no long name of an sbatch flag without leading dashes; write nice"),
        ("L: a", "sbatch.L: 'L' is no long name of an sbatch flag without leading dashes; write licenses"),
        ("nice=5: true", "sbatch.nice=5: 'nice=5' is no long name of an sbatch flag, such as licenses"),
        ("hold: false", "sbatch.hold: false gives no flag; leave it out (true gives a flag without a value)"),
        ("hold:", "sbatch.hold: has no value; give one, or leave the key out"),
        ("switches: [1]",
         "sbatch.switches: expected text, a whole number, or true for a flag without a value; put it in quotes"),
        ("switches: no", "sbatch.switches: no may be read as true or false; put it in quotes"),
        ('wckey: "a\\nb"', "sbatch.wckey: 'a\\nb' holds the control character U+000A; take it out"),
    ],
)  # fmt: skip
def test_a_flag_that_may_not_be_given_says_what_to_use(tmp_path: Path, entry: str, expected: str) -> None:
    assert problems(tmp_path, f"name: demo\ntime_limit: 60\nsbatch:\n  {entry}\n") == [f"spec.yaml:4: {expected}"]


def test_free_flags_keep_their_types(tmp_path: Path) -> None:
    text = "name: demo\ntime_limit: 60\nsbatch: {dependency: afterok:1, nice: 100, hold: true, gres: tmpdisk:5}\n"
    flags = load(tmp_path, text).sbatch
    assert flags == {"dependency": "afterok:1", "nice": 100, "hold": True, "gres": "tmpdisk:5"}
    assert [type(value) for value in flags.values()] == [str, int, bool, str]
