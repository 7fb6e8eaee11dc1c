# SPDX-License-Identifier: Apache-2.0
"""Joins neighbouring small ranges of an object to runs: one request fetches each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from blake3 import blake3

from swansongd.errors import Transient
from swansongd.restore.target import RestoredFile

RUN_BYTES_MAX = 20 * 2**20
"""A pack with its last file; a request of this size saturates a connection."""
RUN_BYTES_MIN = 2 * 2**20
"""Below this size the latency of a request costs more than its bytes."""
_GAP_BYTES_MAX = 64 * 2**10
"""Bytes of other files that a run includes: reading them is faster than a further request."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Range(Generic[Item]):
    """A range of an object, and its purpose."""

    key: str
    offset_bytes: int
    size_bytes: int
    item: Item

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Run(Generic[Item]):
    """Ranges of one object in the order of their offsets, which do not overlap."""

    ranges: list[Range[Item]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.ranges[0].key

    @property
    def offset_bytes(self) -> int:
        return self.ranges[0].offset_bytes

    @property
    def size_bytes(self) -> int:
        return self.ranges[-1].end_bytes - self.offset_bytes

    def takes(self, following: Range[Item], run_bytes: int) -> bool:
        """Whether a range that begins after all others belongs into this run."""
        last = self.ranges[-1]
        gap_bytes = following.offset_bytes - last.end_bytes
        return (
            following.key == last.key
            and 0 <= gap_bytes <= _GAP_BYTES_MAX
            and following.end_bytes - self.offset_bytes <= run_bytes
        )


def joined(ranges: Iterable[Range[Item]], *, connections: int) -> list[Run[Item]]:
    """All ranges, in as few runs as keep all connections busy."""
    ordered = sorted(ranges, key=lambda each: (each.key, each.offset_bytes))
    total_bytes = sum(each.size_bytes for each in ordered)
    run_bytes = max(RUN_BYTES_MIN, min(RUN_BYTES_MAX, -(-total_bytes // connections)))
    runs: list[Run[Item]] = []
    for each in ordered:
        if runs and runs[-1].takes(each, run_bytes):
            runs[-1].ranges.append(each)
        else:
            runs.append(Run([each]))
    return runs


class RunSink(Generic[Item]):
    """Takes the bytes of a run, hashes each range, and writes it to its own file from the first byte.

    One file is open at a time.

    Args:
        opened: opens the file of an item, as a context; None: the bytes are only hashed.
        moved: called with the number of bytes of the ranges in each window.
        taken_back: called with the number of bytes that follow again.
    """

    def __init__(
        self,
        run: Run[Item],
        opened: Callable[[Item], AbstractContextManager[RestoredFile]] | None,
        *,
        moved: Callable[[int], None],
        taken_back: Callable[[int], None],
    ) -> None:
        self._run = run
        self._opened = opened
        self._moved = moved
        self._taken_back = taken_back
        self._file = ExitStack()
        self._done_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self.digests: list[bytes] = []
        """BLAKE3 of each range that is complete, in order."""
        self._at_bytes = self._run.offset_bytes
        self._begin_range()

    def _begin_range(self) -> None:
        self._hash = blake3()
        self._write: Callable[[memoryview, int], None] | None = None

    def rewind(self) -> None:
        self.close()
        self._taken_back(self._done_bytes)
        self._done_bytes = 0
        self._begin()

    def close(self) -> None:
        """Close the open file."""
        self._file.close()

    def write(self, window: memoryview) -> None:
        done_before_bytes = self._done_bytes
        while window.nbytes:
            if len(self.digests) == len(self._run.ranges):
                raise Transient("the store sent more bytes than the requested range has")
            window = window[self._take(self._run.ranges[len(self.digests)], window) :]
        self._moved(self._done_bytes - done_before_bytes)

    def _take(self, each: Range[Item], window: memoryview) -> int:
        """Take the first bytes of a window, which are before or within a range; returns their number."""
        offset_bytes = self._at_bytes - each.offset_bytes
        if offset_bytes < 0:
            skipped_bytes = min(-offset_bytes, window.nbytes)
            self._at_bytes += skipped_bytes
            return skipped_bytes
        window = window[: each.size_bytes - offset_bytes]
        self._hash.update(window)
        if self._opened is not None:
            if self._write is None:
                self._write = self._file.enter_context(self._opened(each.item)).write
            self._write(window, offset_bytes)
        self._at_bytes += window.nbytes
        self._done_bytes += window.nbytes
        if self._at_bytes == each.end_bytes:
            self.close()
            self.digests.append(self._hash.digest())
            self._begin_range()
        return window.nbytes
