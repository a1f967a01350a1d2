"""Alarm: what ends a rank whose interpreter is held by C code, so that none of its Python threads runs.

The watching thread winds it up each second.  When that stops, C code of faulthandler writes the stacks to standard
error, and later the kernel ends the process.  A process that was suspended and goes on finds both overdue at once: it
loses nothing by the dump, and of the signals that came meanwhile the kernel delivers only one, which ends nothing.
Sources: setitimer(2), sysv_signal(3), signal(7); CPython, Modules/faulthandler.c.
"""

import ctypes
import faulthandler
import signal

DUMP_MARGIN_S = 1.0  # the other ranks' watch comes first
END_MARGIN_S = 10.0
SECOND_SIGNAL_S = 5.0  # a process that goes on has this long to wind up again


def wind(limit_s: float) -> None:
    """Put the alarm off to some seconds after limit_s from now."""
    faulthandler.dump_traceback_later(limit_s + DUMP_MARGIN_S, file=2)
    library = ctypes.CDLL(None)
    if hasattr(library, "sysv_signal"):  # glibc; elsewhere the other ranks, or the supervisor, have to end this one
        signal.setitimer(signal.ITIMER_REAL, 0)
        handle_once(library)
        signal.setitimer(signal.ITIMER_REAL, limit_s + END_MARGIN_S, SECOND_SIGNAL_S)


def handle_once(library: ctypes.CDLL) -> None:
    """Let the next SIGALRM do nothing, and the one after it end the process.

    Handlers of Python's would need the interpreter; this one is libc's abs(), which does no harm to a signal number.
    """
    set_handler = library.sysv_signal  # with SA_RESETHAND
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGALRM, ctypes.cast(library.abs, ctypes.c_void_p))


def unwind() -> None:
    """Take the alarm away."""
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
