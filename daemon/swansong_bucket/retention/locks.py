# SPDX-License-Identifier: Apache-2.0
"""The retention of each kind of object: the rules behind ``store.lock_days``.  Pure.

A manifest is locked for ``lock_days`` from its creation, and each object that it names at least as long.  New
objects get a spare, so that a commit shortly after needs no request: it finds their retention long enough.
Claims, farewells, resumptions and pins are not locked; the bucket policy protects claims.
"""

from __future__ import annotations

from collections.abc import Callable

from swansong_bucket.config.sections import StoreConfig
from swansong_bucket.stores.retention import DAY_S, Lock


def of(config: StoreConfig) -> Lock | None:
    """The retention of new objects of a store; None without ``lock_days``."""
    return Lock(config.lock_mode, period_s(config.lock_days)) if config.lock_days else None


def spare_s(lock_days: int) -> float:
    """A quarter of the period, and at least a day: an upload and a flush take less."""
    return max(DAY_S, lock_days * DAY_S / 4)


def period_s(lock_days: int) -> Callable[[str], float]:
    """The retention of a new object by its key, in seconds; 0: none."""

    def of(key: str) -> float:
        _, _, below = key.partition("/")
        if below.startswith("commits/"):
            return lock_days * DAY_S
        return lock_days * DAY_S + spare_s(lock_days) if below.startswith("data/") else 0.0

    return of


def is_due(left_s: float, lock_days: int) -> bool:
    """Whether an object with this rest of its retention must be extended before a manifest names it.

    At half of the spare.  A commit in the following time, also one in an evacuation, then needs no request.
    """
    return left_s < lock_days * DAY_S + spare_s(lock_days) / 2
