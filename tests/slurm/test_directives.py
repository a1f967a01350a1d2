"""The model of sbatch's reading of a script, and what the program writes for it, beside the real one."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.plan import make_plan
from cluster.runs import RunFolder
from cluster.sandbox import Sandbox
from cluster.spec import JobSpec
from cluster.submit import script_text
from tests.sbatch_model import directives
from tests.slurm.test_jobs import job_field
from tests.training import environment

HELD = "#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\n"
VALUES = (
    "a\\b",
    "a\\",
    "a\\ b",
    "\\' --job-name=pwned",
    "it's",
    '"q"',
    "#no comment",
    "$(id) `id` %j ;",
    "--hold",
    "é\\\\'\"",
    "x\\#",
)


@pytest.fixture
def environ(slurm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment(tmp_path), **slurm_environ, "XDG_STATE_HOME": str(tmp_path)}


def ask(*words: str, environ: dict[str, str], text: str = "") -> tuple[str, str]:
    done = subprocess.run(words, env=environ, input=text, capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr


def test_every_text_of_a_spec_arrives_in_the_job_as_it_stands(tmp_path: Path, environ: dict[str, str]) -> None:
    arrived, modelled = {}, {}
    for value in VALUES:
        spec = JobSpec(name="tiny", time_limit="5", comment=value, sbatch={"hold": True}, run_root=tmp_path)
        run = RunFolder(tmp_path / "tiny" / "a")
        script = script_text(make_plan(spec, run, python=sys.executable), run)
        job_id, errors = ask("sbatch", "--parsable", environ=environ, text=script)
        assert errors == ""
        arrived[value] = ask("squeue", "-h", "-o", "%j|%k|%r", "-j", job_id, environ=environ)[0]
        ask("scancel", job_id, environ=environ)
        modelled[value] = directives(script)["comment"]
    assert arrived == {value: f"tiny|{value}|JobHeldUser" for value in VALUES}
    assert modelled == {value: value for value in VALUES}


@pytest.mark.parametrize(
    "line",
    [
        "--comment='a\\b'",
        "--comment=a\\ b",
        '--comment="a\'b" # --job-name=x',
        "--comment='a'\\''b'",
        "--comment=a#b",
        "--comment=",
    ],
)
def test_model_reads_a_directive_as_sbatch_does(environ: dict[str, str], sandbox: Sandbox, line: str) -> None:
    script = f"{HELD}#SBATCH {line}\ntrue\n#SBATCH --comment=late\n"
    job_id, errors = ask("sbatch", "--parsable", environ=environ, text=script)
    try:
        expected = directives(script, escapes_blanks=not sandbox.version.startswith("22.05"))["comment"]
    except ValueError:
        assert (job_id, bool(errors)) == ("", True)  # sbatch refuses it as well
        return
    assert ask("squeue", "-h", "-o", "%k", "-j", job_id, environ=environ)[0] == expected
    ask("scancel", job_id, environ=environ)


def test_directive_of_another_scheduler_counts_even_behind_a_command(environ: dict[str, str]) -> None:
    """The reason why a setup line may not be one."""
    script = f"{HELD}true\n#PBS -N late\ntrue\n"
    job_id, errors = ask("sbatch", "--parsable", environ=environ, text=script)
    assert (job_field(job_id, "JobName", environ), errors) == ("late", "")
    ask("scancel", job_id, environ=environ)
