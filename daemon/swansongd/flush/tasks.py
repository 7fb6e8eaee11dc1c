# SPDX-License-Identifier: Apache-2.0
"""The tasks of the flush workers, and the shards that they are about."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from swansongd.flush.delta import Comparison
from swansongd.flush.records import FileRecord, ShardRecord, UploadRecord
from swansongd.model import StagedFile


@dataclass(eq=False, slots=True)
class Shard:
    """The state of one file of a set while the set is flushed."""

    file: StagedFile
    key: str
    record: FileRecord | None = None
    """The progress so far; the journal holds the same record."""
    is_confirmed: bool = True
    """False for a record of an earlier daemon until the store has confirmed it."""
    comparison: Comparison | None = None
    """The comparison with the newest commit; None before it begins."""
    is_split: bool = False
    """Whether its missing parts have been queued."""
    is_advancing: bool = False
    """Whether a worker carries out an :class:`Advance` of it."""
    parts_in_flight: set[int] = field(default_factory=set)
    counted_bytes: int = 0
    """Its share of :attr:`UploadQueue.bytes_stored`."""
    restarts: int = 0

    @property
    def stored(self) -> ShardRecord | None:
        """The stored shard; None until all of it is stored."""
        return self.record if self.is_confirmed and isinstance(self.record, ShardRecord) else None

    @property
    def upload(self) -> UploadRecord | None:
        """The multipart upload of the shard; None before it begins and after it is completed."""
        return self.record if self.is_confirmed and isinstance(self.record, UploadRecord) else None


@dataclass(frozen=True, slots=True)
class Begin:
    """Read the journal's records of the set, and queue the work that is left."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Take the next step of a shard as a whole.

    The steps: confirm the journal's record with the store; compare the file with the newest commit;
    reference it, store a small file in one request, or begin a multipart upload; complete the upload.
    """

    shard: Shard


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send one part of a multipart upload."""

    shard: Shard
    number: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class ComparePart:
    """Compare one part of a file with the newest commit."""

    shard: Shard
    comparison: Comparison
    index: int
    """From 0."""


@dataclass(frozen=True, slots=True)
class SendPack:
    """Store small files: reference those whose bytes are stored, and send the others as one object."""

    shards: tuple[Shard, ...]
    key: str
    """Names the object, if one is sent; no other task has it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Check that the set did not change, and report it as stored."""


PartTask = ComparePart | SendPart
ShardTask = Advance | PartTask | SendPack
Task = Begin | ShardTask | Finish


class TaskOutcome(Enum):
    """The result of a shard task."""

    DONE = "done"
    RETRY = "retry"
    DEFERRED = "deferred"
    """The file cannot be read now; the next flush of the set tries again."""
