"""Starter: a run's plan -> [start] -> cluster.supervise or jobs.train, out of the folder that holds this file.

    PYTHON FOLDER/cluster/start.py MODULE [argument ...]         python -m MODULE, whatever the current folder is
    PYTHON FOLDER/cluster/start.py --check RUN_DIR [PACKAGE ...]  only whether this interpreter will do
    PYTHON FOLDER/cluster/start.py --block COMMAND [argument ...] any command, begun with the stop signals blocked
    PYTHON -m cluster.start MODULE [argument ...]                 as the first, where the packages are found anyway

`python -m` looks into the current folder first, where the code may have been edited since.  Before anything else is
loaded this looks at the interpreter: a node may have another one than the machine of the submission.  Standard library
only, and written for Python 3.6 and newer, so that an old one can say what is wrong with it.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).absolute().parent.parent
OLDEST = (3, 10)
NEEDED = {"jobs.train": ("torch", "pydantic", "yaml")}
VERSION_VARIABLE = "CLUSTER_PYTHON"  # the submission's, such as 3.11.7; not set in containers
EXIT_USAGE = 2


def main() -> int:
    """Check the interpreter, then become the module."""
    words = sys.argv[1:]
    if words[:1] == ["--check"]:
        return complain(maybe_problem(recorded_version(Path(words[1])), tuple(words[2:])), words, os.environ)
    block_stop_signals()
    if words[:1] == ["--block"]:
        os.execvp(words[1], words[1:])
    problem = maybe_problem(os.environ.get(VERSION_VARIABLE, ""), NEEDED.get(words[0], ()))
    if problem:
        return complain(problem, words, os.environ)
    elsewhere = ("", str(FOLDER), str(FOLDER / "cluster"))
    sys.path[:] = [str(FOLDER), *(place for place in sys.path if place not in elsewhere)]
    import runpy  # only now: the folder of this file has modules with names of the standard library

    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


def block_stop_signals() -> None:
    """Let USR2 and TERM wait until there are handlers; see early_signals.py for who may have done so before.

    A shell that ignored them until now had no other way; what is ignored would be so for every process that comes.
    """
    signals = (signal.SIGUSR2, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)


def maybe_problem(expected: str, needed: "tuple[str, ...]") -> str:
    """What is wrong with this interpreter, in one line; empty when nothing is.

    expected: the version at submission, such as 3.11.7; empty when it is not known.  needed: packages by the names by
    which they are imported.
    """
    own = ".".join(map(str, sys.version_info[:3]))
    this = f"python: {sys.executable} on {socket.gethostname()} is Python {own}"
    advice = "install the same one on all nodes, or name another with the key python"
    if sys.version_info[:2] < OLDEST:
        return f"{this}, and at least {OLDEST[0]}.{OLDEST[1]} is needed; {advice}"
    if expected and expected.split(".")[:2] != own.split(".")[:2]:
        return f"{this}, and the run was submitted with Python {expected}; {advice}"
    from importlib.util import find_spec

    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        return f"{this} and has no {', '.join(missing)}; install it there, or name another with the key python"
    return ""


def recorded_version(run_dir: Path) -> str:
    """The Python of a run's submission; empty when it is not known."""
    import json

    try:
        return str(json.loads((run_dir / "code.json").read_text(encoding="utf-8"))["python"]["version"] or "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def complain(problem: str, words: "list[str]", environ: "os._Environ[str]") -> int:
    """Say what is wrong, if anything is, and return the exit code; a rank leaves the record that explains its end."""
    if not problem:
        return 0
    sys.stderr.write(problem + "\n")
    attempt = environ.get("CLUSTER_ATTEMPT", "0")
    rank = environ.get("RANK") or environ.get("SLURM_PROCID", "")
    if "--run-dir" in words and attempt.isdigit() and int(attempt) and rank.isdigit():
        record(problem, Path(words[words.index("--run-dir") + 1]), int(attempt), int(rank))
    return EXIT_USAGE


def record(problem: str, run_dir: Path, attempt: int, rank: int) -> None:
    """Leave what jobs.failure.record would leave."""
    import json

    now = time.time()
    content = {
        "format_version": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "attempt": attempt,
        "rank": rank,
        "host": socket.gethostname(),
        "step": 0,
        "kind": "usage",
        "exit_code": EXIT_USAGE,
        "exception": problem,
        "traceback": "",
    }
    try:
        with (run_dir / "failures" / f"a{attempt:04d}_r{rank:05d}.json").open("x", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError as error:
        sys.stderr.write(f"no record of this could be written: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
