# SPDX-License-Identifier: Apache-2.0
"""Confirms that the chunks that a set names are in the store, with one request for each."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from swansong_bucket.model import Chunk
from swansong_bucket.stores.base import ObjectStore

from swansongd.flush.known import KnownChunks


@dataclass(eq=False, slots=True)
class _Check:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_good: bool | None = None


class ChunkChecks:
    """The chunks that the store has confirmed during one flush.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checks: dict[Chunk, _Check] = {}

    def is_stored(self, store: ObjectStore, known: KnownChunks, chunk: Chunk) -> bool:
        """Whether the store has this chunk, with its size; one without a commit must not be too old.

        Raises:
            StoreError: the store failed.
        """
        with self._lock:
            check = self._checks.setdefault(chunk, _Check())
        with check.lock:  # another worker may have the same request in flight
            if check.is_good is None:
                info = store.head(chunk.key)
                check.is_good = (
                    info is not None
                    and info.size_bytes == chunk.size_bytes
                    and known.confirmed(chunk, info.age_s)
                )
                if not check.is_good:
                    known.is_gone(chunk)
            return check.is_good
