"""Stand-ins for Slurm's commands: small executables in a folder of their own, for a test's PATH."""

import shlex
from pathlib import Path


def put_executable(folder: Path, name: str, script: str) -> None:
    """Put a shell script under a command's name.  It finds no other commands unless the test's PATH has them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def put_answer(folder: Path, name: str, output: str = "", errors: str = "", exit_code: int = 0) -> None:
    """Put a command that answers the same whatever it is asked."""
    script = f"printf %s {shlex.quote(output)}; printf %s {shlex.quote(errors)} >&2; exit {exit_code}"
    put_executable(folder, name, script)


def put_old_env(folder: Path) -> None:
    """Put an `env` as coreutils 8.30's is, RHEL 8's: it knows no --block-signal, and ends with 125."""
    refusal = """echo "/usr/bin/env: unrecognized option '--block-signal=USR2'" >&2; exit 125"""
    put_executable(folder, "env", f'case "$*" in *--block-signal*) {refusal};; esac\nexec /usr/bin/env "$@"')


def shown_job(folder: Path) -> str:
    """Shell lines for a scontrol: `show job N` is answered as of a job whose script lies in a run folder."""
    shown = f"JobId=$3 JobName=demo\\n   Restarts=0 StartTime=2026-01-02T03:04:05\\n   Command={folder}/job.sbatch\\n"
    return f'case "$1 $2" in "show job") printf "{shown}"; exit;; esac'
