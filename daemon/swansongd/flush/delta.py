# SPDX-License-Identifier: Apache-2.0
"""The delta of a file: the parts that the newest commit has, and the shard that results.

Only the other parts are sent, in order, as one object.  No IO.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swansongd.digests import part_count
from swansongd.flush.known_parts import KnownParts, merged
from swansongd.flush.records import EqualPart, PartRecord, ShardRecord, UploadRecord
from swansongd.model import Extent, StagedFile, StoredObject, StoredShard
from swansongd.stores.checksums import crc32c_of_parts

SAMPLE_SHARE = 1 / 16
SAMPLES_MAX = 16
_GOLDEN_RATIO = 0.618


@dataclass(eq=False, slots=True)
class Comparison:
    """The comparison of a file with the newest commit.

    A sample is compared first.  If it has no known part, the file is sent without a further comparison.
    The engine's lock guards all fields except ``found``.

    Args:
        known: the parts of the newest commit when the comparison began.
        candidates: indices of the parts that may be known.
    """

    known: KnownParts
    part_size_bytes: int
    candidates: Sequence[int]
    found: dict[int, EqualPart] = field(default_factory=dict)
    """The known parts, by index."""
    has_match: bool = False
    """Whether a part is known, even if the store has lost it."""
    compared: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)
    """The parts of the present round."""

    @property
    def missing(self) -> list[int]:
        """The parts that must be compared before anything is sent."""
        wanted = self.candidates if self.has_match else sample_of(self.candidates)
        return [index for index in wanted if index not in self.compared]

    def next_round(self) -> list[int]:
        """Begin the next round; returns the parts to compare that are not in flight."""
        self.queued = set(self.missing)
        return [index for index in sorted(self.queued) if index not in self.in_flight]

    def usable(self, known: KnownParts) -> dict[int, EqualPart]:
        """The known parts in objects that still belong to the newest commit."""
        return {
            index: part
            for index, part in self.found.items()
            if all(extent.object in known.objects for extent in part.extents)
        }

    @property
    def is_round_over(self) -> bool:
        return self.queued <= self.compared


def sample_of(indices: Sequence[int]) -> Sequence[int]:
    """One in sixteen of them, at least one and at most 16: one of each stretch of the file.

    The place within the stretch varies.  At equal distances, a file of which every eighth part has changed
    could look all new.
    """
    count = min(len(indices), max(1, min(SAMPLES_MAX, round(len(indices) * SAMPLE_SHARE))))
    places = (n + (0.5 + n * _GOLDEN_RATIO) % 1 for n in range(count))
    return [indices[int(place * len(indices) / count)] for place in places]


def missing_parts(file: StagedFile, part_size_bytes: int, equal: Collection[int]) -> list[int]:
    """The indices of the parts of a file that are not among the ``equal`` ones."""
    return [n for n in range(part_count(file.size_bytes, part_size_bytes)) if n not in equal]


def part_range(file: StagedFile, part_size_bytes: int, index: int) -> tuple[int, int]:
    """Offset and length of a part of a file; the last part has the rest."""
    offset = index * part_size_bytes
    return offset, min(part_size_bytes, file.size_bytes - offset)


def completed(record: UploadRecord) -> ShardRecord:
    """The record of the shard once an upload with all its parts is completed."""
    sent = [record.parts[number] for number in sorted(record.parts)]
    upload = record.upload
    return stored_record(record.file, upload.part_size_bytes, record.equal, upload.key, sent)


def stored_record(
    file: StagedFile,
    part_size_bytes: int,
    equal: Mapping[int, EqualPart],
    key: str,
    sent: Sequence[PartRecord],
) -> ShardRecord:
    """The record of a file that is stored: its ``equal`` parts in earlier objects, the others under ``key``.

    Args:
        sent: the other parts, in order.
    """
    parts = part_count(file.size_bytes, part_size_bytes)
    lengths = [part_range(file, part_size_bytes, index)[1] for index in range(parts)]
    own = StoredObject(key, file.size_bytes - sum(lengths[index] for index in equal))
    rest, offset = iter(sent), 0
    taken: list[EqualPart | PartRecord] = []
    extents: list[Extent] = []
    for index, size_bytes in enumerate(lengths):
        if (known := equal.get(index)) is not None:
            taken.append(known)
            extents.extend(known.extents)
            continue
        taken.append(next(rest))
        extents.append(Extent(own, offset, size_bytes))
        offset += size_bytes
    shard = StoredShard(
        path=file.path,
        size_bytes=file.size_bytes,
        part_size_bytes=part_size_bytes,
        part_digests=b"".join(part.digest for part in taken),
        crc32c=crc32c_of_parts(
            [(part.crc32c, size) for part, size in zip(taken, lengths, strict=True)]
        ),
        extents=merged(extents),
    )
    return ShardRecord(file, shard, b"".join(part.head for part in taken), key if sent else "")
