# SPDX-License-Identifier: Apache-2.0
"""Bodies and sinks in memory, which count their passes."""

from __future__ import annotations


class CountedBody:
    """A body in memory.  ``passes`` counts the calls of ``rewind``."""

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
        assert end <= self.size_bytes, "read beyond the end"
        window[:] = self._data[self._at : end]
        self._at = end


class CountedSink:
    """A sink in memory.  ``passes`` counts the calls of ``rewind``."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.passes = 0

    @property
    def data(self) -> bytes:
        """The bytes since the last ``rewind``."""
        return bytes(self._data)

    def rewind(self) -> None:
        self._data.clear()
        self.passes += 1

    def write(self, window: memoryview) -> None:
        self._data += window
