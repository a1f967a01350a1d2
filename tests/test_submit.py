"""Submission, as far as it goes without a controller: the script, the refusals, and what is left behind."""

import json
import pickletools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.code import copy_project, file_sums, find_project
from cluster.plan import make_plan, read_plan
from cluster.provenance import read_sums
from cluster.runs import RELEASE, RunFolder
from cluster.spec import changed_keys, load_spec
from cluster.submission import SubmissionError, refusal, removal_of, undo_of
from tests.executables import put_answer, put_executable
from tests.sites import put_site

REPOSITORY = Path(__file__).parents[1]

SITE = "sandbox_99a50359"  # as the recorded scontrol says

SPEC = """\
name: my demo
nodes: 2
gpus_per_node: a100:2
time_limit: 30
comment: it's for the paper
setup: [module load cuda]
env: {NCCL_DEBUG: INFO}
sbatch: {hold: true}
dataset: {kind: synthetic}
"""

SCRIPT = """\
#!/bin/bash

# Parameters
#SBATCH --comment='it'"'"'s for the paper'
#SBATCH --gpus-per-node=a100:2
#SBATCH --hold
#SBATCH --job-name='my demo'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output='FOLDER/runs/my demo/RUN_ID/logs/batch_%j.log'
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=00:30:00

# setup
if [ -r 'FOLDER/runs/my demo/RUN_ID/code/cluster/node_check.sh' ]; then \
. 'FOLDER/runs/my demo/RUN_ID/code/cluster/node_check.sh' 'FOLDER/runs/my demo/RUN_ID' PYTHON; fi
set -e
export NCCL_DEBUG=INFO
GUARD
module load cuda
trap - DEBUG ERR EXIT
BEGIN
LOOK
for _ in {1..20}; do if [ -e 'FOLDER/runs/my demo/RUN_ID/submitit'/${SLURM_JOB_ID}_submitted.pkl ]; then break; fi; \
sleep 0.5; done
if [ ! -e 'FOLDER/runs/my demo/RUN_ID/submitit'/${SLURM_JOB_ID}_submitted.pkl ]; then \
begin_blocked PYTHON \
'FOLDER/runs/my demo/RUN_ID/code/cluster/start.py' cluster.supervise 'FOLDER/runs/my demo/RUN_ID'; fi

# command
export SUBMITIT_EXECUTOR=slurm
begin_blocked PYTHON -u -m submitit.core._submit 'FOLDER/runs/my demo/RUN_ID/submitit'
"""

LOCAL_SCRIPT = """\
#!/bin/bash
BEGIN
LOOK
begin_blocked PYTHON FOLDER/runs/demo/RUN_ID/code/cluster/start.py \
cluster.supervise FOLDER/runs/demo/RUN_ID --detach
"""

FAILED = "sbatch: error: Batch job submission failed: "  # and so on: standard error of sbatch 22.05.8
UNREACHED = "Slurm was not reached; nothing was submitted. To find out: scontrol ping"
REFUSED = "Slurm refused the job; nothing was submitted"


def asked_for(keys: str) -> str:
    return f"Slurm refused the job; it was asked for {keys}; nothing was submitted"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user stands: a spec, its data set staged, and a folder `bin` that is all of PATH."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    staged = load_spec(Path("spec.yaml"), cwd=tmp_path).dataset.staged_path
    staged.parent.mkdir(parents=True)
    staged.touch()
    put_site(tmp_path / "bin", is_calm=True)
    return tmp_path


