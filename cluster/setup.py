"""Setup: a spec's env and setup lines -> [setup] -> shell lines before the supervisor; and the event of one that fails.

    python -m cluster.setup RUN_DIR NUMBER EXIT_CODE LINE     called by those shell lines

The lines are run by one bash, so that a construct may go over several of them; a trap knows the line that bash is at.
Source: bash(1), "trap", LINENO, BASH_EXECUTION_STRING; bash 4.4 and newer.  Standard library only.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.identity import own_job_id
from cluster.runs import EXIT_FINISHED, EXIT_USAGE, RunFolder, UsageError

NO_MODULE = (
    "; a batch shell has no module of its own: put a line before it that reads your site's, such as "
    "source /etc/profile.d/modules.sh"
)


class SetupError(UsageError):
    """Setup lines that bash cannot read."""


def preamble(env: Mapping[str, str], setup: Sequence[str], recorder: Sequence[str]) -> tuple[str, ...]:
    """Shell lines that run before the supervisor; a failing one ends the job with code 2.

    recorder: the command that leaves an event, without the number of the line, its exit code and its text.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if not setup:
        return ("set -e", *exports) if exports else ()
    return ("set -e", *exports, *guard(len(setup), recorder), *setup, "trap - DEBUG ERR EXIT")


def ended_by(words: str) -> str:
    """A shell command that says something and ends the job, or gives it to another node: see node_check.sh.

    words: quoted for the shell.
    """
    elsewhere = f"! declare -F unfit > /dev/null || unfit {words} || :"  # `|| :`, or `set -e` would end the shell in it
    return f"{{ echo {words} >&2; {elsewhere}; exit {EXIT_USAGE}; }}"


def guard(num_lines: int, recorder: Sequence[str]) -> tuple[str, ...]:
    """Shell lines after which the next ones are setup's: whatever ends the shell there is named, `exit 0` as well.

    DEBUG tells of each command of this shell, ERR of those that are none, such as a failing subshell; neither is
    inherited by functions and sourced files, so the line is setup's own.
    """
    return (
        "setup_ended() {",
        "  trap - DEBUG ERR EXIT",
        '  mapfile -t setup_text <<< "${BASH_EXECUTION_STRING-$(<"$0")}"',
        "  local code=$1 number=$((setup_line - setup_begin)) text=${setup_text[setup_line - 1]} hint=",
        f"  [[ $code != 127 || $text != *module* ]] || hint={shlex.quote(NO_MODULE)}",
        f'  {shlex.join(recorder)} "$number" "$code" "$text" 2> /dev/null || :',
        "  " + ended_by(f'"setup: line $number of {num_lines} ($text) ended with exit code $code$hint"'),
        "}",
        "setup_begin=$((LINENO + 2)) setup_line=$((LINENO + 2))",
        "trap '((LINENO > setup_begin)) && setup_line=$LINENO' DEBUG ERR",
        "trap 'setup_ended $?' EXIT",
    )


def check_setup(setup: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have bash read the lines without running them; where there is no bash nothing is checked.

    Raises SetupError: they are no shell script.
    """
    if not setup:
        return
    script = "\n".join([*setup, ""])
    try:
        done = subprocess.run(
            ["bash", "-n"], input=script, env=dict(environ), capture_output=True, text=True, check=False
        )
    except OSError:
        return
    if done.returncode:
        said = re.sub(r"^\S*bash: line (\d+): ", r"line \1: ", next(iter(done.stderr.splitlines()), ""))
        raise SetupError(f"setup: bash cannot read these lines: {said}; nothing was submitted")


def main(argv: Sequence[str] | None = None) -> int:
    """Add the event of a line that failed."""
    parser = argparse.ArgumentParser(prog="python -m cluster.setup", description="Note that a line of setup failed.")
    parser.add_argument("run", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("exit_code", type=int)
    parser.add_argument("line")
    args = parser.parse_args(argv)
    run = RunFolder(args.run)
    job_id = own_job_id(os.environ) if "SLURM_JOB_ID" in os.environ else os.environ.get("SUBMITIT_LOCAL_JOB_ID", "")
    told = {"line": args.line, "number": args.number, "exit_code": args.exit_code}
    run.append_event("setup_failed", attempt=run.latest_attempt(), job_id=job_id, **told)
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
