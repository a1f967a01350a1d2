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
