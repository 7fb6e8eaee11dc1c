# SPDX-License-Identifier: Apache-2.0
"""One flush while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from swansong_bucket.model import Staged

from swansongd.core.events import FlushProgress
from swansongd.flush.queue import UploadQueue
from swansongd.staging.scan import SetDirectory


@dataclass(eq=False, slots=True)
class ActiveFlush:
    """One flush, from its start until it is finished, failed, cancelled or replaced.

    Several flushes of one set may follow each other; they share its queue.  The engine's lock guards all
    fields.
    """

    flush_id: str
    staged: Staged
    is_sealed: bool
    queue: UploadQueue
    sent_before_bytes: int
    compared_before_bytes: int
    """Bytes that earlier flushes of the set have sent and compared."""
    workers: int = 0
    """Workers that carry out a task of this flush."""
    directory: SetDirectory | None = None
    """The directory of the set, from the first file that is opened to the last worker that leaves."""

    def progress(self) -> FlushProgress:
        traffic = self.queue.traffic
        return FlushProgress(
            self.flush_id,
            self.queue.bytes_stored,
            # A request that an earlier flush began may be repeated.
            max(0, traffic.sent_bytes - self.sent_before_bytes),
            traffic.compared_bytes - self.compared_before_bytes,
        )

    def close_directory(self) -> None:
        if self.directory is not None:
            self.directory.close()
            self.directory = None
