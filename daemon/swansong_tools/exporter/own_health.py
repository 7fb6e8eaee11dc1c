# SPDX-License-Identifier: Apache-2.0
"""The exporter's own health: requests, errors and read times of each store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swansong_bucket.errors import CorruptError, StoreError
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying

T = TypeVar("T")

OPERATIONS = ("get", "head", "list")
_KINDS = ("transient", "not_found", "too_large", "refused", "corrupt", "unexpected")
"""Kinds of errors in ``swansong_exporter_errors_total``."""
_CALL_BUDGET_S = 10.0
"""Time in which one failed request is retried; the next reading follows soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReading:
    """A reading at its end."""

    is_up: bool
    took_s: float
    runs: int = 0
    failing: int = 0
    left_out: int = 0


class ReadHealth:
    """Collects the health of one store; safe to use from several threads.

    A store may also be the mirror of another one.  The last reading of each role counts: the store is up if
    both succeeded.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests = dict.fromkeys(OPERATIONS, 0)
        """Since the start of the exporter, by operation; retries count."""
        self.errors = dict.fromkeys(_KINDS, 0)
        """The same, by kind."""
        self.read_wall_s: float | None = None
        """End of the last reading without an error."""
        self.took_s: float | None = None
        """Duration of the last reading."""
        self._lock = threading.Lock()
        self._readings: dict[str, StoreReading] = {}
        """By the URL of the store whose reader has read this one."""

    def requested(self, operation: str) -> None:
        with self._lock:
            self.requests[operation] += 1

    def failed(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, StoreError | CorruptError) else "unexpected"
        with self._lock:
            self.errors[kind if kind in self.errors else StoreError.kind] += 1

    def read(self, reading: StoreReading, *, by: str, now_wall_s: float) -> None:
        """Record the end of a reading by the reader of the store with the URL ``by``."""
        with self._lock:
            self._readings[by] = reading
            self.took_s = reading.took_s
            if reading.is_up:
                self.read_wall_s = now_wall_s

    @property
    def readings(self) -> list[StoreReading]:
        """The last reading of each role."""
        with self._lock:
            return list(self._readings.values())

    @property
    def is_up(self) -> bool | None:
        """None before the first reading."""
        readings = self.readings
        return all(each.is_up for each in readings) if readings else None


class ReadOnly(Retrying):
    """A store that only reads, retries, and counts its requests.

    Args:
        store: the store that sends the requests.
        health: counts each attempt.
        stop: ends every wait.
    """

    def __init__(self, store: ObjectStore, health: ReadHealth, stop: threading.Event) -> None:
        super().__init__(
            store,
            budget_s=_CALL_BUDGET_S,
            stop=stop,
            attempted=self._attempted_one,
        )
        self.health = health

    def _attempted_one(self, _began_mono_s: float, error: StoreError | None) -> None:
        if error is not None:
            self.health.failed(error)

    def _try(self, call: str, attempt: Callable[[], T]) -> T:
        operation = call.partition(" ")[0]
        if operation not in OPERATIONS:
            raise AssertionError(f"the exporter only reads, and {call} is not a read")

        def counted() -> T:
            self.health.requested(operation)
            return attempt()

        return super()._try(call, counted)
