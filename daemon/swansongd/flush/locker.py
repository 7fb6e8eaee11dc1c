# SPDX-License-Identifier: Apache-2.0
"""Extends the retention of older objects before a manifest names them: see ``retention/locks.py``.

Durability comes first.  A failed extension never prevents a commit: it is reported as a failure of the store,
and the next commit tries again.  During an evacuation no request is sent.  Objects that the commit before it
named then have at least half of the spare left beyond ``lock_days``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from swansong_bucket.errors import Stopped, StoreError
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import Chunk
from swansong_bucket.retention import locks
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.util.threads import parallel

from swansongd.flush.store_health import StoreHealth

_THREADS = 8
_LOCK = "lock"
"""The operation that is reported to the health of the store."""

_log = structlog.get_logger(__name__)


class Locker:
    """Knows the end of the retention of the chunks that this daemon's newest manifest names.

    Args:
        store: retries failed requests, and gives up as soon as an evacuation begins.
        lock_days: of the configuration; 0: nothing is locked.
        is_urgent: whether an evacuation is in progress.
        health: is informed of every success and failure.
        age_s: since a new chunk was created, with its full retention; None: an earlier commit names it.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        lock_days: int,
        *,
        is_urgent: Callable[[], bool],
        health: StoreHealth,
        age_s: Callable[[Chunk], float | None] = lambda _chunk: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lock_days = lock_days
        self._is_urgent = is_urgent
        self._health = health
        self._age_s = age_s
        self._monotonic = monotonic
        self._extended_mono_s: dict[str, float] = {}
        """When a chunk got its full retention last."""

    def extend(self, manifest: Manifest) -> None:
        """Extend the retention that is due of the chunks of earlier commits.  Raises nothing."""
        if not self._lock_days:
            return
        # Chunks that the newest manifest does not name cannot be named again.
        extended = {chunk.key: self._extended(chunk) for chunk in manifest.chunks}
        self._extended_mono_s = {key: at for key, at in extended.items() if at is not None}
        due = [chunk for chunk in manifest.chunks if self._is_due(chunk.key)]
        if not due or self._is_urgent():
            return
        try:
            parallel(due, self._extend, threads=_THREADS)
        except (Stopped, StoreError) as error:
            if isinstance(error, Stopped) or self._is_urgent():
                return
            _log.error("retention_not_extended", kind=error.kind, error=str(error), hint=error.hint)
            self._health.failed(_LOCK, error.line())
        else:
            _log.info("retention_extended", objects=len(due))
            self._health.ok(_LOCK)

    def _extended(self, chunk: Chunk) -> float | None:
        age_s = self._age_s(chunk)
        if age_s is None:
            return self._extended_mono_s.get(chunk.key)
        return self._monotonic() - age_s

    def _is_due(self, key: str) -> bool:
        extended_mono_s = self._extended_mono_s.get(key)
        if extended_mono_s is None:
            return True
        period_s = locks.period_s(self._lock_days)(key)
        left_s = period_s - (self._monotonic() - extended_mono_s)
        return locks.is_due(left_s, self._lock_days)

    def _extend(self, chunk: Chunk) -> None:
        if self._is_urgent():
            raise Stopped("an evacuation began")
        self._store.lock(chunk.key)
        self._extended_mono_s[chunk.key] = self._monotonic()
