# SPDX-License-Identifier: Apache-2.0
"""Stops copies while checkpoints are sent, within one window of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from swansongd.errors import Stopped

T = TypeVar("T")

_POLL_S = 0.1


class Yielded(Exception):
    """A transfer ended early, because a checkpoint needs the link.  Only :meth:`Gate.run` sees it."""


class Gate:
    """Lets transfers pass while ``may_run`` returns True.

    Args:
        stop: ends all waits.
        may_run: called for each window of bytes.
    """

    def __init__(self, stop: threading.Event, may_run: Callable[[], bool] = lambda: True) -> None:
        self._stop = stop
        self._may_run = may_run
        self.is_closed = False
        """Whether a transfer waits."""

    def wait(self) -> None:
        """Block while copies must pause; raises Stopped."""
        while not self._may_run():
            self.is_closed = True
            if self._stop.wait(_POLL_S):
                break
        self.is_closed = False
        if self._stop.is_set():
            raise Stopped("stopped before it was done")

    def check(self) -> None:
        """End the transfer that calls this, if copies must pause."""
        if self._stop.is_set():
            raise Stopped("stopped before it was done")
        if not self._may_run():
            raise Yielded

    def run(self, transfer: Callable[[], T]) -> T:
        """The result of a transfer, which is repeated from its start after a pause."""
        while True:
            self.wait()
            try:
                return transfer()
            except Yielded:
                continue
