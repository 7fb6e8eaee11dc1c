# SPDX-License-Identifier: Apache-2.0
"""Signals to a command."""

from __future__ import annotations

import signal
import threading

from swansong_tools.commands.bucket_command import stop_on_signals


def test_a_signal_ends_a_command_that_handles_the_one_before() -> None:
    """Its handler may wait for a lock that the interrupted code holds, or be interrupted again and again."""
    found: list[object] = []

    class Stop(threading.Event):
        def set(self) -> None:
            found.append(signal.getsignal(signal.SIGTERM))
            super().set()

    stop = Stop()
    before = stop_on_signals(stop)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.is_set()
    assert found == [signal.SIG_DFL]
