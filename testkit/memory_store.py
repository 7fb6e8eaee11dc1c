# SPDX-License-Identifier: Apache-2.0
"""An object store in memory, which records requests and calls hooks of a test.

It applies the contract of :mod:`swansong_bucket.stores.base` strictly: a key that is written with different
bytes is recorded as a fault.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from swansong_bucket.errors import (
    Changed,
    Exists,
    Locked,
    NotFound,
    Permanent,
    TooLarge,
    Transient,
)
from swansong_bucket.stores import base, checksums
from swansong_bucket.stores.base import (
    GET_BYTES_MAX,
    Body,
    Folders,
    ObjectInfo,
    Page,
    Sink,
    expect_few,
    listed,
)

WINDOW_BYTES = 100
"""Small: a body of a thousand bytes has several windows."""
PAGE_KEYS = 7
"""Small: a short listing has several pages."""


class MemoryStore:
    """The store.

    ``before(what, key)`` is called before each request, and may raise or wait.  ``after(what, key)`` is
    called after the request took effect; if it raises, the reply is lost.
    """

    def __init__(self) -> None:
        self.url = "memory://store"
        self.before: Callable[[str, str], object] = lambda *_: None
        self.after: Callable[[str, str], object] = lambda *_: None
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.bytes_sent = 0
        self.overwritten: list[str] = []
        """Keys that were written again with different bytes: a fault of the writer."""
        self.clock: Callable[[], float] = time.time
        """The store's clock, in Unix seconds."""
        self.written_unix_s: dict[str, float] = {}
        """Time of the last write of each object; one that a test placed into ``objects`` is new."""
        self.locked_until_unix_s: dict[str, float] = {}
        """End of the retention of an object."""
        self.lock_period_s: Callable[[str], float] = lambda _key: 0.0
        """Retention of new objects; 0: none."""
        self._lock = threading.Lock()

    def count(self, what: str) -> int:
        """Number of requests of a kind."""
        return Counter(name for name, _ in self.requests)[what]

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._request("put", key)
        with self._lock:
            if if_absent and key in self.objects:
                raise Exists(key)
            self._place(key, bytes(data))
        self.after("put", key)

    def get(self, key: str) -> bytes:
        self._request("get", key)
        if key not in self.objects:
            raise NotFound(key)
        if len(self.objects[key]) > GET_BYTES_MAX:
            raise TooLarge(f"{key} has more than {GET_BYTES_MAX} bytes")
        return self.objects[key]

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self._request("get", key)
        if key not in self.objects:
            raise NotFound(key)
        data = self.objects[key][offset : offset + size_bytes]
        if len(data) != size_bytes:
            raise Permanent(f"{key}: the range {offset}+{size_bytes} is not within the object")
        sink.rewind()
        for start in range(0, size_bytes, base.WINDOW_BYTES):
            sink.write(memoryview(data)[start : start + base.WINDOW_BYTES])

    def head(self, key: str) -> ObjectInfo | None:
        self._request("head", key)
        with self._lock:
            return self._info(key) if key in self.objects else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        """A page, sorted by reversed keys; each page except the first repeats a key of the previous page."""
        self._request("list", prefix)
        with self._lock:
            found = [key for key in self.objects if key.startswith(prefix) and key > after]
            found.sort(key=lambda key: key[::-1])
            start = int(token or 0)
            end = start + PAGE_KEYS
            infos = [self._info(key) for key in found[max(0, start - 1) : end]]
        return Page(infos, str(end) if end < len(found) else None)

    def folders(self, prefix: str, token: str | None) -> Folders:
        """A page; each page except the first repeats a name of the previous page."""
        self._request("folders", prefix)
        with self._lock:
            below = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        names = sorted({key.partition("/")[0] for key in below if "/" in key})
        start = int(token or 0)
        end = start + PAGE_KEYS
        return Folders(names[max(0, start - 1) : end], str(end) if end < len(names) else None)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        self._request("delete", key)
        with self._lock:
            self._remove(key, if_tag)
        self.after("delete", key)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        expect_few(infos)
        self._request("delete_many", infos[0].key if infos else "")
        remaining: dict[str, str] = {}
        for info in infos:
            with self._lock:
                try:
                    self._remove(info.key, info.tag)
                except (Changed, Locked) as error:
                    remaining[info.key] = str(error)
            self.after("delete_many", info.key)  # a crash between two objects
        return remaining

    def lock(self, key: str) -> float | None:
        period_s = self.lock_period_s(key)
        if not period_s:
            return None
        self._request("lock", key)
        with self._lock:
            if key not in self.objects:
                raise NotFound(key)
            self.locked_until_unix_s[key] = self.clock() + period_s
        self.after("lock", key)
        return self.locked_until_unix_s[key]

    def create(self, key: str, body: Body) -> None:
        self._request("create", key)
        body.rewind()
        while body.next_window(WINDOW_BYTES):
            pass
        stored = bytes(body.data)
        if body.crc32c != checksums.crc32c(stored):
            raise Transient(f"create {key}: the bytes do not match their checksum")
        with self._lock:
            if self.objects.get(key, stored) != stored:
                self.overwritten.append(key)
                raise Exists(key)
            self.bytes_sent += len(stored)
            if key not in self.objects:
                self._place(key, stored)
        self.after("create", key)

    def check(self) -> None:
        self._request("check", "")

    def warm(self) -> None:
        self._request("warm", "")

    def _request(self, what: str, key: str) -> None:
        self.requests.append((what, key))
        self.before(what, key)

    # The following functions are called with the lock held.

    def _place(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.written_unix_s[key] = self.clock()
        if period_s := self.lock_period_s(key):
            self.locked_until_unix_s[key] = self.clock() + period_s

    def _remove(self, key: str, if_tag: str) -> None:
        if key not in self.objects:
            return
        if if_tag not in ("", self._info(key).tag):
            raise Changed(f"delete {key}: another object than was listed")
        until_unix_s = self.locked_until_unix_s.get(key, 0.0)
        if until_unix_s > self.clock():
            raise Locked(f"delete {key}: locked until {until_unix_s}", until_unix_s=until_unix_s)
        del self.objects[key]
        self.written_unix_s.pop(key, None)
        self.locked_until_unix_s.pop(key, None)

    def _info(self, key: str) -> ObjectInfo:
        data = self.objects[key]
        now_unix_s = self.clock()
        written_unix_s = self.written_unix_s.setdefault(key, now_unix_s)
        tag = f"{checksums.crc32c(data):08x}-{written_unix_s}"
        return ObjectInfo(key, len(data), max(0.0, now_unix_s - written_unix_s), tag)
