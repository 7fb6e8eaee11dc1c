# SPDX-License-Identifier: Apache-2.0
"""Stops copies while checkpoints are sent, within one window of bytes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from swansong_bucket.errors import Stopped

T = TypeVar("T")

HELD_S = 10.0
"""Longest pause of a request in flight.  Stores close connections that are idle for 20 s."""
_POLL_S = 0.1


class Yielded(Exception):
    """A transfer ended early, because a checkpoint needs the link.  Only :meth:`Gate.run` sees it."""


@dataclass(eq=False, repr=False)
class Gate:
    """Lets transfers pass while ``may_run`` returns True.

    A pause shorter than ``held_s`` keeps the requests in flight.  Without that, a slow link would carry
    nothing: a run that commits every few seconds would end each request before it has sent its chunk.

    Args:
        stop: ends all waits.
        may_run: called for each window of bytes.
        held_s: after this time, a pause ends the requests in flight.
    """

    stop: threading.Event
    may_run: Callable[[], bool] = lambda: True
    _: KW_ONLY
    held_s: float = HELD_S
    is_closed: bool = field(init=False, default=False)
    """Whether a transfer waits."""

    def wait(self) -> None:
        """Block while copies must pause; raises Stopped."""
        self._passes(math.inf)

    def check(self) -> None:
        """Pause the transfer that calls this while copies must pause; a long pause ends it."""
        if not self._passes(self.held_s):
            raise Yielded

    def run(self, transfer: Callable[[], T]) -> T:
        """The result of a transfer, which is repeated from its start after a long pause."""
        while True:
            self.wait()
            try:
                return transfer()
            except Yielded:
                continue

    def _passes(self, limit_s: float) -> bool:
        """Block while copies must pause; False if the pause exceeds ``limit_s``."""
        began_mono_s = time.monotonic()
        while not self.may_run():
            self.is_closed = True
            if time.monotonic() - began_mono_s > limit_s:
                return False
            if self.stop.wait(_POLL_S):
                break
        self.is_closed = False
        if self.stop.is_set():
            raise Stopped("stopped before it was done")
        return True
