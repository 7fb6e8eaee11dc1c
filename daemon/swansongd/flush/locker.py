# SPDX-License-Identifier: Apache-2.0
"""Extends the retention of older objects before a manifest names them: see ``bucket/locks.py``.

Durability comes first.  A failed extension never prevents a commit: it is reported as a failure of the store,
and the next commit tries again.  During an evacuation no request is sent.  Objects that the commit before it
named then have at least half of the spare left beyond ``lock_days``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from swansongd.bucket import locks
from swansongd.bucket.manifest import Manifest
from swansongd.errors import Stopped, StoreError
from swansongd.flush.store_health import StoreHealth
from swansongd.model import CheckpointId, StoredObject
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

_THREADS = 8
_LOCK = "lock"
"""The operation that is reported to the health of the store."""

_log = structlog.get_logger(__name__)


class Locker:
    """Knows the end of the retention of the objects that this daemon's newest manifest names.

    Args:
        store: retries failed requests, and gives up as soon as an evacuation begins.
        lock_days: of the configuration; 0: nothing is locked.
        is_urgent: whether an evacuation is in progress.
        health: is informed of every success and failure.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        lock_days: int,
        *,
        is_urgent: Callable[[], bool],
        health: StoreHealth,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lock_days = lock_days
        self._is_urgent = is_urgent
        self._health = health
        self._monotonic = monotonic
        self._extended_mono_s: dict[str, float] = {}
        """When the retention of an object was extended by a full period."""

    def extend(self, manifest: Manifest) -> None:
        """Extend the retention of the objects of earlier checkpoints that is due.  Raises nothing."""
        if not self._lock_days:
            return
        checkpoint = CheckpointId(manifest.step, manifest.nonce)
        older = [each for each in manifest.objects if not locks.is_new(each.key, checkpoint)]
        # Objects that the newest manifest does not name cannot be named again.
        self._extended_mono_s = {
            each.key: self._extended_mono_s[each.key]
            for each in older
            if each.key in self._extended_mono_s
        }
        due = [each for each in older if self._is_due(each.key)]
        if not due or self._is_urgent():
            return
        try:
            parallel(due, self._extend, threads=min(_THREADS, len(due)))
        except (Stopped, StoreError) as error:
            if isinstance(error, Stopped) or self._is_urgent():
                return
            _log.error("retention_not_extended", error=str(error), hint=error.hint)
            self._health.failed(_LOCK, error.line())
        else:
            _log.info("retention_extended", objects=len(due))
            self._health.ok(_LOCK)

    def _is_due(self, key: str) -> bool:
        extended_mono_s = self._extended_mono_s.get(key)
        if extended_mono_s is None:
            return True
        period_s = locks.period_s(self._lock_days)(key)
        left_s = period_s - (self._monotonic() - extended_mono_s)
        return locks.is_due(left_s, self._lock_days)

    def _extend(self, stored: StoredObject) -> None:
        if self._is_urgent():
            raise Stopped("an evacuation began")
        self._store.lock(stored.key)
        self._extended_mono_s[stored.key] = self._monotonic()
