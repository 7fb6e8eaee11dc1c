# SPDX-License-Identifier: Apache-2.0
"""Aborts abandoned multipart uploads: their parts cost money, and listings of objects do not show them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from swansongd.bucket.keys import RunKeys
from swansongd.errors import SwansongError
from swansongd.stores.base import ObjectStore

_log = structlog.get_logger(__name__)


class Sweeper:
    """Searches for abandoned uploads of the run at the start and every few hours, in its own thread.

    An upload is abandoned if it is old and the journal does not contain it.  Another VM of the run may still
    use it, and would have to restart it.  Therefore only old uploads are aborted.

    Args:
        store: retries failed requests.
        holds: whether the journal contains an upload id.
        is_urgent: whether an evacuation is open; then nothing is swept.
        after_s: minimum age of an abandoned upload.
        stop: ends the thread.
        interval_s: time between two sweeps.
        retry_s: the same after a failure or an interruption.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        *,
        holds: Callable[[str], bool],
        is_urgent: Callable[[], bool],
        after_s: float,
        stop: threading.Event,
        interval_s: float = 6 * 3600.0,
        retry_s: float = 600.0,
    ) -> None:
        self._store = store
        self._keys = keys
        self._holds = holds
        self._is_urgent = is_urgent
        self._after_s = after_s
        self._stop = stop
        self._interval_s = interval_s
        self._retry_s = retry_s

    def start(self) -> None:
        """Start the thread; returns immediately."""
        threading.Thread(target=self._run, name="sweeper", daemon=True).start()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                is_complete = self.sweep()
            except SwansongError as error:
                is_complete = False
                _log.warning("uploads_not_swept", error=error.line())
            except Exception:
                is_complete = False
                _log.exception("sweep_fault")
            wait_s = self._interval_s if is_complete else self._retry_s

    def sweep(self) -> bool:
        """Sweep once; False if an evacuation interrupted it.

        Raises:
            StoreError: the store failed.
        """
        for prefix in (self._keys.data, self._keys.probes):
            for found in self._store.uploads(prefix):
                if self._is_urgent():
                    return False
                if found.age_s >= self._after_s and not self._holds(found.upload_id):
                    self._store.abort(found.key, found.upload_id)
                    _log.info("upload_aborted", key=found.key, age_s=round(found.age_s))
        return True
