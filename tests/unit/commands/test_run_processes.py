# SPDX-License-Identifier: Apache-2.0
"""The process that the user of ``swansong run`` started, and its child."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from swansong_tools.commands import run_processes

def work():
    os.kill(os.getppid(), signal.SIGTERM)  # at any moment of the parent's start
    signal.sigwait(run_processes.STOPPING)
    return 7

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
raise SystemExit(run_processes.supervised(work))
"""


def test_signals_and_the_exit_code_are_passed_on() -> None:
    """However early the signal comes, and also if the command's parent ignored the ends of its children."""
    for _ in range(3):
        assert (
            subprocess.run([sys.executable, "-c", SCRIPT], timeout=60, check=False).returncode == 7
        )
