# SPDX-License-Identifier: Apache-2.0
"""Confirms that the objects that a flush references are in the store, with one request for each."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from swansongd.model import StoredObject
from swansongd.stores.base import ObjectStore


@dataclass(eq=False, slots=True)
class _Check:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stored: bool | None = None


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
        return all(self._is_stored(store, stored) for stored in objects)

    def _is_stored(self, store: ObjectStore, stored: StoredObject) -> bool:
        with self._lock:
            check = self._checks.setdefault(stored, _Check())
        with check.lock:  # another worker may have the same request in flight
            if check.is_stored is None:
                info = store.head(stored.key)
                check.is_stored = info is not None and info.size_bytes == stored.size_bytes
            return check.is_stored
