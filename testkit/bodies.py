# SPDX-License-Identifier: Apache-2.0
"""Bodies and sinks of plain bytes, as the stores want them."""

from __future__ import annotations


class CountedBody:
    """A body that is in memory.  ``passes`` counts how often it was begun."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self.size_bytes = self._data.nbytes
        self._at = 0
        self.passes = 0

    def rewind(self) -> None:
        self._at = 0
        self.passes += 1

    def read_into(self, window: memoryview) -> None:
        end = self._at + window.nbytes
        assert end <= self.size_bytes, "asked for more than there is"
        window[:] = self._data[self._at : end]
        self._at = end


class CountedSink:
    """Keeps what it is given in memory.  ``passes`` counts how often it was begun."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.passes = 0

    @property
    def data(self) -> bytes:
        """What came since it was begun last."""
        return bytes(self._data)

    def rewind(self) -> None:
        self._data.clear()
        self.passes += 1

    def write(self, window: memoryview) -> None:
        self._data += window
