# SPDX-License-Identifier: Apache-2.0
"""A rate limit for chunks, so that a flush does not slow down the training on the same VM.

A store around a store.  :class:`~swansong_bucket.stores.wrappers.retry.Retrying` is the outer one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from swansong_bucket.stores.base import WINDOW_BYTES, Body, ObjectStore, Sink
from swansong_bucket.stores.wrappers.forwarding import Forwarding

HELD_S = 10.0
"""Longest pause of a body in flight.  Stores close connections that are idle for 20 s."""
_POLL_S = 0.05
"""Interval at which a waiting thread reads the rate again."""


class Throttled(Forwarding):
    """The same store, with a limit on the rate of all large bodies together.

    The number of bodies in flight is at most the number of windows per second.  Each body then sends about
    one window a second, and no server closes its connection as idle.  The others have not started and use no
    connection.  Small objects are not limited, and neither are ranges, unless ``limits_reads``.

    During a pause no body starts.  A pause shorter than :data:`HELD_S` holds the bodies in flight.  Without
    that, a slow link would carry nothing: a run that commits every few seconds would end each request before
    it has sent its chunk.  A longer one ends their requests, which are repeated from the start after it.

    Args:
        store: the store that sends the requests.
        rate_bytes_per_s: called at short intervals; None removes the limit, also for waiting threads.
        is_paused: called at short intervals.
        limits_reads: limit the ranges that are read, in the same bucket.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        rate_bytes_per_s: Callable[[], float | None],
        *,
        is_paused: Callable[[], bool] = lambda: False,
        limits_reads: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self._limits_reads = limits_reads
        self._bucket = _TokenBucket(rate_bytes_per_s, is_paused, monotonic)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if len(data) > WINDOW_BYTES:  # of a repair
            self._bucket.spend(len(data))
        self._store.put(key, data, if_absent=if_absent)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if not self._limits_reads:
            super().get_range(key, offset, size_bytes, sink)
            return
        paced = _ThrottledSink(sink, self._bucket)
        self._bucket.perform(lambda: self._store.get_range(key, offset, size_bytes, paced))

    def create(self, key: str, body: Body) -> None:
        body.pace = self._bucket.spend
        self._bucket.perform(lambda: self._store.create(key, body))


class _Yielded(Exception):
    """A request ended early, because of a long pause."""


@dataclass(eq=False, repr=False)
class _TokenBucket:
    """A token bucket for all threads.

    A thread that finds no debt takes all its tokens immediately, and leaves a debt.  The next thread waits
    until the debt is paid.  No window is therefore too large for the bucket.
    """

    rate_bytes_per_s: Callable[[], float | None]
    is_paused: Callable[[], bool]
    monotonic: Callable[[], float]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._level_bytes = 0.0
        self._seen_mono_s = self.monotonic()
        self._in_flight = 0

    def perform(self, request: Callable[[], None]) -> None:
        """Perform a request in one of the slots for bodies in flight, again after a long pause."""
        is_done = False
        while not is_done:
            with self._changed:
                while self.is_paused() or self._is_full():
                    self._changed.wait(_POLL_S)
                self._in_flight += 1
            try:
                request()
                is_done = True
            except _Yielded:
                pass
            finally:
                with self._changed:
                    self._in_flight -= 1
                    self._changed.notify()

    def _is_full(self) -> bool:
        rate = self.rate_bytes_per_s()
        return rate is not None and rate > 0 and self._in_flight >= max(1, rate // WINDOW_BYTES)

    def spend(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent; a long pause ends the request."""
        self._sit_out_pause()
        if not self.rate_bytes_per_s():
            return
        with self._changed:
            while rate := self.rate_bytes_per_s():
                now_mono_s = self.monotonic()
                earned_bytes = (now_mono_s - self._seen_mono_s) * rate
                # Idle time earns no credit beyond one interval, which makes up for late wake-ups.
                self._level_bytes = min(self._level_bytes + earned_bytes, rate * _POLL_S)
                self._seen_mono_s = now_mono_s
                if self._level_bytes >= 0:
                    self._level_bytes -= size_bytes
                    return
                self._changed.wait(min(_POLL_S, -self._level_bytes / rate + 0.001))

    def _sit_out_pause(self) -> None:
        began_mono_s = self.monotonic()
        with self._changed:
            while self.is_paused():
                if self.monotonic() - began_mono_s >= HELD_S:
                    raise _Yielded
                self._changed.wait(_POLL_S)


class _ThrottledSink:
    """A sink that waits before it takes each window."""

    def __init__(self, sink: Sink, pace: _TokenBucket) -> None:
        self._sink = sink
        self._bucket = pace

    def rewind(self) -> None:
        self._sink.rewind()

    def write(self, window: memoryview) -> None:
        self._bucket.spend(window.nbytes)
        self._sink.write(window)
