# SPDX-License-Identifier: Apache-2.0
"""Calls a store at intervals, so that its credentials and connections are fresh when a flush begins.

On Compute Engine, the metadata server that issues credentials may stop responding seconds after the notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog

from swansong_bucket.errors import StoreError
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.checksums import crc32c
from swansong_bucket.util.threads import lasting_thread

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class Warmer:
    """A thread that calls ``store.warm()`` when it starts, at an interval, and on :meth:`now`.

    A failure is logged once until a call succeeds.  No other thread depends on this one.

    Args:
        store: without a retry wrapper; this thread retries.
        stop: ends the thread.
        interval_s: time between two calls.
        retry_s: time between two calls after a failure.
        report: called after each call, with the instant of its start and its error, or None.
    """

    store: ObjectStore
    _: KW_ONLY
    stop: threading.Event
    interval_s: float = 60.0
    retry_s: float = 10.0
    report: Callable[[float, StoreError | None], None] = lambda _began_mono_s, _error: None
    _called: threading.Event = field(init=False, default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread."""
        lasting_thread("warmer", self._run).start()

    def now(self) -> None:
        """Request a call now, because of a notice; does not wait for it."""
        self._called.set()

    def _run(self) -> None:
        is_cold = False
        crc32c(b"")  # loads its library, which takes longer than a small upload
        while not self.stop.is_set():
            self._called.clear()
            began_mono_s = time.monotonic()
            try:
                self.store.warm()
            except StoreError as error:
                self.report(began_mono_s, error)
                if not is_cold:
                    _log.warning("store_not_warm", error=error.line())
                is_cold = True
            else:
                self.report(began_mono_s, None)
                if is_cold:
                    _log.info("store_warm_again")
                is_cold = False
            self._called.wait(self.retry_s if is_cold else self.interval_s)
