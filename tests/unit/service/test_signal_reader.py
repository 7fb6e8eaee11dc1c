# SPDX-License-Identifier: Apache-2.0
"""Signals to the daemon are handled in other threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading
from swansongd.service import signal_reader

has_begun = threading.Event()

def handler(number):
    if number == signal.SIGTERM:
        has_begun.set()
        threading.Event().wait()
    os.write(1, str(number).encode())
    os._exit(0)

signal_reader.handle((signal.SIGTERM, signal.SIGINT), handler)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
assert has_begun.wait(60)
for number in (signal.SIGUSR1, signal.SIGINT):
    os.kill(os.getpid(), number)
threading.Event().wait(20)
"""
"""The host never answers whether it shuts down, and the main thread waits for no signal."""


WITHOUT_THREADS = """
import threading
start, refused = threading.Thread.start, []

def refused_once(thread):
    if thread.name != "signals" and not refused:
        refused.append(thread)
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = refused_once
"""
"""The VM allows no thread for the first signal."""


@pytest.mark.fault("H02")
@pytest.mark.parametrize("before", ["", WITHOUT_THREADS])
def test_a_signal_during_the_judgement_of_another_one_is_handled_at_once(before: str) -> None:
    """A signal for which a library has a handler is ignored.  One without a thread is not lost."""
    run = subprocess.run(
        [sys.executable, "-c", before + PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.endswith("2"), run.stderr
    assert ("can't start new thread" in run.stdout) is bool(before)
