# SPDX-License-Identifier: Apache-2.0
"""Signals to a command."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

import pytest
from swansong_bucket.errors import Stopped, Transient
from swansong_tools.commands.bucket_command import opened, stop_on_signals

from testkit.committed import commit, configuration, file_store


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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_stop_during_a_failing_request_is_a_stop(tmp_path: Path, *, is_stopped: bool) -> None:
    """The request is not sent again, which is no failure of the store."""
    commit(file_store(tmp_path / "bucket"), {"a": b"x"})
    args = argparse.Namespace(config=configuration(tmp_path), run=None)

    def failing() -> None:
        with opened(args):
            if is_stopped:
                signal.raise_signal(signal.SIGTERM)
            raise Transient("no answer")

    with pytest.raises(Stopped if is_stopped else Transient, match="no answer"):
        failing()
