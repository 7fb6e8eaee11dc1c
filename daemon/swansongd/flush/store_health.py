# SPDX-License-Identifier: Apache-2.0
"""The health of the store, from two kinds of facts: each attempt at a request, and each whole operation.

An operation may be retried for 20 s before it fails, and a store that refuses an operation answers every
request.  So neither fact alone is enough: the store is healthy while attempts succeed and no operation is
known to have failed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from swansongd.errors import StoreError, Transient
from swansongd.observe.health import HealthTracker

FAILING_AFTER_S = 2.0
"""Attempts that fail for a shorter time are usual: a store that throttles, a connection that was closed."""


class StoreHealth:
    """Collects both facts from all threads, and reports changes to the tracker.

    Args:
        tracker: posts the changes; only this object uses it.
        monotonic: the clock.
    """

    def __init__(
        self, tracker: HealthTracker, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracker = tracker
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failed: dict[str, str] = {}
        self._failing_since_mono_s: float | None = None
        self._succeeded_mono_s = -math.inf
        self._attempt_reason = ""

    def ok(self, operation: str) -> None:
        """The operation was carried out."""
        with self._lock:
            self._failed.pop(operation, None)
            self._has_succeeded()

    def failed(self, operation: str, reason: str) -> None:
        """The operation was given up; the reason stands until the operation succeeds."""
        with self._lock:
            self._failed[operation] = reason
            self._report()

    def attempted(self, began_mono_s: float, error: StoreError | None) -> None:
        """One attempt at a request ended.

        Args:
            began_mono_s: when the attempt began.
            error: a Transient one if the store did not answer, another one for a refusal; None for success.
        """
        with self._lock:
            if error is None:
                self._has_succeeded()
                return
            if not isinstance(error, Transient):  # the operation that it ends reports it
                self._succeeded_mono_s = self._monotonic()
                self._failing_since_mono_s = None
                return
            if self._failing_since_mono_s is None:
                self._failing_since_mono_s = max(began_mono_s, self._succeeded_mono_s)
                # Each attempt has its own key in its error; the first error stands for all of them.
                self._attempt_reason = str(error)
            self._report()

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