def submit(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`python -m cluster.submit spec.yaml words` in the user's folder."""
    environ = {"PATH": str(folder / "bin"), "PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(
        [sys.executable, "-m", "cluster.submit", *(words or ("spec.yaml",))],
        cwd=folder,
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def without_run_id(text: str, folder: Path) -> str:
    """A script with stand-ins for what differs between machines and submissions."""
    text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN_ID", text)
    text = re.sub(r"setup_ended\(\) \{\n(.*\n)*trap 'setup_ended \$\?' EXIT\n", "GUARD\n", text)
    text = re.sub(r"begin_blocked\(\) \{\n(.*\n)*?\}\n", "BEGIN\n", text)
    text = re.sub(r"\[ -x .*\n\[ -r .*\n.* --check .*\n", "LOOK\n", text)
    return text.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON")


def only_run(folder: Path) -> RunFolder:
    (run,) = (folder / "runs").glob("*/*")
    return RunFolder(run)


def test_dry_run_prints_the_same_script_each_time_and_makes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    first, second = submit(folder, "spec.yaml", "--dry-run"), submit(folder, "spec.yaml", "--dry-run")
    assert (first.returncode, second.returncode) == (0, 0)
    assert without_run_id(first.stdout, folder) == without_run_id(second.stdout, folder) == SCRIPT
    assert sorted(folder.rglob("*")) == before


def test_dry_run_of_a_local_spec_prints_what_would_run_here(folder: Path) -> None:
    (folder / "spec.yaml").write_text("name: demo\ncluster: local\n")
    done = submit(folder, "spec.yaml", "--dry-run")
    assert without_run_id(done.stdout, folder) == LOCAL_SCRIPT
    assert not (folder / "runs").exists()


def test_dry_run_as_json_is_one_object_on_standard_output(folder: Path) -> None:
    done = submit(folder, "spec.yaml", "--dry-run", "time_limit=60", "--json")  # a value may stand between options
    told = json.loads(done.stdout)
    run_id, script = told["run_id"], without_run_id(told.pop("script"), folder)
    assert script == SCRIPT.replace("00:30:00", "01:00:00")
    head = {"run_dir": f"{folder}/runs/my demo/{run_id}", "run_id": run_id, "job_id": None, "cluster": "slurm"}
    assert {key: told[key] for key in head} == head
    assert sorted(told.keys() - head.keys()) == [
        "directives", "min_nodes", "ranks", "sizes", "slurm", "time_limit_s", "unanswered"
    ]  # fmt: skip


def test_wrong_spec_ends_with_2_and_a_line_for_each_problem(folder: Path) -> None:
    (folder / "spec.yaml").write_text(SPEC + "colour: red\nnode: 2\n")
    done = submit(folder, "spec.yaml", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["spec.yaml:10", "colour"],
        ["spec.yaml:11", "node"],
    ]


def test_run_root_that_cannot_be_written_ends_with_2(folder: Path) -> None:
    (folder / "runs").write_text("a file where the folder should be")
    done = submit(folder)
    assert (done.returncode, done.stdout) == (2, "")
    run_dir = done.stderr.removeprefix("run_root: ").partition(" cannot be written")[0]
    assert done.stderr == f"run_root: {run_dir} cannot be written: Not a directory; nothing was submitted\n"


@pytest.mark.parametrize(
    ("words", "exit_code", "advice"),
    [
        ("", 4, UNREACHED),
        (FAILED + "Invalid feature specification", 3, REFUSED),
    ],
    ids=["sbatch is not on PATH", "sbatch refuses"],
)
def test_submission_that_failed_leaves_no_run_folder(folder: Path, words: str, exit_code: int, advice: str) -> None:
    if words:
        put_answer(folder / "bin", "sbatch", errors=words, exit_code=1)
    done = submit(folder)
    assert (done.returncode, done.stdout) == (exit_code, "")
    expected = words or "[Errno 2] No such file or directory: 'sbatch'"
    assert done.stderr.splitlines()[-2:] == [expected, advice]
    assert list((folder / "runs" / "my demo").iterdir()) == []


def test_sbatch_that_prints_no_job_id_may_have_taken_the_job(folder: Path) -> None:
    put_answer(folder / "bin", "sbatch", "Welcome\n")
    done = submit(folder)
    assert (done.returncode, done.stdout) == (4, "")
    run = only_run(folder)
    assert done.stderr.splitlines() == [
        "no job id in what sbatch printed: 'Welcome'",
        f"Slurm may have taken the job all the same. To find out: "
        f"squeue -a --me -t all -o '%i %T %o' | grep {run.run_id}",
        f"To go on, without a second job if there is one: python -m cluster.submit --resume '{run.path}'",
    ]


def test_submitted_run_has_its_spec_plan_script_and_event(folder: Path) -> None:
    put_executable(folder / "bin", "sbatch", 'printf "%s\\n" "$@" "${RANK-none}" > "${0%/*}/asked"; echo "17;west"')
    done = submit(folder, "spec.yaml", "--json", RANK="3")
    run = only_run(folder)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["job_id"], told["run_dir"]) == (0, "", "17", str(run.path))
    assert told["script"] == run.script.read_text() == (run.submitit / "17_submission.sh").read_text()
    spec = load_spec(Path("spec.yaml"), cwd=folder)
    assert load_spec(run.spec, cwd=run.path) == spec
    assert read_plan(run) == make_plan(spec, run, python=sys.executable, maybe_code_root=run.code)
    events = [{**event, "time": ""} for event in run.read_events()]
    told = {"attempt": 0, "job_id": "17", "route": "slurm", "cluster": SITE, "format_version": 1, "release": RELEASE}
    announced = {"time": "", "event": "submitting", "attempt": 0, "job_id": "", "route": "slurm", "cluster": SITE}
    assert events == [announced, {"time": "", "event": "submitted", **told}]
    option, script, rank = (folder / "bin" / "asked").read_text().splitlines()
    assert (option, Path(script).parent, rank) == ("--parsable", run.submitit, "none")


def test_pickle_of_a_job_names_nothing_but_execv_and_submitits_own_frame(folder: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    assert submit(folder).returncode == 0
    pickled = (only_run(folder).submitit / "17_submitted.pkl").read_bytes()
    names: set[str] = set()
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "STACK_GLOBAL":
            names.add(".".join(texts[-2:]))
        elif operation.name in ("GLOBAL", "INST"):
            names.add(str(argument).replace(" ", "."))
        elif isinstance(argument, str):
            texts.append(argument)
    assert names == {"submitit.core.utils.DelayedSubmission", "posix.execv"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this repository's packages, to edit."""
    project = find_project(REPOSITORY, {"PATH": "/nonexistent"})
    copy_project(project, tmp_path / "project")
    return tmp_path / "project"


def test_submitted_run_has_a_snapshot_that_later_edits_do_not_reach(folder: Path, project: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    assert submit(folder, PYTHONPATH=str(project)).returncode == 0
    run = only_run(folder)
    with (project / "jobs" / "train.py").open("a") as file:
        file.write("raise SystemExit('edited')\n")
    told = json.loads(run.code_record.read_text())
    assert (told["mode"], told["folder"], told["source"]) == ("snapshot", str(run.code), str(project))
    assert read_sums(run) == file_sums(run.code)
    assert (run.code / "jobs/train.py").read_bytes() == (REPOSITORY / "jobs/train.py").read_bytes()
    plan = read_plan(run)
    starter = f"{run.code}/cluster/start.py"
    assert plan.supervisor == (sys.executable, starter, "cluster.supervise", str(run.path))
    assert plan.rank[:3] == (sys.executable, starter, "jobs.train")
    assert f"'{starter}' --check" in run.script.read_text()


def test_rerun_is_a_new_run_with_the_spec_and_the_code_of_the_other_one(folder: Path, project: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    assert submit(folder, "spec.yaml", "train.lr=0.25", PYTHONPATH=str(project)).returncode == 0
    first = only_run(folder)
    (folder / "spec.yaml").write_text("name: another\n")
    (project / "jobs" / "train.py").write_text("raise SystemExit('edited')\n")
    done = submit(folder, "--rerun", first.run_id, "train.epochs=7", "--json", PYTHONPATH=str(project))
    assert (done.returncode, done.stderr) == (0, "")
    again = RunFolder(Path(json.loads(done.stdout)["run_dir"]))
    old, new = (load_spec(run.spec, cwd=folder) for run in (first, again))
    assert (again.path.parent, changed_keys(old, new)) == (first.path.parent, ("train.epochs",))
    assert file_sums(again.code) == file_sums(first.code)
    assert json.loads(again.code_record.read_text())["rerun_of"] == str(first.path)
    assert read_plan(again).rank[1] == f"{again.code}/cluster/start.py"


def test_live_code_is_run_where_it_lies(folder: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    assert submit(folder, "spec.yaml", "code=live").returncode == 0
    run = only_run(folder)
    assert (run.code.exists(), json.loads(run.code_record.read_text())["mode"]) == (False, "live")
    assert read_plan(run).supervisor[1] == f"{REPOSITORY}/cluster/start.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["setup=[if then]"], "setup: bash cannot read these lines: line 1: syntax error near unexpected token `then'"),
        (["python=/bin/false"], "python: /bin/false does not run: "),
    ],
)
def test_environment_that_cannot_work_is_refused_and_nothing_is_made(folder: Path, words: list[str], said: str) -> None:
    done = submit(folder, "spec.yaml", *words, PATH=f"{folder}/bin:/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}; nothing was submitted\n")
    assert not (folder / "runs").exists()


def test_index_that_cannot_be_written_does_not_lose_the_job(folder: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    (folder / "state").write_text("a file where the folder should be")
    done = submit(folder)
    assert (done.returncode, done.stdout) == (0, f"submitted to job 17; run folder: {only_run(folder).path}\n")


@pytest.mark.parametrize(
    ("words", "exit_code", "advice"),
    [
        (FAILED + "Invalid partition name specified", 3, REFUSED),
        (FAILED + "Requested node configuration is not available", 3, asked_for("nodes: 1, tasks_per_node: 1")),
        (FAILED + "Invalid account or account/partition combination specified", 3, REFUSED),
        ("sbatch: error: Invalid --time specification", 3, asked_for("time_limit: 01:00:00")),
        (FAILED + "Unable to contact slurm controller (connect failure)", 4, UNREACHED),
        (FAILED + "Slurm backup controller in standby mode", 4, UNREACHED),
        (FAILED + "Controller is in standby mode, try a different controller", 4, UNREACHED),
        (FAILED + "Protocol authentication error", 4, UNREACHED),
        (FAILED + "Invalid authentication credential", 4, UNREACHED),
        (FAILED + "Unspecified error", 3, REFUSED),
        ("[Errno 2] No such file or directory: 'sbatch'", 4, UNREACHED),
        ("[Errno 13] Permission denied: 'sbatch'", 4, UNREACHED),
    ],
)
def test_refusal_removes_a_new_run_folder_and_keeps_an_old_one(
    tmp_path: Path, words: str, exit_code: int, advice: str
) -> None:
    assert told_of(tmp_path, words, is_new=False) == (f"{words}\n{advice}", exit_code, True)
    assert told_of(tmp_path, words, is_new=True) == (f"{words}\n{advice}", exit_code, False)


@pytest.mark.parametrize(
    "words",
    [
        FAILED + "Socket timed out on send/recv operation",
        FAILED + "Unexpected message received",
        FAILED + "Zero Bytes were transmitted or received",
        FAILED + "Message receive failure",
    ],
)
def test_run_folder_of_a_job_that_may_have_been_taken_is_kept(tmp_path: Path, words: str) -> None:
    advice = (
        "Slurm may have taken the job all the same. To find out: squeue -a --me -t all -o '%i %T %o' | grep a\n"
        f"To go on, without a second job if there is one: python -m cluster.submit --resume {tmp_path}/demo/a"
    )
    assert told_of(tmp_path, words, is_new=True) == (f"{words}\n{advice}", 4, True)


def told_of(folder: Path, words: str, *, is_new: bool) -> tuple[str, int, bool]:
    """Message and exit code after sbatch's words, and whether the run folder is still there."""
    run = RunFolder(folder / "demo" / "a")
    shutil.rmtree(run.path, ignore_errors=True)
    run.make()
    (folder / "plain.yaml").write_text("name: demo\ntime_limit: 60\n")
    flags = make_plan(load_spec(Path("plain.yaml"), cwd=folder), run, python=sys.executable).sbatch
    error = refusal(f"{words}\n", run, removal_of(run) if is_new else undo_of(run), flags)
    assert isinstance(error, SubmissionError)
    return str(error), error.exit_code, run.path.exists()


def test_refused_resumption_gives_the_run_its_files_back(folder: Path) -> None:
    put_answer(folder / "bin", "sbatch", "17\n")
    put_answer(folder / "bin", "squeue", "")
    assert submit(folder).returncode == 0
    run = only_run(folder)
    run.stop_mark.write_text("{}")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.parent != run.submitit}
    put_answer(folder / "bin", "sbatch", errors=FAILED + "Invalid partition name specified", exit_code=1)
    done = submit(folder, "--resume", str(run.path), "train.epochs=90", "partition=gpu")
    asked = "Slurm refused the job; it was asked for partition: gpu; nothing was submitted"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, asked)
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.parent != run.submitit}
    added = after.pop(run.events).removeprefix(before.pop(run.events)).decode()
    assert [json.loads(line)["event"] for line in added.splitlines()] == [
        "extended",
        "submitting",
        "submission_refused",
    ]
    assert after == before


def test_submission_loads_nothing_that_only_other_requests_need() -> None:
    others = ("follow", "dry_run", "resume", "successor", "run_state", "schema")
    probe = f"import sys, cluster.submit; print([n for n in {others} if f'cluster.{{n}}' in sys.modules])"
    words = [sys.executable, "-c", probe]
    assert subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout == "[]\n"
