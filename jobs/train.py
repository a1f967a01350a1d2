"""Training program: one rank.  Every route runs it: supervisor, srun, torchrun, one process.

    python -m jobs.train SPEC [section.key=value ...] [--run-dir DIR]

Exit codes: 0 finished, 1 failed, 2 spec or environment wrong, 75 stopped and saved, 76 ended by the watchdog.
"""

import argparse
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.rank import ATTEMPT_VARIABLE, SPEC_VARIABLE, RankEnv, read_rank
from cluster.runs import EXIT_FINISHED, EXIT_STOPPED, make_logger
from cluster.signals import StopFlag
from cluster.spec import JobSpec, check_packages, faults_allowed, load_spec
from jobs import alarm
from jobs.failure import Whereabouts, leave
from jobs.libraries import library_variables
from jobs.phases import Phases, process_began_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank to its end and return its exit code; a failure leaves by os._exit."""
    gc.disable()  # until the first step: looking through what torch's modules hold takes a fifth of importing them
    phases = Phases(process_began_s())
    stop = StopFlag()
    stop.install()  # before torch comes in: its threads would take the signals
    args = parse_arguments(argv)
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    where = Whereabouts(attempt=attempt, maybe_run_dir=args.run_dir, environ=os.environ)
    make_logger("r?????", os.environ)
    phases.end("python")
    try:
        env = read_rank(os.environ, args.local_rank)
        where.rank = env.rank
        make_logger(f"r{env.rank:05d}", os.environ, level=logging.INFO if env.rank == 0 else logging.WARNING)
        logging.getLogger("run").info(
            "begun on %s", socket.gethostname()
        )  # the supervisor waits for a rank's first line
        spec = load_spec(
            args.spec,
            args.overrides,
            cwd=Path.cwd(),
            allow_faults=faults_allowed(os.environ),
            maybe_text=os.environ.get(SPEC_VARIABLE) if args.run_dir else None,
        )
        check_packages(spec)
        os.environ.update(library_variables(spec, os.environ))
        phases.end("spec")
        return attend(spec, env, stop, where, phases)
    except Exception as error:
        leave(error, where)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; --local_rank and --local-rank are what old launch scripts pass."""
    parser = argparse.ArgumentParser(prog="python -m jobs.train", description="Train as one rank.")
    parser.add_argument("spec", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--run-dir", type=lambda text: Path(text).absolute(), help="go on with the run in this folder")
    parser.add_argument("--local-rank", "--local_rank", type=int)
    return parser.parse_args(argv)


def attend(spec: JobSpec, env: RankEnv, stop: StopFlag, where: Whereabouts, phases: Phases) -> int:
    """Join the ranks, train, and leave together with them."""
    alarm.wind(spec.train.start_timeout_s)  # until the ranks have met: importing and reading may hang, too
    from jobs.finish import finish
    from jobs.session import build, is_finished, join, leave_together, network_variables

    phases.end("torch")
    os.environ.update(network_variables(env, os.environ))
    session = join(spec, env, stop, where, os.environ, phases)
    where.maybe_run_dir, where.attempt = session.run.path, session.attempt
    if env.rank == 0:  # who writes; a new folder may take a while to be seen on other nodes
        session.run.take_umask()
    if is_finished(session):
        logging.getLogger("run").info("%s is finished; nothing to do", session.run.path)
        return EXIT_FINISHED
    where.maybe_loop = loop = build(session, os.environ)
    gc.freeze()  # what is there now stays, and later searches for garbage pass it over
    gc.enable()
    all_done = loop.run()
    if all_done and env.rank == 0:
        loop.watch.at("finishing", loop.state.step)
        finish(loop)
    leave_together(loop)
    return EXIT_FINISHED if all_done else EXIT_STOPPED


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # interpreter and libraries have nothing left to do, and some hang while they do it
