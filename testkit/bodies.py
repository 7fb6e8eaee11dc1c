# SPDX-License-Identifier: Apache-2.0
"""Bodies that end early, and sinks in memory."""

from __future__ import annotations

import itertools

from swansong_bucket.stores.base import WINDOW_BYTES, Moved


def torn(error: BaseException, windows: int = 0) -> Moved:
    """A :data:`Moved` that raises ``error`` before the window with this number, counted from 0."""
    numbers = itertools.count()

    def moved(_size_bytes: int) -> None:
        if next(numbers) == windows:
            raise error

    return moved


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
        assert 0 < window.nbytes <= WINDOW_BYTES
        self._data += window
