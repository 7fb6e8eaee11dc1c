# SPDX-License-Identifier: Apache-2.0
"""Extends the retention of older objects before a manifest names them: see ``retention/locks.py``.

Durability comes first.  A failed extension never prevents a commit: it is reported as a failure of the store,
and the next commit tries again.  During an evacuation no request is sent.  Objects that the commit before it
named then have at least half of the spare left beyond ``lock_days``.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from swansong_bucket.errors import Stopped, StoreError
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import Chunk
from swansong_bucket.retention import locks
from swansong_bucket.util.threads import parallel

from swansongd.flush.background import Background
from swansongd.flush.store_health import StoreHealth
from swansongd.util import boot

_THREADS = 8
_LOCK = "lock"
"""The operation that is reported to the health of the store."""

_log = structlog.get_logger(__name__)


class Locker:
    """Knows the end of the retention of the chunks that this daemon's newest manifest names.

    Args:
        store: ends an extension when an evacuation opens.
        lock_days: of the configuration; 0: nothing is locked.
        health: is informed of every success and failure.
        age_s: since a new chunk was created, with its full retention; None: an earlier commit names it.
        boottime: the clock, which includes the time of a suspension.
    """

    def __init__(
        self,
        store: Background,
        lock_days: int,
        *,
        health: StoreHealth,
        age_s: Callable[[Chunk], float | None] = lambda _chunk: None,
        boottime: Callable[[], float] = boot.boottime_s,
    ) -> None:
        self._store = store
        self._lock_days = lock_days
        self._health = health
        self._age_s = age_s
        self._boottime = boottime
        self._extended_boot_s: dict[str, float] = {}
        """When a chunk got its full retention last."""

    def extend(self, manifest: Manifest) -> None:
        """Extend the retention that is due of the chunks of earlier commits.  Raises nothing."""
        if not self._lock_days:
            return
        # Chunks that the newest manifest does not name cannot be named again.
        extended = {chunk.key: self._extended(chunk) for chunk in manifest.chunks}
        self._extended_boot_s = {key: at for key, at in extended.items() if at is not None}
        due = [chunk for chunk in manifest.chunks if self._is_due(chunk.key)]
        if not due:
            return
        try:
            parallel(due, self._extend, threads=_THREADS)
        except Stopped:  # the chunks stay due
            return
        except StoreError as error:
            _log.error("retention_not_extended", kind=error.kind, error=str(error), hint=error.hint)
            self._health.failed(_LOCK, error.line())
        else:
            _log.info("retention_extended", objects=len(due))
            self._health.ok(_LOCK)

    def _extended(self, chunk: Chunk) -> float | None:
        age_s = self._age_s(chunk)
        if age_s is None:
            return self._extended_boot_s.get(chunk.key)
        return self._boottime() - age_s

    def _is_due(self, key: str) -> bool:
        extended_boot_s = self._extended_boot_s.get(key)
        if extended_boot_s is None:
            return True
        period_s = locks.period_s(self._lock_days)(key)
        left_s = period_s - (self._boottime() - extended_boot_s)
        return locks.is_due(left_s, self._lock_days)

    def _extend(self, chunk: Chunk) -> None:
        self._store.lock(chunk.key)
        self._extended_boot_s[chunk.key] = self._boottime()
