# SPDX-License-Identifier: Apache-2.0
"""One flush while it runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from swansong_bucket.model import Staged

from swansongd.core.events import FlushProgress
from swansongd.flush.checks import ChunkChecks
from swansongd.flush.queue import UploadQueue
from swansongd.staging.scan import SetDirectory


@dataclass(eq=False, slots=True)
class ActiveFlush:
    """One flush, from its start until it is finished, failed, cancelled or replaced.

    Several flushes of one set may follow each other; they share its queue.  The engine's lock guards all
    fields except the counters of :meth:`count_sent`.
    """

    flush_id: str
    staged: Staged
    is_sealed: bool
    queue: UploadQueue
    workers: int = 0
    """Workers that carry out a task of this flush."""
    directory: SetDirectory | None = None
    """The directory of the set, from the first file that is opened to the last worker that leaves."""
    checks: ChunkChecks = field(default_factory=ChunkChecks)
    _compared_bytes: dict[int, int] = field(default_factory=dict)
    _sent_bytes: dict[int, int] = field(default_factory=dict)
    """By thread, so that counting needs no lock."""
    _compared_before_bytes: int = 0
    _sent_before_bytes: int = 0
    """Bytes in these counters that earlier flushes of the set have compared and sent."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far, in finished requests and in those in flight."""
        sent_bytes = _sum(self._sent_bytes) - self._sent_before_bytes
        return max(0, sent_bytes)  # a request that the earlier flush began may be repeated

    @property
    def moved_bytes(self) -> int:
        """Bytes sent or compared by this flush and by those that it continues."""
        return _sum(self._sent_bytes) + _sum(self._compared_bytes)

    def continues(self, earlier: ActiveFlush) -> None:
        """Count from here on the bytes of the chunks that ``earlier`` has in flight."""
        self._sent_bytes, self._compared_bytes = earlier._sent_bytes, earlier._compared_bytes
        self._sent_before_bytes = _sum(self._sent_bytes)
        self._compared_before_bytes = _sum(self._compared_bytes)
        self.checks = earlier.checks

    def count_sent(self, size_bytes: int) -> None:
        """Count bytes as sent; a negative number takes back those of a request that is repeated."""
        thread = threading.get_ident()
        self._sent_bytes[thread] = self._sent_bytes.get(thread, 0) + size_bytes

    def count_compared(self, size_bytes: int) -> None:
        """Count bytes that were read, and that the store has already."""
        thread = threading.get_ident()
        self._compared_bytes[thread] = self._compared_bytes.get(thread, 0) + size_bytes

    def progress(self) -> FlushProgress:
        compared_bytes = _sum(self._compared_bytes) - self._compared_before_bytes
        return FlushProgress(
            self.flush_id, self.queue.bytes_stored, self.sent_bytes, compared_bytes
        )

    def close_directory(self) -> None:
        if self.directory is not None:
            self.directory.close()
            self.directory = None


def _sum(counters: dict[int, int]) -> int:
    """The sum of counters that other threads change meanwhile."""
    return sum(list(counters.values()))
