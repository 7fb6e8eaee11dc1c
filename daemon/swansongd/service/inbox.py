# SPDX-License-Identifier: Apache-2.0
"""The inbox of the decision loop: bounded, with priority over events from trainers."""

from __future__ import annotations

import threading
from collections import deque

from swansongd.core.events import FromTrainer
from swansongd.observe.facts import Observed

EVENTS_MAX = 10_000
"""Capacity of each of the two queues."""


class Inbox:
    """Events in order of arrival, those that trainers cause after all others.

    A flood of messages therefore does not delay a notice.  A thread that posts to a full queue blocks until
    there is room.  The decision loop itself never blocks, because only the decision loop makes room.

    Args:
        events_max: capacity of each of the two queues.
    """

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events_max = events_max
        self._reader = threading.get_ident()
        self._changed = threading.Condition()
        self._own: deque[Observed] = deque()
        self._of_trainers: deque[Observed] = deque()
        self._is_closed = False

    def put(self, event: Observed) -> None:
        """Post an event, from any thread."""
        queue = self._of_trainers if isinstance(event, FromTrainer) else self._own
        with self._changed:
            if threading.get_ident() != self._reader:
                self._changed.wait_for(lambda: len(queue) < self._events_max or self._is_closed)
            if not self._is_closed:
                queue.append(event)
                self._changed.notify_all()

    def close(self) -> None:
        """Discard all further events; threads that wait for room return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def get(self, timeout_s: float) -> Observed | None:
        """The next event; None after the timeout.  For the thread that created the inbox."""
        with self._changed:
            self._changed.wait_for(lambda: self._own or self._of_trainers, timeout_s)
            queue = self._own or self._of_trainers
            if not queue:
                return None
            self._changed.notify_all()
            return queue.popleft()
