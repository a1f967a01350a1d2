"""Slurm's commands: answers recorded from Slurm 22.05.8, given by small executables on a PATH of their own."""

from pathlib import Path

import pytest

from cluster.slurm import (
    JobState,
    JobTerms,
    SlurmError,
    has_ended,
    is_final,
    job_states,
    job_terms,
    kill_wait_s,
    literal_path,
    maybe_error_path,
    maybe_job_state,
    maybe_recorded_state,
    maybe_submitted_id,
    maybe_time_limit_s,
    node_addresses,
    run,
    submit,
    would_start,
)
from tests.executables import put_answer, put_executable

SHOW_CONFIG = """\
KillOnBadExit           = 0
KillWait                = 5 sec
LaunchParameters        = (null)
UnkillableStepTimeout   = 60 sec
"""

SHOW_NODES = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 CPUEfctv=16 Gres=gpu:2 NodeAddr=10.77.0.1 NodeHostName=host1"
    " Port=12067 Version=22.05.8 State=IDLE Partitions=low,high  BootTime=2026-11-30T03:03:51 \n"
    "NodeName=n2 Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 CPUEfctv=16 Gres=gpu:2 NodeAddr=host2-ib NodeHostName=host2"
    " Port=12068 Version=22.05.8 State=IDLE Partitions=low,high  BootTime=2026-11-30T03:03:50 \n"
)


def refused(argv: list[str], environ: dict[str, str], timeout_s: float = 30.0) -> str:
    """What run() says of a command that gives no answer."""
    with pytest.raises(SlurmError) as caught:
        run(argv, environ, timeout_s=timeout_s)
    return str(caught.value)


def test_command_gets_the_given_environment_and_nothing_that_filters_what_it_shows(tmp_path: Path) -> None:
    put_executable(tmp_path, "squeue", "export -p | while read -r line; do echo ${line#export }; done")
    environ = {"PATH": str(tmp_path), "SLURM_CONF": "/etc/slurm.conf", "SQUEUE_PARTITION": "gpu", "SQUEUE_USERS": "me"}
    given = {line.split("=")[0] for line in run(["squeue"], environ).splitlines()}
    assert {"PATH", "SLURM_CONF"} <= given
    assert given.isdisjoint(environ.keys() - {"PATH", "SLURM_CONF"})


def test_answer_in_another_encoding_is_still_an_answer(tmp_path: Path) -> None:
    put_executable(tmp_path, "squeue", r"printf 'RUNNING|gr\366\337er|n1'")
    assert run(["squeue"], {"PATH": str(tmp_path)}) == "RUNNING|gr\ufffd\ufffder|n1"


def test_command_that_is_not_installed_is_named(tmp_path: Path) -> None:
    expected = "squeue is not on PATH: is this a machine of the cluster?"
    assert refused(["squeue", "-h"], {"PATH": str(tmp_path)}) == expected


def test_command_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    put_answer(tmp_path, "squeue")
    (tmp_path / "squeue").write_text("#!/nonexistent/shell\n")
    (tmp_path / "squeue").chmod(0o644)
    assert refused(["squeue"], {"PATH": str(tmp_path)}) == "squeue cannot be started: Permission denied"


@pytest.mark.parametrize(
    ("output", "errors", "said"),
    [
        ("half an answer", "slurm_load_jobs error: Socket timed out\n", "slurm_load_jobs error: Socket timed out"),
        ("Node n9 not found\n", "", "Node n9 not found"),
    ],
    ids=["on standard error", "on standard output only"],
)
def test_failure_keeps_the_commands_own_words(tmp_path: Path, output: str, errors: str, said: str) -> None:
    put_answer(tmp_path, "squeue", output, errors, exit_code=1)
    assert refused(["squeue", "-j", "7"], {"PATH": str(tmp_path)}) == f"squeue -j 7: exit code 1: {said}"


