# SPDX-License-Identifier: Apache-2.0
"""The exporter's own health: requests, errors and read times of each store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
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
class HealthFigures:
    """The health of a store at one moment."""

    url: str
    is_up: bool | None
    """None before the first reading."""
    read_wall_s: float | None
    """End of the last reading without an error."""
    took_s: float | None
    """Duration of the last reading."""
    requests: Mapping[str, int]
    """Since the start of the exporter, by operation; retries count."""
    errors: Mapping[str, int]
    """The same, by kind."""
    runs: int
    runs_failing: int
    runs_left_out: int


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
        self._lock = threading.Lock()
        self._requests = dict.fromkeys(OPERATIONS, 0)
        self._errors = dict.fromkeys(_KINDS, 0)
        self._readings: dict[str, StoreReading] = {}
        """By the URL of the store whose reader has read this one."""
        self._read_wall_s: float | None = None
        self._took_s: float | None = None

    def requested(self, operation: str) -> None:
        with self._lock:
            self._requests[operation] += 1

    def failed(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, StoreError | CorruptError) else "unexpected"
        with self._lock:
            self._errors[kind if kind in self._errors else StoreError.kind] += 1

    def read(self, reading: StoreReading, *, by: str, now_wall_s: float) -> None:
        """Record the end of a reading by the reader of the store with the URL ``by``."""
        with self._lock:
            self._readings[by] = reading
            self._took_s = reading.took_s
            if reading.is_up:
                self._read_wall_s = now_wall_s

    def figures(self) -> HealthFigures:
        with self._lock:
            readings = self._readings.values()
            return HealthFigures(
                url=self.url,
                is_up=all(each.is_up for each in readings) if readings else None,
                read_wall_s=self._read_wall_s,
                took_s=self._took_s,
                requests=dict(self._requests),
                errors=dict(self._errors),
                runs=sum(each.runs for each in readings),
                runs_failing=sum(each.failing for each in readings),
                runs_left_out=sum(each.left_out for each in readings),
            )


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
