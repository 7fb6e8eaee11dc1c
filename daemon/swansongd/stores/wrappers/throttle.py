# SPDX-License-Identifier: Apache-2.0
"""A limit on what shards take of the network, so that training beside a flush does not feel it.

A store around a store, like :class:`~swansongd.stores.wrappers.retry.Retrying`, which goes outside of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swansongd.stores.base import (
    WINDOW_BYTES,
    Body,
    ObjectInfo,
    ObjectStore,
    OpenUpload,
    Page,
    PartReceipt,
    Sink,
    Upload,
)

_POLL_S = 0.05
"""How soon a thread that waits notices that the rate has changed."""


class Throttled:
    """The same store, that sends bodies of shards no faster than ``rate_bytes_per_s`` in all.

    At most as many bodies are under way as there are windows a second to share out: each then moves
    about once a second, and no server takes it for dead.  The others have not begun yet, and hold no
    connection.  Small objects and reads are not held up.

    Args:
        store: the store that does the work.
        rate_bytes_per_s: asked all the time; None lifts the limit, also for who waits now.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        rate_bytes_per_s: Callable[[], float | None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = store.url
        self.part_size_bytes_min = store.part_size_bytes_min
        self._store = store
        self._bucket = _TokenBucket(rate_bytes_per_s, monotonic)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self._store.get_range(key, offset, size_bytes, sink)

    def head(self, key: str) -> ObjectInfo | None:
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def page(self, prefix: str, token: str | None) -> Page:
        return self._store.page(prefix, token)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def put_shard(self, key: str, body: Body) -> int:
        with self._bucket.turn():
            return self._store.put_shard(key, _PacedBody(body, self._bucket))

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        return self._store.begin(key, size_bytes, part_size_bytes)

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        with self._bucket.turn():
            return self._store.put_part(upload, number, _PacedBody(body, self._bucket))

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        return self._store.parts(upload)

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        self._store.complete(upload, parts)

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        return self._store.uploads(prefix)

    def abort(self, key: str, upload_id: str) -> None:
        self._store.abort(key, upload_id)

    def check(self) -> None:
        self._store.check()

    def warm(self) -> None:
        self._store.warm()


class _TokenBucket:
    """One bucket of tokens for all threads.

    Whoever finds it not in debt takes what he needs at once, and the next one waits until the debt is
    worked off: no window is ever too large for the bucket.
    """

    def __init__(
        self, rate_bytes_per_s: Callable[[], float | None], monotonic: Callable[[], float]
    ) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._level_bytes = 0.0
        self._seen_mono_s = monotonic()
        self._under_way = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until one more body may be under way."""
        with self._changed:
            while (rate := self._rate_bytes_per_s()) and self._under_way >= max(
                1, rate // WINDOW_BYTES
            ):
                self._changed.wait(_POLL_S)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify()

    def spend(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may go."""
        if not self._rate_bytes_per_s():
            return
        with self._changed:
            while rate := self._rate_bytes_per_s():
                now_mono_s = self._monotonic()
                earned_bytes = (now_mono_s - self._seen_mono_s) * rate
                # No credit for times when nobody had anything to send, but for waking up late.
                self._level_bytes = min(self._level_bytes + earned_bytes, rate * _POLL_S)
                self._seen_mono_s = now_mono_s
                if self._level_bytes >= 0:
                    self._level_bytes -= size_bytes
                    return
                self._changed.wait(min(_POLL_S, -self._level_bytes / rate + 0.001))


class _PacedBody:
    """A body whose windows wait for their turn."""

    def __init__(self, body: Body, pace: _TokenBucket) -> None:
        self.size_bytes = body.size_bytes
        self._body = body
        self._bucket = pace

    def rewind(self) -> None:
        self._body.rewind()

    def read_into(self, window: memoryview) -> None:
        # In this order: a body that nobody wants any more says so before it waits.
        self._body.read_into(window)
        self._bucket.spend(window.nbytes)