def test_command_without_an_answer_is_given_up(tmp_path: Path) -> None:
    put_executable(tmp_path, "squeue", "exec /bin/sleep 600")
    environ = {"PATH": str(tmp_path)}
    assert refused(["squeue", "-h"], environ, timeout_s=0.2) == "squeue -h: no answer within 0.2 s"


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("7|7|FAILED|NonZeroExitCode|n[1-2]|0:00\n", JobState("FAILED", "NonZeroExitCode", "n[1-2]", 0)),
        ("7|7|PENDING|Priority||UNLIMITED\n", JobState("PENDING", "Priority", "")),
        ("CLUSTER: west\n7|7|RUNNING|None|n1|1-02:00:03\n", JobState("RUNNING", "None", "n1", 93_603)),
        ("", None),
    ],
    ids=["ended", "pending", "under a cluster's heading", "no line"],
)
def test_job_state_is_what_squeue_says(tmp_path: Path, answer: str, state: JobState | None) -> None:
    put_answer(tmp_path, "squeue", answer)
    assert maybe_job_state("7", {"PATH": str(tmp_path)}) == state


def test_forgotten_job_has_no_state_but_no_answer_is_an_error(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    put_answer(tmp_path, "squeue", errors="slurm_load_jobs error: Invalid job id specified\n", exit_code=1)
    assert maybe_job_state("7", environ) is None
    refusal = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    put_answer(tmp_path, "squeue", errors=refusal, exit_code=1)
    with pytest.raises(SlurmError) as caught:
        maybe_job_state("7", environ)
    assert str(caught.value) == f"squeue -h -t all -j 7 -o %i|%A|%T|%r|%N|%L: exit code 1: {refusal}"


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("PENDING", False), ("RUNNING", False), ("COMPLETING", False), ("REQUEUED", False), ("SUSPENDED", False),
        ("COMPLETED", True), ("FAILED", True), ("CANCELLED", True), ("TIMEOUT", True), ("NODE_FAIL", True),
        ("PREEMPTED", True), ("OUT_OF_MEMORY", True),
    ],
)  # fmt: skip
def test_job_has_ended_when_it_will_not_run_again(state: str, ended: bool) -> None:
    assert has_ended(JobState(state, "None", "")) is ended


def test_job_that_slurm_does_not_know_has_ended() -> None:
    assert has_ended(None)


def test_kill_wait_is_slurm_confs(tmp_path: Path) -> None:
    put_answer(tmp_path, "scontrol", SHOW_CONFIG)
    assert kill_wait_s({"PATH": str(tmp_path)}) == 5.0


def test_configuration_without_kill_wait_is_an_error(tmp_path: Path) -> None:
    put_answer(tmp_path, "scontrol", "KillOnBadExit = 0\n")
    with pytest.raises(SlurmError, match=r"^scontrol show config names no KillWait$"):
        kill_wait_s({"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("1-02:04:00\n", 93_840),
        ("8:00:00\n", 28_800),
        ("10:00\n", 600),
        ("0:30", 30),
        ("365-00:00:00\n", 31_536_000),
        ("UNLIMITED\n", None),
        ("Partition_Limit\n", None),
        ("INVALID\n", None),
        ("", None),
    ],
)
def test_time_limit_is_read_in_squeues_forms(tmp_path: Path, answer: str, seconds: int | None) -> None:
    put_answer(tmp_path, "squeue", answer)
    assert maybe_time_limit_s("7", {"PATH": str(tmp_path)}) == seconds


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        ("   StdErr=/runs/my demo/batch_7.log\n   StdIn=/dev/null\n", Path("/runs/my demo/batch_7.log")),
        ("   StdErr=/runs/a.err\n   StdIn=/dev/null\n   StdOut=/runs/a.out\n", Path("/runs/a.err")),
        ("   StdErr=\n   StdIn=/dev/null\n   StdOut=/runs/a.out\n", Path("/runs/a.out")),  # 26.05
        ("   Power=\n", None),  # of salloc
    ],
    ids=["batch job", "two files", "one file", "no batch script"],
)
def test_place_of_the_jobs_error_output_is_what_scontrol_shows(tmp_path: Path, answer: str, path: Path | None) -> None:
    put_answer(tmp_path, "scontrol", f"JobId=7 JobName=demo\n   UserId=me(1000)\n{answer}")
    assert maybe_error_path("7", {"PATH": str(tmp_path)}) == path


