# SPDX-License-Identifier: Apache-2.0
"""The store for work that can wait until an evacuation is over."""

from __future__ import annotations

from collections.abc import Callable

from swansong_bucket.errors import Stopped, Transient
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.forwarding import Forwarding, T


class Background(Forwarding):
    """The same store.  While an evacuation is open, each call raises Stopped.

    Args:
        store: retries failed requests, and stops retrying when an evacuation opens.
        is_urgent: whether an evacuation is open.
    """

    def __init__(self, store: ObjectStore, is_urgent: Callable[[], bool]) -> None:
        super().__init__(store)
        self.is_urgent = is_urgent

    def _try(self, call: str, attempt: Callable[[], T]) -> T:
        if not self.is_urgent():
            try:
                return attempt()
            except Transient:
                if not self.is_urgent():
                    raise
        raise Stopped(f"{call}: an evacuation is open")
