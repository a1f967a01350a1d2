"""What a real Slurm lets wait for ever, or refuses, is refused before; what it is told is what the spec says."""

import json
import os
import pwd
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cluster import fit, slurm
from cluster.plan import make_plan
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox, down, missing_programs, up, without_slurm
from cluster.sandbox_accounting import ACCOUNTING_PROGRAMS
from cluster.sandbox_processes import find_processes
from cluster.site import look_up
from cluster.spec import JobSpec, load_spec
from cluster.submit import script_text
from tests import training
from tests.slurm.conftest import leftovers, skip_without_accounting, skip_without_slurm
from tests.slurm.test_jobs import job_field, wait_until_gone
from tests.test_spec import SCHEMA
from tests.training import environment, events_of, submit, summary_of, write_spec

HINT = "the cluster can't run this job, and nothing was submitted; --force submits it all the same"


def environ_for(sandbox: Sandbox, state: Path) -> dict[str, str]:
    own = {name: value for name, value in environment(state).items() if name in ("XDG_STATE_HOME", "OMP_NUM_THREADS")}
    return {**without_slurm(os.environ), **sandbox.variables(), **own}


@pytest.fixture
def environ(sandbox: Sandbox, tmp_path: Path) -> dict[str, str]:
    return environ_for(sandbox, tmp_path)


@pytest.fixture
def short(environ: dict[str, str]) -> Iterator[str]:
    """A partition with MaxTime=2 and MaxNodes=2; EnforcePartLimits is NO, as everywhere in the sandbox."""
    slurm.run(["scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=2", "MaxNodes=2"], environ)
    yield "short"
    slurm.run(["scancel", "--partition=short"], environ)
    training.wait_for("the partition to be empty", lambda: not slurm.run(["squeue", "-h", "-p", "short"], environ))
    slurm.run(["scontrol", "delete", "PartitionName=short"], environ)


def test_jobs_that_would_never_start_are_refused_with_the_limit(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], short: str
) -> None:
    where = f"nodes: 9\ncpus_per_task: 99\ntime_limit: 10\nsignal_lead_s: 10\npartition: {short}"
    spec = write_spec(tmp_path, staged_data, where)
    done = submit(spec, environ=environ)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (
        2,
        "",
        [
            f"{spec}:2: nodes: 9 is over the limit of partition short, MaxNodes=2; use 2",
            f"{spec}:3: cpus_per_task: each node must have 99 CPUs; partition short has no such node; the most is 16 "
            "CPUs",
            f"{spec}:4: time_limit: 10 is over the limit of partition short, MaxTime=00:02:00; use at most that",
            HINT,
        ],
    )
    assert not (tmp_path / "runs").exists()
    assert slurm.run(["squeue", "-h"], environ) == ""


def test_forced_jobs_wait_for_ever_as_slurm_lets_them(
    tmp_path: Path, staged_data: Path, environ: dict[str, str], short: str
) -> None:
    spec = write_spec(tmp_path, staged_data, f"time_limit: 2\nsignal_lead_s: 10\npartition: {short}")
    done = submit(spec, "time_limit=10", "--force", "--json", environ=environ)
    others = ("low", "low-nograce", "low-cancel", "high")
    assert (done.returncode, done.stderr) == (
        0,
        "warning: command line: time_limit: 10 is over the limit of partition short, MaxTime=00:02:00; use at most "
        f"that, or partition {' or '.join(others)}\n",
    )
    job_id = json.loads(done.stdout)["job_id"]
    training.wait_for("the reason", lambda: slurm.job_states([job_id], environ)[job_id].reason == "PartitionTimeLimit")


