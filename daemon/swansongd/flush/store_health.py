# SPDX-License-Identifier: Apache-2.0
"""The health of the store, from single attempts at requests and from whole operations.

Neither is enough alone.  An operation is retried for up to 20 s before it fails, and a store that refuses an
operation answers every request.  The store is healthy while attempts succeed and no operation has failed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from swansong_bucket.errors import StoreError, Transient

from swansongd.core.events import Event
from swansongd.observe.health import HealthTracker
from swansongd.observe.status import STORE_HEALTH

FAILING_AFTER_S = 2.0
"""Shorter failures are normal: the store throttles requests, or has closed an idle connection."""
_BLIND_AFTER_S = 60.0
_KINDS = ("transient", "not_found", "too_large", "exists", "changed", "locked", "refused")


class StoreHealth:
    """Collects attempts and operations from all threads, and posts each change of the health.

    Args:
        post: receives SourceChanged.
        monotonic: the clock.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = HealthTracker(
            STORE_HEALTH, blind_after_s=_BLIND_AFTER_S, monotonic=monotonic, post=post
        )
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failed: dict[str, str] = {}
        self._failing_since_mono_s: float | None = None
        self._succeeded_mono_s = -math.inf
        self._attempt_reason = ""
        self._errors = dict.fromkeys(_KINDS, 0)

    @property
    def answered_mono_s(self) -> float | None:
        """When the store answered last, also with a refusal; None before the first answer."""
        with self._lock:
            return self._succeeded_mono_s if self._succeeded_mono_s > -math.inf else None

    @property
    def errors(self) -> dict[str, int]:
        """Attempts that failed, by kind."""
        with self._lock:
            return dict(self._errors)

    def ok(self, operation: str) -> None:
        """The operation succeeded."""
        with self._lock:
            self._failed.pop(operation, None)
            self._has_succeeded()

    def failed(self, operation: str, reason: str) -> None:
        """The operation failed; the reason is reported until the operation succeeds."""
        with self._lock:
            self._failed[operation] = reason
            self._report()

    def given_up(self, operation: str) -> None:
        """The operation is not retried any more: its last failure says nothing about the store now."""
        with self._lock:
            self._failed.pop(operation, None)
            self._report()

    def attempted(self, began_mono_s: float, error: StoreError | None) -> None:
        """One attempt at a request ended.

        Args:
            began_mono_s: when the attempt began.
            error: Transient if the store did not answer, another error for a refusal; None for success.
        """
        with self._lock:
            if error is None:
                self._has_succeeded()
                return
            self._errors[error.kind] += 1
            if not isinstance(error, Transient):
                # The store answered; the operation reports the refusal.
                self._succeeded_mono_s = self._monotonic()
                self._failing_since_mono_s = None
                return
            if self._failing_since_mono_s is None:
                self._failing_since_mono_s = max(began_mono_s, self._succeeded_mono_s)
                # The errors contain different keys; only the first is reported.
                self._attempt_reason = str(error)
            self._report()

    def warmed(self, began_mono_s: float, error: StoreError | None) -> None:
        """The warmer has called the store; arguments as of :meth:`attempted`."""
        if isinstance(error, Transient):
            self.attempted(began_mono_s, error)
        elif error is not None:
            with self._lock:
                self._errors[error.kind] += 1
            self.failed("warm", error.line())
        else:
            self.ok("warm")

    def _has_succeeded(self) -> None:
        self._succeeded_mono_s = self._monotonic()
        self._failing_since_mono_s = None
        self._report()

    def _report(self) -> None:
        since_mono_s = self._failing_since_mono_s
        if self._failed:
            self._tracker.failed(next(reversed(self._failed.values())))
        elif since_mono_s is None:
            self._tracker.ok()
        elif self._monotonic() - since_mono_s >= FAILING_AFTER_S:
            self._tracker.failed(self._attempt_reason)