def test_node_addresses_are_addresses_or_names(tmp_path: Path) -> None:
    put_answer(tmp_path, "scontrol", SHOW_NODES)
    assert node_addresses(["n1", "n2"], {"PATH": str(tmp_path)}) == {"n1": "10.77.0.1", "n2": "host2-ib"}


def test_node_without_an_address_is_named(tmp_path: Path) -> None:
    put_answer(tmp_path, "scontrol", SHOW_NODES)
    with pytest.raises(SlurmError, match=r"^scontrol show node gives no NodeAddr for n3, n4$"):
        node_addresses(["n4", "n1", "n3"], {"PATH": str(tmp_path)})


def test_percent_in_a_path_is_kept_from_slurms_patterns() -> None:
    assert literal_path(Path("/runs/100%/%j")) == "/runs/100%%/%%j"


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [
        ("15786755", "15786755"),
        ("75168975;clustername\n", "75168975"),
        ("Project 4711 has 99 node hours left\n2026\n17\n", "17"),
        ("  17;west  \nThank you\n", "17"),
    ],
    ids=["bare", "with a cluster's name", "after a banner with numbers", "before a banner"],
)
def test_job_id_is_the_last_line_that_is_one(answer: str, job_id: str) -> None:
    assert maybe_submitted_id(answer) == job_id


@pytest.mark.parametrize("answer", ["", "Submitted batch job 17", "no 17 partition"])
def test_answer_without_a_job_id_is_an_error_that_shows_it(tmp_path: Path, answer: str) -> None:
    assert maybe_submitted_id(answer) is None
    put_answer(tmp_path, "sbatch", answer)
    with pytest.raises(SlurmError) as caught:
        submit(["job.sh"], {"PATH": str(tmp_path)})
    assert str(caught.value) == f"no job id in what sbatch printed: {answer!r}"


def test_submission_gives_sbatch_its_words_in_order(tmp_path: Path) -> None:
    put_executable(tmp_path, "sbatch", f'echo "$*" > {tmp_path}/asked; echo 18')
    assert submit(["--nodes=2", "job.sh", "--after", "17"], {"PATH": str(tmp_path)}) == "18"
    assert (tmp_path / "asked").read_text() == "--parsable --nodes=2 job.sh --after 17\n"


