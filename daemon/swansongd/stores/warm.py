# SPDX-License-Identifier: Apache-2.0
"""Keeps a store warm, so that a flush depends on the store alone.

On Compute Engine the metadata server, and with it the credentials, may be gone seconds after the notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from swansongd.errors import StoreError
from swansongd.stores.base import ObjectStore

_log = structlog.get_logger(__name__)


class Warmer:
    """Calls ``store.warm()`` at once, every minute, and whenever told to, in a thread of its own.

    Failures are logged, once until it works again, and tried again sooner; no other thread depends on them.

    Args:
        store: without retries of its own: this is one.
        stop: ends the thread.
        interval_s: from one time to the next.
        retry_s: the same after a failure.
        report: is called after each time, with the instant of its beginning and the error, or None.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        stop: threading.Event,
        interval_s: float = 60.0,
        retry_s: float = 10.0,
        report: Callable[[float, StoreError | None], None] = lambda _began_mono_s, _error: None,
    ) -> None:
        self._store = store
        self._stop = stop
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._report = report
        self._called = threading.Event()

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="warmer", daemon=True).start()

    def now(self) -> None:
        """Warm the store now: a notice has come.  Returns at once."""
        self._called.set()

    def _run(self) -> None:
        is_cold = False
        while not self._stop.is_set():
            self._called.clear()
            began_mono_s = time.monotonic()
            try:
                self._store.warm()
            except StoreError as error:
                self._report(began_mono_s, error)
                if not is_cold:
                    _log.warning("store_not_warm", error=error.line())
                is_cold = True
            else:
                self._report(began_mono_s, None)
                if is_cold:
                    _log.info("store_warm_again")
                is_cold = False
            self._called.wait(self._retry_s if is_cold else self._interval_s)
