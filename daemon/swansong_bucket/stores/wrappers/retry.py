# SPDX-License-Identifier: Apache-2.0
"""Retries: a store around a store, and the only module that repeats a request that failed.

A Transient error is retried until ``give_up_mono_s``.  Every call of the contract is idempotent, except for
create-if-absent: its Exists after an ambiguous attempt is raised, and the caller reads the object back and
compares.  Backends rewind bodies and sinks before each attempt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from random import SystemRandom

import structlog

from swansong_bucket.errors import StoreError, Transient
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.forwarding import Forwarding, T

_BACKOFF_S_FIRST = 0.1
_BACKOFF_S_MAX = 2.0
_BACKOFF_S_MAX_URGENT = 0.5
"""Limit while there is a deadline: a long backoff would waste the grace period after the store recovers."""
_REQUESTED_WAIT_S_MAX = 60.0
"""Limit of a wait that the store requests by Retry-After."""

_log = structlog.get_logger(__name__)
_random = SystemRandom()


class Retrying(Forwarding):
    """The same store, with retries of calls that failed with Transient.

    The backoff is random, with full jitter.  Its bound doubles from 0.1 s to 2 s (0.5 s while there is a
    deadline), and ends at the deadline.  A wait that the store requests (``retry_after_s``) is added, up to a
    minute and to half of the time left: the next attempt needs time, too.

    Args:
        store: the store that sends the requests.
        give_up_mono_s: called before each attempt; no attempt starts at or after this instant.  None: no
            limit.
        budget_s: limit of the retries of one call while ``give_up_mono_s`` returns None.
        stop: ends every wait; the last error is raised.
        monotonic: the clock.
        attempted: called after each attempt, with the instant of its start and its error, or None.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        give_up_mono_s: Callable[[], float | None] = lambda: None,
        stop: threading.Event,
        budget_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        attempted: Callable[[float, StoreError | None], None] = lambda _began_mono_s, _error: None,
    ) -> None:
        super().__init__(store)
        self._give_up_mono_s = give_up_mono_s
        self._stop = stop
        self._budget_s = budget_s
        self._monotonic = monotonic
        self._attempted = attempted

    def _try(self, call: str, attempt: Callable[[], T]) -> T:
        began_mono_s = self._monotonic()
        backoff_s = _BACKOFF_S_FIRST
        attempts = 0
        if self._left_s(began_mono_s) <= 0:
            raise Transient(f"{call}: no time left for an attempt")
        while True:
            attempts += 1
            attempt_mono_s = self._monotonic()
            try:
                result = attempt()
            except Transient as error:
                self._attempted(attempt_mono_s, error)
                if attempts == 1:
                    _log.warning("store_retry", call=call, error=str(error))
                if self._left_s(began_mono_s) < _BACKOFF_S_FIRST:
                    raise
                self._wait_as_requested(error.retry_after_s, began_mono_s)
                # Full jitter: many writers that failed together must not retry together.
                bound_s = min(backoff_s, max(0.0, self._left_s(began_mono_s)))
                wait_s = _random.uniform(0, bound_s)
                is_urgent = self._give_up_mono_s() is not None
                backoff_s = min(
                    2 * backoff_s, _BACKOFF_S_MAX_URGENT if is_urgent else _BACKOFF_S_MAX
                )
                # Computed again after the wait: a deadline can become earlier meanwhile.
                if self._stop.wait(wait_s) or self._left_s(began_mono_s) <= 0:
                    raise
            except StoreError as error:
                self._attempted(attempt_mono_s, error)
                raise
            else:
                self._attempted(attempt_mono_s, None)
                if attempts > 1:
                    after_s = round(self._monotonic() - began_mono_s, 3)
                    _log.info("store_recovered", call=call, attempts=attempts, after_s=after_s)
                return result

    def _wait_as_requested(self, wanted_s: float | None, began_mono_s: float) -> None:
        """Wait as long as the store requested, but at most half of the time left.

        The wait has steps, so that a new deadline shortens it.
        """
        wanted_s = min(wanted_s or 0.0, _REQUESTED_WAIT_S_MAX)
        waited_s = 0.0
        while waited_s < min(wanted_s, left_s := self._left_s(began_mono_s)):
            step_s = min(wanted_s - waited_s, left_s, _BACKOFF_S_MAX_URGENT)
            if self._stop.wait(step_s):
                return
            waited_s += step_s

    def _left_s(self, began_mono_s: float) -> float:
        give_up_mono_s = self._give_up_mono_s()
        if give_up_mono_s is None and self._budget_s is not None:
            give_up_mono_s = began_mono_s + self._budget_s
        return math.inf if give_up_mono_s is None else give_up_mono_s - self._monotonic()