def test_member_of_an_array_is_found_among_all_that_squeue_lists(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    members = "22_1|23|CANCELLED|None||0:00\n22_4|25|PENDING|Resources||9:00\n22_3|22|RUNNING|None|n2|9:00\n"
    put_answer(tmp_path, "squeue", members)
    running = JobState("RUNNING", "None", "n2", 540)
    assert maybe_job_state("22_3", environ) == maybe_job_state("22", environ) == running
    assert maybe_job_state("22_5", environ) is None


def test_job_of_a_federation_lives_on_where_it_is_not_revoked(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    lines = ["17|17|REVOKED|None||0:00\n", "17|17|RUNNING|None|n1|9:00\n"]
    for answer in (lines, lines[::-1]):
        put_answer(tmp_path, "squeue", "".join(answer))
        assert maybe_job_state("17", environ) == JobState("RUNNING", "None", "n1", 540)
    put_answer(tmp_path, "squeue", lines[0])
    assert not has_ended(maybe_job_state("17", environ))


def test_what_a_users_profile_says_reaches_no_command_and_all_partitions_are_asked_for(tmp_path: Path) -> None:
    show = 'echo "$SQUEUE_ALL $SQUEUE_ARRAY $SQUEUE_USERS $SINFO_ALL $SCONTROL_ALL $SCANCEL_BATCH $SLURM_TIME_FORMAT"'
    profile = {"SQUEUE_USERS": "you", "SCANCEL_BATCH": "1", "SINFO_ALL": "0", "SLURM_TIME_FORMAT": "relative"}
    said = {}
    for name in ("squeue", "sinfo", "scontrol", "scancel", "sbatch"):
        put_executable(tmp_path, name, show)
        said[name] = run([name], {"PATH": str(tmp_path), **profile}).split()
    assert said == {
        "squeue": ["1", "1", "standard"],
        "sinfo": ["1", "standard"],
        "scontrol": ["1", "standard"],
        "scancel": ["relative"],
        "sbatch": ["relative"],
    }


def test_states_of_several_jobs_are_one_question_and_forgotten_jobs_are_left_out(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert job_states([], environ) == {}
    put_answer(tmp_path, "squeue", "17|17|FAILED|NonZeroExitCode|n[1-2]|0:00\n18|18|PENDING|Dependency||UNLIMITED\n")
    assert job_states(["16", "17", "18"], environ) == {
        "17": JobState("FAILED", "NonZeroExitCode", "n[1-2]", 0),
        "18": JobState("PENDING", "Dependency", ""),
    }
    put_answer(tmp_path, "squeue", errors="slurm_load_jobs error: Invalid job id specified\n", exit_code=1)
    assert job_states(["17"], environ) == {}


@pytest.mark.parametrize(
    ("shown", "terms"),
    [
        ("   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n", JobTerms(True, True)),
        ("   Requeue=0 Restarts=0 BatchFlag=2 Reboot=0 ExitCode=0:0\n", JobTerms(False, True)),
        (
            "   Requeue=0 Restarts=0 BatchFlag=1\n   ReqNodeList=(null) ExcNodeList=n[1,3]\n",
            JobTerms(False, True, "n[1,3]"),
        ),
        ("   Requeue=0 Restarts=0 BatchFlag=1\n   ReqNodeList=(null) ExcNodeList=(null)\n", JobTerms(False, True)),
        ("   Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0\n", JobTerms(True, False)),
    ],
    ids=["requeued by Slurm", "not requeued", "nodes excluded", "no nodes excluded", "salloc"],
)
def test_terms_of_a_job_are_what_scontrol_shows(tmp_path: Path, shown: str, terms: JobTerms) -> None:
    put_answer(tmp_path, "scontrol", f"JobId=7 JobName=demo\n{shown}")
    assert job_terms("7", {"PATH": str(tmp_path)}) == terms


def test_job_for_which_there_are_no_nodes_would_not_start(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    put_answer(
        tmp_path, "sbatch", errors="sbatch: Job 29 to start at 2026-11-30T06:51:52 using 3 processors on n[2-4]\n"
    )
    assert would_start(["job.sh"], environ)
    refusal = "allocation failure: Requested node configuration is not available\n"
    put_answer(tmp_path, "sbatch", errors=refusal, exit_code=1)
    assert not would_start(["job.sh"], environ)
    put_answer(tmp_path, "sbatch", errors="sbatch: error: Access/permission denied\n", exit_code=1)
    with pytest.raises(SlurmError):
        would_start(["job.sh"], environ)


def test_recorded_state_is_accountings_first_word(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    put_answer(tmp_path, "sacct", "CANCELLED by 1000\n")
    assert maybe_recorded_state("7", environ) == "CANCELLED"
    put_answer(tmp_path, "sacct", "")
    assert maybe_recorded_state("7", environ) is None


@pytest.mark.parametrize(
    ("words", "final"),
    [
        ("slurm_update error: Unable to contact slurm controller (connect failure)", False),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", False),
        ("squeue -h: no answer within 30 s", False),
        ("slurm_load_jobs error: Slurm backup controller in standby mode", False),
        ("slurm_load_jobs error: Controller is in standby mode, try a different controller", False),
        ("slurm_load_jobs error: Connection refused", False),
        ("slurm_load_jobs error: Protocol authentication error", False),
        ("slurm_load_jobs error: Invalid authentication credential", False),
        ("slurm_load_jobs error: Message connection failed", False),
        ("slurm_update error: Job can not be altered now, try again later", False),
        ("sbatch: error: Batch job submission failed: Unable to create job record, try again", False),
        ("srun: error: Unable to create step for job 5: PrologSlurmctld is still running", False),
        ("words of a release to come", False),
        ("squeue is not on PATH: is this a machine of the cluster?", True),
        ("squeue: exit code 1: slurm_load_jobs error: Invalid job id specified", True),
        ("Requested operation is presently disabled for job 24", True),
        ("slurm_update error: Access/permission denied", True),
        ("slurm_requeue error: Job/step already completing or completed", True),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            True,
        ),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)",
            True,
        ),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", True),
    ],
)
def test_refusal_for_good_is_told_from_what_may_pass(words: str, final: bool) -> None:
    assert is_final(SlurmError(words)) is final
