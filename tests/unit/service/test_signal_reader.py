# SPDX-License-Identifier: Apache-2.0
"""Signals to the daemon are handled in another thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading
from swansongd.service import signal_reader

numbers, has_begun, may_end = [], threading.Event(), threading.Event()

def handler(number):
    numbers.append(int(number))
    has_begun.set()
    assert may_end.wait(20)
    if number == signal.SIGINT:
        sys.stdout.write(repr(numbers))
        sys.stdout.flush()
        os._exit(0)

signal_reader.handle((signal.SIGTERM, signal.SIGINT), handler)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
assert has_begun.wait(20)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
may_end.set()
threading.Event().wait(20)
"""
"""A judgement of SIGTERM blocks until other signals have arrived; the main thread waits for no signal."""


@pytest.mark.fault("H02")
def test_signals_during_a_judgement_are_handled_afterwards() -> None:
    """Each number once.  A signal for which a library has a handler is ignored."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "[15, 15, 2]", run.stderr
