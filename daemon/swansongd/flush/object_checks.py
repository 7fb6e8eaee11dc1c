# SPDX-License-Identifier: Apache-2.0
"""Confirms that the objects that a flush references are in the store, with one request for each."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from swansongd.model import StoredObject
from swansongd.stores.base import ObjectStore

RESUMED_S_MAX = 12 * 3600.0
"""An object or upload of an earlier daemon counts up to this age.  No manifest names it, so prune may delete
it after a day (``ORPHANS_AFTER_S_MIN`` of the configuration), and this flush needs time, too."""


@dataclass(eq=False, slots=True)
class _Check:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stored: bool | None = None
    age_s: float | None = None


class ObjectChecks:
    """The objects that the store has confirmed during one flush.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checks: dict[StoredObject, _Check] = {}

    def are_stored(self, store: ObjectStore, objects: Iterable[StoredObject]) -> bool:
        """Whether the store has all these objects, with their sizes.

        Raises:
            StoreError: the store failed.
        """
        return all(self._check(store, stored).is_stored for stored in objects)

    def are_recent(self, store: ObjectStore, objects: Iterable[StoredObject]) -> bool:
        """Whether the store has all these objects of an earlier daemon, and none is too old.

        Raises:
            StoreError: the store failed.
        """
        checks = [self._check(store, stored) for stored in objects]
        return all(check.is_stored and is_recent(check.age_s) for check in checks)

    def _check(self, store: ObjectStore, stored: StoredObject) -> _Check:
        with self._lock:
            check = self._checks.setdefault(stored, _Check())
        with check.lock:  # another worker may have the same request in flight
            if check.is_stored is None:
                info = store.head(stored.key)
                check.is_stored = info is not None and info.size_bytes == stored.size_bytes
                check.age_s = None if info is None else info.age_s
            return check


def is_recent(age_s: float | None) -> bool:
    """Whether an object of an earlier daemon still counts; an unknown age does."""
    return age_s is None or age_s < RESUMED_S_MAX