def test_controller_that_does_not_answer_leaves_the_spec_unjudged(
    tmp_path: Path, staged_data: Path, sandbox: Sandbox, environ: dict[str, str]
) -> None:
    conf = Path(environ["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(f"{conf}\nMessageTimeout=2\n")
    spec = write_spec(tmp_path, staged_data, "nodes: 9\ntime_limit: 10\npartition: nosuch")
    (controller,) = [process.pid for process in find_processes(sandbox) if process.name == "slurmctld"]
    os.kill(controller, signal.SIGSTOP)
    try:
        done = submit(spec, "--dry-run", environ={**environ, "SLURM_CONF": str(tmp_path / "slurm.conf")})
    finally:
        os.kill(controller, signal.SIGCONT)
    told = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert (done.returncode, len(told)) == (0, 1)
    assert done.stderr.startswith("warning: not checked against the cluster: scontrol --all --oneliner show partition")


# With names and accounting.


@pytest.fixture(scope="module")
def named() -> Iterator[Sandbox]:
    """A sandbox with features, a reservation, a partition with limits, and, where it can be had, accounting."""
    skip_without_slurm()
    parent = Path(tempfile.mkdtemp(prefix="slurm-"))
    has_accounting = not missing_programs(os.environ, ACCOUNTING_PROGRAMS)
    sandbox = up(parent / "a", accounting=has_accounting, environ=os.environ)
    environ = {**without_slurm(os.environ), **sandbox.variables()}
    user = pwd.getpwuid(os.geteuid()).pw_name
    for words in (
        "sacctmgr -i add qos tiny MaxWall=10 MaxTRESPerJob=node=2",
        "sacctmgr -i add qos forbidden",
        "sacctmgr -i modify account research,teaching set qos+=tiny",
        "sacctmgr -i add account outside",
        "scontrol update NodeName=n[1-3] AvailableFeatures=fast,ib ActiveFeatures=fast,ib",
        f"scontrol create ReservationName=maint Users={user} StartTime=now+1day Duration=60 Nodes=n[1-2]",
        "scontrol create PartitionName=short Nodes=ALL MaxTime=5 MaxNodes=2",
    ):
        if has_accounting or not words.startswith("sacctmgr"):
            slurm.run(words.split(), environ)
    try:
        yield sandbox
    finally:
        down(sandbox.directory)
        shutil.rmtree(parent)
    assert leftovers(sandbox.directory) == []


@pytest.fixture
def named_environ(named: Sandbox, tmp_path: Path) -> dict[str, str]:
    return environ_for(named, tmp_path)


@pytest.fixture
def charged(named_environ: dict[str, str]) -> dict[str, str]:
    """For what needs accounting."""
    skip_without_accounting()
    return named_environ


def test_names_and_limits_of_accounting_are_checked_before_sbatch(
    tmp_path: Path, staged_data: Path, charged: dict[str, str]
) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 3\ntime_limit: 20\naccount: reserch\nqos: hihg")
    user = pwd.getpwuid(os.geteuid()).pw_name
    told = {
        (): [
            f"{spec}:4: account: 'reserch' is no account of this cluster; did you mean research?",
            f"{spec}:5: qos: 'hihg' is no QOS of this cluster; did you mean high?",
        ],
        ("account=outside", "qos=forbidden"): [
            f"command line: account: user {user} may not charge account outside; use research, root, teaching",
        ],
        ("account=teaching", "qos=forbidden"): [
            "command line: qos: account teaching may not use forbidden; it may use high, normal, tiny",
        ],
        ("account=teaching", "qos=tiny"): [
            f"{spec}:2: nodes: 3 nodes in all are over the limit of QOS tiny, MaxTRES node=2; ask for at most that, or "
            "use another qos",
            f"{spec}:3: time_limit: 20 is over the limit of QOS tiny, MaxWall=00:10:00; use at most that, or another "
            "qos",
        ],
    }
    for overrides, lines in told.items():
        done = submit(spec, *overrides, environ=charged)
        assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [*lines, HINT])
    assert not (tmp_path / "runs").exists()
    assert slurm.run(["squeue", "-h"], charged) == ""


@pytest.mark.long
def test_job_runs_under_its_account_and_qos(tmp_path: Path, staged_data: Path, charged: dict[str, str]) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 2\ntime_limit: 10\naccount: teaching\nqos: tiny")
    done = submit(spec, "train.max_steps=2", "--wait", environ=charged)
    assert done.returncode == 0, done.stderr
    run = training.newest_run(tmp_path)
    job_id = str(events_of(run, "submitted")[0]["job_id"])
    assert (summary_of(run)["world_size"], job_field(job_id, "Account", charged)) == (2, "teaching")
    told = "sacct --noheader --parsable2 --allocations --format=account,qos,state --jobs"
    training.wait_for(
        "accounting to know the end",
        lambda: slurm.run([*told.split(), job_id], charged) == "teaching|tiny|COMPLETED\n",
    )


@pytest.mark.long
def test_job_that_is_preempted_by_qos_comes_back(tmp_path: Path, staged_data: Path, charged: dict[str, str]) -> None:
    spec = write_spec(tmp_path, staged_data, "nodes: 4\ntime_limit: 10\nqos: normal\nexclusive: true")
    job_id = json.loads(submit(spec, "--json", environ=charged).stdout)["job_id"]
    run = training.wait_for_step(tmp_path, 3)
    slurm.run(["srun", "--quiet", "-N4", "--exclusive", "--qos=high", "-t1", "true"], charged)
    wait_until_gone(job_id, charged)
    assert job_field(job_id, "Restarts", charged) == "1"
    summary = summary_of(run)
    assert (summary["attempts"], summary["preemptions"], summary["lost_steps"]) == (2, 1, 0)


# The round trip: what Slurm says of a held job against the spec.

Shown = Mapping[str, str]


def nodes_shown(spec: JobSpec) -> dict[str, str]:
    return {"NumNodes": f"{spec.min_nodes}-{spec.max_nodes}"}


def tasks_shown(spec: JobSpec) -> dict[str, str]:
    """A run on what is free gives its ranks to srun only, see plan.sbatch_flags."""
    return {"NtasksPerN:B:S:C": f"{spec.tasks_per_node if spec.min_nodes == spec.max_nodes else 0}:0:*:*"}


def cpus_shown(spec: JobSpec) -> dict[str, str]:
    cpus = spec.cpus_per_task or 1
    return {"CPUs/Task": str(cpus if spec.min_nodes == spec.max_nodes else cpus * spec.tasks_per_node)}


def memory_shown(spec: JobSpec) -> dict[str, str]:
    """Slurm shows whole gibibytes with G."""
    if spec.memory_per_cpu is not None:
        return {"MinMemoryCPU": spec.memory_per_cpu, "MemPerTres": ""}
    if spec.memory_per_gpu is not None:
        return {"MemPerTres": f"gres/gpu:{spec.memory_per_gpu_mib}"}
    return {"MinMemoryNode": spec.memory_per_node or "0", "MemPerTres": ""}


# Field of the spec -> what `scontrol show job` says.
SHOWN: dict[str, Callable[[JobSpec], dict[str, str]]] = {
    "name": lambda spec: {"JobName": spec.name},
    "nodes": nodes_shown,
    "gpus_per_node": lambda spec: {"TresPerNode": f"gres/gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""},
    "tasks_per_node": tasks_shown,
    "cpus_per_task": cpus_shown,
    "memory_per_node": memory_shown,
    "memory_per_cpu": memory_shown,
    "memory_per_gpu": memory_shown,
    "partition": lambda spec: {"Partition": spec.partition or "low"},
    "account": lambda spec: {"Account": spec.account or "research"},
    "qos": lambda spec: {"QOS": spec.qos or "normal"},
    "constraint": lambda spec: {"Features": spec.constraint or "(null)"},
    "nodelist": lambda spec: {"ReqNodeList": spec.nodelist or "(null)"},
    "exclude": lambda spec: {"ExcNodeList": spec.exclude or "(null)"},
    "reservation": lambda spec: {"Reservation": spec.reservation or ""},
    "exclusive": lambda spec: {"OverSubscribe": "NO" if spec.exclusive else "OK"},
    "time_limit": lambda spec: {"TimeLimit": str(spec.slurm_time)},
    "comment": lambda spec: {"Comment": spec.comment or ""},
    "mail_user": lambda spec: {"MailUser": spec.mail_user or ""},
    "mail_type": lambda spec: {"MailType": spec.mail_type or ""},
    "sbatch": lambda spec: {"Reason": "JobHeldUser", "Nice": str(spec.sbatch.get("nice", 0))},
    "run_root": lambda spec: {"StdOut": f"{spec.run_root}/{spec.name}/RUN_ID/logs/batch_JOB_ID.log"},
    "requeue.mode": lambda spec: {"Requeue": "0" if spec.requeue.mode == "successor" else "1"},
}
# Field -> a line of the batch script that Slurm keeps.
WRITTEN: dict[str, Callable[[JobSpec], list[str]]] = {
    "signal_lead_s": lambda spec: [f"#SBATCH --signal=USR2@{spec.signal_lead_s}"],
    "setup": lambda spec: list(spec.setup),
    "env": lambda spec: [f"export {name}={value}" for name, value in spec.env.items()],
}
# Slurm sees nothing of the rest: where the run goes, what its job starts, what ranks read from the run's own spec.
UNSEEN = (
    "format_version", "cluster", "train", "train.model", "train.epochs", "train.max_steps", "train.global_batch_size",
    "train.micro_batch_size", "train.batch_size_per_rank", "train.lr", "train.momentum", "train.weight_decay",
    "train.label_smoothing", "train.warmup_epochs", "train.schedule", "train.clip_grad_norm",
    "train.eval_every_epochs", "train.log_every_steps", "train.precision", "train.device", "train.threads_per_rank",
    "train.bucket_cap_mb", "train.seed", "train.deterministic", "train.start_timeout_s", "train.step_timeout_s",
    "dataset", "dataset.kind", "dataset.root", "dataset.augment", "dataset.accept_unpublished_md5",
    "dataset.num_train", "dataset.num_test", "checkpoint", "checkpoint.every_steps", "checkpoint.every_minutes",
    "checkpoint.keep_last", "checkpoint.keep_size", "checkpoint.max_failed_saves", "checkpoint.save_timeout_s",
    "requeue", "requeue.max_failures", "requeue.policy", "requeue.submit_from", "requeue.successors", "faults",
    "code", "container", "container.image", "container.mounts", "container.python", "container.runtime", "python",
    "run_root_mode", "train.tensorboard", "train.optimizer", "train.muon_lr", "train.muon_momentum", "train.ema_decay",
    "train.eval_flip", "train.tf32", "train.compile", "train.gradient_compression",
)  # fmt: skip


def test_every_field_of_a_spec_has_its_place_in_the_round_trip() -> None:
    assert sorted([*SHOWN, *WRITTEN, *UNSEEN]) == sorted(SCHEMA)


FULL = """\
gpus_per_node: 2
tasks_per_node: 2
cpus_per_task: 3
time_limit: 1:30:00
"""
INSIDE = {
    "the least": "time_limit: 60\n",
    "names": FULL + "nodes: 2\nmemory_per_node: 64G\npartition: high\naccount: teaching\nqos: high\n"
    "constraint: fast&ib\nnodelist: n1\nexclude: n[3-4]\nreservation: maint\nexclusive: true\n"
    "signal_lead_s: 60\ncomment: for the paper\nmail_user: me@example.org\nmail_type: END,FAIL\n"
    "setup: [module load cuda]\nenv: {NCCL_DEBUG: INFO}\n",
    "memory for each CPU": FULL + "memory_per_cpu: 3G\nnodes: 4\n",
    "memory for each GPU": FULL + "memory_per_gpu: 8G\nrequeue: {mode: successor}\n",
    "what is free": FULL + "nodes: 2-4\ntrain: {global_batch_size: 64}\n",
    "at its limits": "time_limit: 5\npartition: short\nnodes: 2\ncpus_per_task: 16\nmemory_per_node: 500G\n",
    "one feature or the other": "time_limit: 60\nnodes: 2\nconstraint: '[fast|ib]'\n",
    "tiny": "time_limit: 10\nqos: tiny\nnodes: 2\naccount: research\n",
}
OUTSIDE = {  # and yet accepted by Slurm, at least held, which lets them wait for ever
    "gpus_per_node": "gpus_per_node: 3\ntime_limit: 60\n",
    "memory_per_node": "memory_per_node: 501G\ntime_limit: 60\n",
    "nodes": "nodes: 9\ntime_limit: 60\n",
    "cpus_per_task": "cpus_per_task: 99\ntime_limit: 60\n",
    "tasks_per_node": "tasks_per_node: 17\ntime_limit: 60\n",
    "time_limit": "time_limit: 6\npartition: short\n",
    "constraint": "constraint: fast&ib\nnodes: 4\ntime_limit: 60\n",
    "exclude": "exclude: n[1-3]\nnodes: 2\ntime_limit: 60\n",
}
REFUSED = {  # by Slurm itself: which it says of the field
    "partition": ("partition: nosuch\n", "Invalid partition name specified"),
    "account": ("account: outside\n", "Invalid account or account/partition combination specified"),
    "qos": ("qos: forbidden\n", "Invalid qos specification"),
    "constraint": ("constraint: fast|nosuch\n", "Invalid feature specification"),
    "nodelist": ("nodelist: n9\n", "Invalid node name specified"),
    "exclude": ("exclude: n[4-5]\n", "Invalid node name specified"),
    "reservation": ("reservation: nosuch\n", "Requested reservation is invalid"),
}


def held_job(folder: Path, text: str, environ: Mapping[str, str]) -> tuple[JobSpec, str]:
    """Submit the script of a spec by sbatch alone, held; returns the spec and the job's id."""
    hold = "sbatch: {hold: true, nice: 100}\n"
    (folder / "spec.yaml").write_text(f"name: vier knoten\n{text}{hold}run_root: {folder}/runs\n")
    spec = load_spec(Path("spec.yaml"), cwd=folder)
    run = RunFolder(spec.run_root / spec.name / "RUN_ID")
    run.make()
    script = folder / "job.sh"
    script.write_text(script_text(make_plan(spec, run, python="/opt/python"), run))
    try:
        return spec, slurm.submit([str(script)], environ)
    finally:
        shutil.rmtree(run.path)


def shown(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`scontrol show job` as pairs, in the words of 24.11 where 22.05 and 26.05 have others."""
    text = slurm.run(["scontrol", "--oneliner", "show", "job", job_id], environ)
    _, *parts = re.split(r"(?:^|\s)([A-Z][\w:/]*)=", text)
    facts = {name: value.strip() for name, value in zip(parts[::2], parts[1::2], strict=True)}
    for name in ("TresPerNode", "MemPerTres"):
        facts[name] = facts.get(name, "").replace("gres:", "gres/")
    if "-" not in facts["NumNodes"]:
        facts["NumNodes"] = f"{facts['NumNodes']}-{facts['NumNodes']}"
    if facts.get("Exclusive") == "NO" and facts["OverSubscribe"] == "NO":  # 26.05 tells them apart
        facts["OverSubscribe"] = "OK"
    for name, default in (("Account", "research"), ("QOS", "normal")):  # without accounting none is filled in
        facts[name] = facts[name].replace("(null)", default)
    facts["StdOut"] = facts["StdOut"].replace(f"_{job_id}.log", "_JOB_ID.log")
    return facts


def compare(spec: JobSpec, job_id: str, environ: Mapping[str, str]) -> None:
    """Hold every field of the spec that Slurm sees against the job."""
    facts, expected, told = shown(job_id, environ), {}, {}
    for field, attributes in SHOWN.items():
        for name, value in attributes(spec).items():
            expected[field, name] = value
            told[field, name] = facts.get(name, "")
    assert told == expected
    script = slurm.run(["scontrol", "write", "batch_script", job_id, "-"], environ).splitlines()
    for lines in WRITTEN.values():
        assert [line for line in lines(spec) if line not in script] == []
    slurm.run(["scancel", job_id], environ)


@pytest.mark.parametrize("text", INSIDE.values(), ids=INSIDE.keys())
def test_job_inside_the_limits_is_what_its_spec_says(tmp_path: Path, text: str, named_environ: dict[str, str]) -> None:
    spec, job_id = held_job(tmp_path, text, named_environ)
    assert fit.problems(spec, look_up(named_environ, timeout_s=60)) == ()
    compare(spec, job_id, named_environ)


@pytest.mark.parametrize(("field", "text"), OUTSIDE.items(), ids=OUTSIDE.keys())
def test_job_outside_the_limits_that_slurm_takes_is_refused_here(
    tmp_path: Path, field: str, text: str, named_environ: dict[str, str]
) -> None:
    spec, job_id = held_job(tmp_path, text, named_environ)
    assert [problem.key for problem in fit.problems(spec, look_up(named_environ, timeout_s=60))] == [field]
    compare(spec, job_id, named_environ)


@pytest.mark.parametrize(("field", "answer"), REFUSED.items(), ids=REFUSED.keys())
def test_job_that_slurm_refuses_is_refused_here_first(
    tmp_path: Path, field: str, answer: tuple[str, str], named_environ: dict[str, str]
) -> None:
    if field in ("account", "qos"):
        skip_without_accounting()
    text, words = answer
    with pytest.raises(slurm.SlurmError, match=words):
        held_job(tmp_path, f"time_limit: 60\n{text}", named_environ)
    spec = load_spec(Path("spec.yaml"), cwd=tmp_path)
    assert [problem.key for problem in fit.problems(spec, look_up(named_environ, timeout_s=60))] == [field]
