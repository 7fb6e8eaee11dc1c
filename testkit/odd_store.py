# SPDX-License-Identifier: Apache-2.0
"""A real store whose answers can be spoiled, delayed or counted while they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swansongd.stores.base import Sink
from swansongd.stores.file.store import FileStore


@dataclass
class OddSink:
    """Hands on what it gets, after something was done to it."""

    sink: Sink
    instead: Callable[[memoryview], object]

    def rewind(self) -> None:
        self.sink.rewind()

    def write(self, window: memoryview) -> None:
        self.instead(window)
        self.sink.write(window)


class OddStore(FileStore):
    """A file store that counts what it gave, and does something to it on the way.

    Args:
        directory: of the store.
        instead: called with the key, the offset of the range, and each window before it is handed on.
    """

    def __init__(
        self,
        directory: Path,
        instead: Callable[[str, int, memoryview], object] = lambda *_: None,
    ) -> None:
        super().__init__(f"file://{directory}")
        self.instead = instead
        self.given: list[tuple[str, int, int]] = []
        """Key, offset and size of each range that was asked for."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if size_bytes:  # nothing is asked of a store for no bytes
            self.given.append((key, offset, size_bytes))
        odd = OddSink(sink, lambda window: self.instead(key, offset, window))
        super().get_range(key, offset, size_bytes, odd)

    @property
    def given_bytes(self) -> int:
        return sum(size_bytes for _, _, size_bytes in self.given)
