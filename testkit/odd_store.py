# SPDX-License-Identifier: Apache-2.0
"""A file store whose reads can be corrupted, delayed or counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.stores.base import Sink
from swansong_bucket.stores.file.store import FileStore


@dataclass
class OddSink:
    """Calls ``instead`` with each window, then passes the window on."""

    sink: Sink
    instead: Callable[[memoryview], object]

    def rewind(self) -> None:
        self.sink.rewind()

    def write(self, window: memoryview) -> None:
        self.instead(window)
        self.sink.write(window)


class OddStore(FileStore):
    """A file store that records the ranges that were read, and calls ``instead`` with their bytes.

    Args:
        directory: of the store.
        instead: called with the key, the offset of the range, and each window before it is passed on.
    """

    def __init__(
        self,
        directory: Path,
        instead: Callable[[str, int, memoryview], object] = lambda *_: None,
    ) -> None:
        super().__init__(f"file://{directory}")
        self.instead = instead
        self.given: list[tuple[str, int, int]] = []
        """Key, offset and size of each requested range."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if size_bytes:  # a store gets no request for 0 bytes
            self.given.append((key, offset, size_bytes))
        odd = OddSink(sink, lambda window: self.instead(key, offset, window))
        super().get_range(key, offset, size_bytes, odd)

    @property
    def given_bytes(self) -> int:
        return sum(size_bytes for _, _, size_bytes in self.given)
