# SPDX-License-Identifier: Apache-2.0
"""The base of a store around a store: every call reaches the inner store unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from swansong_bucket.stores.base import (
    Body,
    Folders,
    ObjectInfo,
    ObjectStore,
    Page,
    Sink,
)

T = TypeVar("T")


class Forwarding(ObjectStore):
    """The same store.  A subclass overrides the calls that it changes, or ``_try`` to change all.

    Args:
        store: the inner store.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.url = store.url
        self._store = store

    def _try(self, call: str, attempt: Callable[[], T]) -> T:  # noqa: ARG002 - for subclasses
        """Perform one call.  ``list`` performs one for each page.

        Args:
            call: names it in messages.
            attempt: performs it.
        """
        return attempt()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._try(f"put {key}", lambda: self._store.put(key, data, if_absent=if_absent))

    def get(self, key: str) -> bytes:
        return self._try(f"get {key}", lambda: self._store.get(key))

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self._try(f"get {key}", lambda: self._store.get_range(key, offset, size_bytes, sink))

    def head(self, key: str) -> ObjectInfo | None:
        return self._try(f"head {key}", lambda: self._store.head(key))

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        return self._try(f"list {prefix}", lambda: self._store.page(prefix, token, after=after))

    def folders(self, prefix: str, token: str | None) -> Folders:
        return self._try(f"list {prefix}", lambda: self._store.folders(prefix, token))

    def delete(self, key: str, *, if_tag: str = "") -> None:
        self._try(f"delete {key}", lambda: self._store.delete(key, if_tag=if_tag))

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        return self._try(f"delete {len(infos)} objects", lambda: self._store.delete_many(infos))

    def lock(self, key: str) -> float | None:
        return self._try(f"lock {key}", lambda: self._store.lock(key))

    def create(self, key: str, body: Body) -> None:
        self._try(f"create {key}", lambda: self._store.create(key, body))

    def check(self) -> None:
        self._try("check", self._store.check)

    def warm(self) -> None:
        self._try("warm", self._store.warm)
