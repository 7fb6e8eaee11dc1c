# SPDX-License-Identifier: Apache-2.0
"""A bounded outbox of notifications, each with its own time of the next attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from swansong_bucket.util.printable import printable

from swansongd.observe.notifications import Notification, NotificationKind
from swansongd.observe.status import SenderStatus

ENTRIES_MAX = 100
URGENT = (NotificationKind.NOTICE, NotificationKind.VERDICT)
"""Sent before the others, and dropped last."""


@dataclass
class OutboxEntry:
    """A notification that waits, or that is being sent."""

    notification: Notification
    number: int = 0
    due_mono_s: float = 0.0
    attempts: int = 0

    @property
    def is_urgent(self) -> bool:
        return self.notification.kind in URGENT


class Outbox:
    """Notifications from any thread for one worker.  Urgent ones come first, then in their order.

    Those of one group are always sent in their order, also after a retry: a problem whose start arrives after
    its end would stay open.  A new one ends the pause of the earlier ones of its group.

    A full outbox drops the oldest entry that is not urgent, else the oldest one.

    Args:
        entries_max: capacity.
    """

    def __init__(
        self, entries_max: int = ENTRIES_MAX, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries_max = entries_max
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._waiting: list[OutboxEntry] = []
        self._number = 0
        self._in_progress: OutboxEntry | None = None
        self._is_draining = False
        self._sent = 0
        self._failed = 0
        self._dropped = 0
        self._last_error = ""

    def status(self) -> SenderStatus:
        with self._changed:
            return SenderStatus(
                queued=len(self._waiting) + (self._in_progress is not None),
                sent=self._sent,
                failed=self._failed,
                dropped=self._dropped,
                last_error=self._last_error or None,
            )

    def put(self, notification: Notification) -> None:
        """Queue a notification.  Returns at once."""
        with self._changed:
            if len(self._waiting) >= self._entries_max:
                self._drop()
            for entry in self._waiting:
                if entry.notification.group == notification.group:
                    entry.due_mono_s = 0.0
            self._number += 1
            self._waiting.append(OutboxEntry(notification, self._number))
            self._changed.notify_all()

    def refuse(self) -> None:
        """Count a notification that is not queued, because there were too many."""
        with self._changed:
            self._dropped += 1

    def take(self) -> OutboxEntry:
        """The next entry that is due; waits for it.  The worker then calls one of the methods below."""
        with self._changed:
            while (entry := self._due()) is None:
                self._changed.wait(self._wait_s())
            self._waiting.remove(entry)
            self._in_progress = entry
            entry.attempts += 1
            return entry

    def finish(self, error: str = "") -> None:
        """The entry in progress was sent; or, with an error, it was given up."""
        with self._changed:
            self._note(error)
            self._in_progress = None
            self._changed.notify_all()

    def retry(self, after_s: float, error: str) -> None:
        """The entry in progress failed, and is attempted again after this time."""
        with self._changed:
            entry, self._in_progress = self._in_progress, None
            assert entry is not None
            if self._is_draining:
                self._note(error)
            else:
                self._last_error = str(printable(error))
                entry.due_mono_s = self._monotonic() + after_s
                self._waiting.append(entry)
                self._waiting.sort(key=lambda each: each.number)
            self._changed.notify_all()

    def _note(self, error: str) -> None:
        self._sent += not error
        self._failed += bool(error)
        self._last_error = str(printable(error))

    def begin_drain(self) -> None:
        """Attempt each entry once more, the urgent ones first, without a pause between attempts."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until each urgent entry was attempted once more; False if not all were attempted in time."""
        self.begin_drain()
        with self._changed:
            return self._changed.wait_for(lambda: not self._has_urgent(), timeout_s)

    def _has_urgent(self) -> bool:
        entry = self._in_progress
        return (entry is not None and entry.is_urgent) or any(e.is_urgent for e in self._waiting)

    def _heads(self) -> list[OutboxEntry]:
        """The first entry of each group, oldest first."""
        heads: dict[str, OutboxEntry] = {}
        for entry in self._waiting:
            heads.setdefault(entry.notification.group, entry)
        return list(heads.values())

    def _due(self) -> OutboxEntry | None:
        now = self._monotonic()
        due = [e for e in self._heads() if e.due_mono_s <= now or self._is_draining]
        return next((e for e in due if e.is_urgent), due[0] if due else None)

    def _wait_s(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(e.due_mono_s for e in self._heads()) - self._monotonic())

    def _drop(self) -> None:
        victim = next((e for e in self._waiting if not e.is_urgent), self._waiting[0])
        self._waiting.remove(victim)
        self._dropped += 1
