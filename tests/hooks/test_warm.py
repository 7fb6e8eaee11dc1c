# SPDX-License-Identifier: Apache-2.0
"""Starts of the warm Python: without these properties, a test of a resume would prove nothing."""

from __future__ import annotations

import os
import signal
import subprocess

from testkit.waiting import until


def test_each_start_has_other_random_numbers(warm_python: str) -> None:
    """Otherwise a trainer that restores no generator would resume to the bit."""
    code = "import random, torch, numpy; print(random.random(), torch.rand(1), numpy.random.rand())"
    first, second = (
        subprocess.run([warm_python, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert not set(first.stdout.split()) & set(second.stdout.split())


FORKS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
signal.sigwait([signal.SIGTERM])
os.write(1, b"terminated\\n")
signal.pause()
"""


def test_signals(warm_python: str) -> None:
    """SIGTERM is passed on; SIGKILL ends the process and its children."""
    process = subprocess.Popen(
        [warm_python, "-c", FORKS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "terminated\n"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert process.stdout.read() == "", "the pipe is still open"
    # A zombie, which init may never reap, has no executable.
    until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), what="their end")
