import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cluster.sandbox import Sandbox, SandboxError, down, is_up, load, up, without_slurm
from cluster.sandbox_hosts import HOSTS, host_lines
from cluster.sandbox_processes import find_processes
from tests import training
from tests.slurm.conftest import leftovers, skip_without_accounting

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
ORDINARY = 1  # daemon, everywhere in Debian: slurmctld 26.05 takes nobody for no user to run as


def run(*argv: str | Path, environ: Mapping[str, str]) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def poll(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def hosts_without(*others: Path) -> str:
    """/etc/hosts without the lines of sandboxes that run beside this test."""
    lines = HOSTS.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if "# slurm-sandbox" not in line or any(str(o) in line for o in others))


def job_facts(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    words = run("scontrol", "--oneliner", "show", "job", job_id, environ=environ).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_four_nodes_are_idle_in_every_partition(slurm_environ: dict[str, str]) -> None:
    training.wait_for(
        "the jobs of other tests to leave", lambda: not run("squeue", "--noheader", environ=slurm_environ)
    )
    answer = run("sinfo", "--noheader", "--format=%P %D %T %G", environ=slurm_environ)
    assert answer.splitlines() == [
        "low* 4 idle gpu:2",
        "low-nograce 4 idle gpu:2",
        "low-cancel 4 idle gpu:2",
        "high 4 idle gpu:2",
    ]


def test_tasks_run_on_all_nodes_and_see_both_gpus(slurm_environ: dict[str, str]) -> None:
    script = "echo $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    options = ("-N4", "--ntasks-per-node=2", "--gpus-per-node=2")
    answer = run("srun", "--quiet", *options, "sh", "-c", script, environ=slurm_environ)
    assert sorted(answer.splitlines()) == [f"{rank} n{rank // 2 + 1} 0,1" for rank in range(8)]


@pytest.mark.skipif(not os.access(HOSTS, os.W_OK), reason="node names resolve only where /etc/hosts can be written")
def test_node_names_resolve_to_this_machine(sandbox: Sandbox) -> None:
    assert [socket.gethostbyname(node) for node in sandbox.nodes] == ["127.0.0.1"] * 4


@pytest.mark.long
def test_high_preempts_each_low_partition_in_its_own_way(slurm_environ: dict[str, str], tmp_path: Path) -> None:
    nodes = {"low": "n1", "low-nograce": "n2", "low-cancel": "n3"}
    submit = ("sbatch", "--parsable", "--requeue", "--exclusive", f"--output={tmp_path}/%j")
    jobs = {
        partition: run(
            *submit, f"--partition={partition}", f"--nodelist={node}", "--wrap=sleep 300", environ=slurm_environ
        ).strip()
        for partition, node in nodes.items()
    }
    poll(lambda: {job_facts(job, slurm_environ)["JobState"] for job in jobs.values()} == {"RUNNING"})
    on_all = ("--partition=high", "--nodelist=n[1-3]", "--exclusive", "--quiet")

    run("srun", *on_all, "true", environ=slurm_environ)

    ends = {partition: job_facts(job, slurm_environ) for partition, job in jobs.items()}
    run("scancel", *jobs.values(), environ=slurm_environ)
    poll(lambda: run("squeue", "--noheader", environ=slurm_environ) == "")
    restarts = {partition: int(facts["Restarts"]) for partition, facts in ends.items()}
    assert restarts == {"low": 1, "low-nograce": 1, "low-cancel": 0}
    assert ends["low-cancel"]["JobState"] == "PREEMPTED"


def test_two_sandboxes_run_at_once_and_the_end_of_one_leaves_the_other(
    sandbox: Sandbox, slurm_environ: dict[str, str], short_path: Path
) -> None:
    before = hosts_without(sandbox.directory)
    second = up(short_path / "b", num_nodes=1, gpus_per_node=8, environ=slurm_environ)
    environ = {**slurm_environ, **second.variables()}
    gpus = run("srun", "--quiet", "--gpus-per-node=8", "printenv", "CUDA_VISIBLE_DEVICES", environ=environ)
    job = run("sbatch", "--output=/dev/null", "--wrap=env -i setsid sleep 300 & wait", environ=environ)
    client = subprocess.Popen(["srun", "--quiet", "sleep", "300"], env=environ, stderr=subprocess.DEVNULL)
    poll(lambda: len([p for p in find_processes(second) if p.name == "sleep"]) == 2)
    during = hosts_without(sandbox.directory, second.directory)

    down(second.directory)

    assert client.wait() != 0  # the user's own srun ended with its job
    assert (gpus, job) == ("0,1,2,3,4,5,6,7\n", "Submitted batch job 2\n")
    assert during == before + host_lines(second.directory, second.addresses) or not os.access(HOSTS, os.W_OK)
    assert hosts_without(sandbox.directory) == before
    assert find_processes(second) == frozenset()
    assert leftovers(second.directory) == []
    assert list(short_path.iterdir()) == []
    assert is_up(sandbox)


def test_the_command_line_starts_and_ends_a_sandbox(short_path: Path) -> None:
    directory = short_path / "c"
    environ = {**without_slurm(os.environ), "SLURM_JOB_ID": "999"}  # as inside a job of another Slurm

    def sandbox_command(verb: str, *options: str) -> str:
        # Returns at the end of the output, so no daemon holds the stream open.
        return run(sys.executable, "-m", "cluster.sandbox", verb, "--dir", directory, *options, environ=environ)

    started = sandbox_command("up", "--nodes=1", "--gpus-per-node=0")
    shell = sandbox_command("env")
    status = sandbox_command("status")
    sandbox = load(directory)
    (slurmd,) = [process.pid for process in find_processes(sandbox) if process.name == "slurmd"]
    variables = Path(f"/proc/{slurmd}/environ").read_text().split("\0")
    with pytest.raises(SandboxError) as second:
        up(directory, environ=environ)
    ended = sandbox_command("down")

    version = sandbox.version
    assert started == (
        f"Slurm {version} is up: n1, 0 fake GPUs each\n"
        f'use it:  eval "$(python -m cluster.sandbox env --dir {directory})"\n'
        f"end it:  python -m cluster.sandbox down --dir {directory}\n"
    )
    assert shell == f"unset SLURM_JOB_ID\nexport SLURM_CONF={directory}/slurm.conf\n"
    assert status == (
        f"up: Slurm {version} in {directory}\nnodes: n1, 0 fake GPUs each\nstates: 1 idle\n"
        f"ports: slurmctld {sandbox.controller_port}, slurmd {sandbox.node_ports[0]}-{sandbox.node_ports[0]}\n"
    )
    assert [text for text in variables if text.startswith("SLURM_")] == [f"SLURM_CONF={directory}/slurm.conf"]
    assert str(second.value) == (
        f"{directory}: a sandbox is here already; use it, or end it first: "
        f"python -m cluster.sandbox down --dir {directory}"
    )
    assert ended == ""
    assert leftovers(directory) == []


def test_down_kills_no_process_that_got_the_number_of_a_daemon(short_path: Path) -> None:
    sandbox = up(short_path / "d", num_nodes=1, environ=os.environ)
    (slurmd,) = [process for process in find_processes(sandbox) if process.name == "slurmd"]
    os.kill(slurmd.pid, signal.SIGKILL)
    foreign = subprocess.Popen(["sleep", "300"], env={**os.environ, **sandbox.variables()})
    (sandbox.directory / "run" / "slurmd.n1.pid").write_text(f"{foreign.pid}\n")
    (sandbox.directory / "mine.txt").write_text("kept")

    down(sandbox.directory)

    survived = foreign.poll() is None
    foreign.kill()
    foreign.wait()
    assert survived
    assert [path.name for path in sandbox.directory.iterdir()] == ["mine.txt"]
    assert leftovers(sandbox.directory) == []


def test_a_start_that_fails_halfway_says_why_and_leaves_nothing(short_path: Path) -> None:
    programs = short_path / "bin"
    programs.mkdir()
    slurmd = shutil.which("slurmd", path=f"{os.environ['PATH']}:/usr/sbin")
    (programs / "slurmd").write_text(
        f'#!/bin/sh\n[ "$1" = -V ] && exec {slurmd} -V\necho "fatal: no luck" >&2\nexit 7\n'
    )
    (programs / "slurmd").chmod(0o755)
    directory = short_path / "e"

    with pytest.raises(SandboxError) as failure:
        up(directory, environ={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"})

    assert str(failure.value).splitlines() == [
        f"{directory}: Slurm did not start: slurmd ended with exit code 7",
        "  start.log: fatal: no luck",
    ]
    assert leftovers(directory) == []
    assert not directory.exists()


@pytest.mark.parametrize(("umask", "options"), [(0o022, ()), (0o002, ("--accounting",))], ids=["plain", "accounting"])
def test_an_ordinary_user_can_run_a_sandbox(short_path: Path, umask: int, options: tuple[str, ...]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user; as an ordinary user all other tests show the same")
    if options:
        skip_without_accounting()
    shutil.copytree(REPOSITORY / "cluster", short_path / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    home = short_path / "home"
    home.mkdir()
    os.chown(home, ORDINARY, ORDINARY)
    python = interpreter_for(ORDINARY)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}

    def as_ordinary(*argv: str, **variables: str) -> str:
        done = subprocess.run(
            argv,
            env={**environ, **variables},
            cwd=short_path,
            user=ORDINARY,
            group=ORDINARY,
            extra_groups=[],
            umask=umask,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    as_ordinary(python, "-m", "cluster.sandbox", "up", "--nodes=2", *options)
    directory = home / f"slurm-sandbox-{ORDINARY}"
    users = as_ordinary("srun", "--quiet", "-N2", "id", "-u", SLURM_CONF=f"{directory}/slurm.conf")
    key_mode = (directory / "munge" / "munge.key").stat().st_mode & 0o777
    as_ordinary(python, "-m", "cluster.sandbox", "down")

    assert users.split() == [str(ORDINARY)] * 2
    assert key_mode == 0o600
    assert leftovers(directory) == []
    assert list(home.iterdir()) == []


def interpreter_for(uid: int) -> str:
    """A Python that this user may run; root's own often lies in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        try:
            if subprocess.run(probe, user=uid, group=uid, extra_groups=[], cwd="/", check=False).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip(f"user {uid} may run neither {sys.executable} nor a /usr/bin/python3 of 3.10 or later")
