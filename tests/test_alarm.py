"""The alarm: it ends a process whose interpreter is held, and none that goes on after a suspension."""

import os
import signal
import subprocess
import sys

import pytest

from tests.training import REPOSITORY

SHORTER = "from jobs import alarm; alarm.DUMP_MARGIN_S, alarm.END_MARGIN_S, alarm.SECOND_SIGNAL_S = 0.2, 0.6, {second}"
HOLD = """
import ctypes
library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
def hold():
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
alarm.wind(0.2)
hold()
"""
GO_ON = """
import select, sys, time
sys.stdout.write("wound up\\n")
sys.stdout.flush()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    alarm.wind(0.2)
alarm.unwind()
time.sleep(1.0)
"""


def test_process_whose_interpreter_is_held_leaves_its_stacks_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORTER.format(second=0.3) + HOLD],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGALRM
    assert done.stderr.splitlines()[0] == "Timeout (0:00:00.400000)!"
    assert 'File "<string>", line 6 in hold' in done.stderr


def test_process_that_was_suspended_for_longer_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SHORTER.format(second=30) + GO_ON],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "wound up\n"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)  # both alarms are overdue by now
    os.kill(process.pid, signal.SIGCONT)
    process.communicate("enough\n")
    assert process.returncode == 0
