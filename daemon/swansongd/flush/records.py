# SPDX-License-Identifier: Apache-2.0
"""The records of the upload journal, and their entries: one line of JSON each.

An entry is checked field by field when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from swansong import bounds

from swansongd.digests import DIGEST_BYTES, PART_SIZE_BYTES_MAX, part_count, part_digest
from swansongd.flush.known_parts import HEAD_DIGEST_BYTES, cut, merged
from swansongd.model import CommitRef, Extent, StagedFile, StoredObject, StoredShard
from swansongd.stores.base import CRC32C_UNKNOWN, PartReceipt, Upload

LINE_BYTES_MAX = 8 * 2**20
PARTS_MAX = 10_000
"""Parts of a file that the journal holds."""
EXTENTS_MAX = 20_000
_CRC32C_MAX = 2**32 - 1

Entry = dict[str, Any]
"""One line of the journal, as JSON."""


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part that the store has acknowledged.

    ``digest`` is the BLAKE3 of its bytes, ``head`` that of its first bytes
    (:func:`~swansongd.flush.known_parts.head_digest`).
    """

    receipt: PartReceipt
    digest: bytes
    head: bytes = b""

    @property
    def crc32c(self) -> int:
        return self.receipt.crc32c


@dataclass(frozen=True, slots=True)
class EqualPart:
    """A part of a staged file that an earlier object has."""

    digest: bytes
    head: bytes
    crc32c: int
    extents: tuple[Extent, ...]


@dataclass(eq=False, slots=True)
class UploadRecord:
    """A multipart upload that is not completed, with its acknowledged parts by number.

    The upload has only those parts of the file that are not among the ``equal`` ones, by index from 0.
    """

    file: StagedFile
    upload: Upload
    parts: dict[int, PartRecord] = field(default_factory=dict)
    equal: Mapping[int, EqualPart] = field(default_factory=dict)
    indices: Sequence[int] = field(init=False)
    """The index in the file of each part of the upload, in order."""

    def __post_init__(self) -> None:
        every = range(part_count(self.file.size_bytes, self.upload.part_size_bytes))
        self.indices = [n for n in every if n not in self.equal] if self.equal else every

    @property
    def is_whole(self) -> bool:
        """Whether the store has acknowledged all parts."""
        return len(self.parts) == self.parts_max

    @property
    def parts_max(self) -> int:
        return part_count(self.upload.size_bytes, self.upload.part_size_bytes)

    @property
    def referenced(self) -> set[StoredObject]:
        """The objects of earlier sets that the shard will need."""
        return {extent.object for part in self.equal.values() for extent in part.extents}


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that is stored completely."""

    file: StagedFile
    shard: StoredShard
    heads: bytes = b""
    """The heads of its parts, concatenated; empty if they are unknown."""
    sent_key: str = ""
    """The object with the bytes that this set has sent; empty if it has sent nothing."""

    @property
    def referenced(self) -> set[StoredObject]:
        """The objects of earlier sets that the shard needs."""
        return {each.object for each in self.shard.extents if each.object.key != self.sent_key}

    @property
    def bytes_referenced(self) -> int:
        """Bytes of the shard that this set has not sent."""
        extents = self.shard.extents
        return sum(each.size_bytes for each in extents if each.object.key != self.sent_key)


FileRecord = UploadRecord | ShardRecord


# ---------------------------------------------------------------------- entries


def upload_entry(set_name: str, record: UploadRecord) -> Entry:
    upload = record.upload
    entry: Entry = {
        "is": "upload",
        "set": set_name,
        "file": _fields(record.file),
        "upload": [upload.key, upload.upload_id, upload.size_bytes, upload.part_size_bytes],
    }
    if not record.equal:
        return entry
    equal = [part for _, part in sorted(record.equal.items())]
    return entry | {
        "equal": sorted(record.equal),
        "digests": b"".join(part.digest for part in equal).hex(),
        "heads": b"".join(part.head for part in equal).hex(),
        "crc32c": [part.crc32c for part in equal],
        **_extent_fields(merged([extent for part in equal for extent in part.extents])),
    }


def part_entry(set_name: str, path: str, part: PartRecord) -> Entry:
    receipt = part.receipt
    return {
        "is": "part",
        "set": set_name,
        "path": path,
        "receipt": [receipt.number, receipt.etag, receipt.crc32c],
        "digest": part.digest.hex(),
        "head": part.head.hex(),
    }


def shard_entry(set_name: str, record: ShardRecord) -> Entry:
    shard = record.shard
    return {
        "is": "shard",
        "set": set_name,
        "file": _fields(record.file),
        "shard": [shard.part_size_bytes, shard.crc32c],
        "parts": shard.part_digests.hex(),
        "heads": record.heads.hex(),
        "sent": record.sent_key,
        **_extent_fields(shard.extents),
    }


def _extent_fields(extents: Sequence[Extent]) -> Entry:
    numbers = {stored: n for n, stored in enumerate(dict.fromkeys(e.object for e in extents))}
    return {
        "objects": [[stored.key, stored.size_bytes] for stored in numbers],
        "extents": [[numbers[e.object], e.offset_bytes, e.size_bytes] for e in extents],
    }


def shard_of(entry: Entry) -> ShardRecord:
    file = file_of(entry)
    part_size_bytes, crc32c = _list(entry, "shard", 2)
    shard = StoredShard(
        path=file.path,
        size_bytes=file.size_bytes,
        part_size_bytes=_part_size(part_size_bytes),
        part_digests=_bytes(entry, "parts"),
        crc32c=_crc32c(crc32c),
        extents=_extents(entry),
    )
    parts = part_count(shard.size_bytes, shard.part_size_bytes)
    if len(shard.part_digests) != parts * DIGEST_BYTES:
        raise ValueError("a shard does not have the digests of its parts")
    if sum(extent.size_bytes for extent in shard.extents) != shard.size_bytes:
        raise ValueError("the extents of a shard do not have its size")
    heads = _heads(entry, parts)
    return ShardRecord(file, shard, heads, bounds.text(entry.get("sent"), "a key"))


def upload_of(entry: Entry) -> UploadRecord:
    file = file_of(entry)
    key, upload_id, size_bytes, part_size_bytes = _list(entry, "upload", 4)
    upload = Upload(
        bounds.text(key, "a key"),
        bounds.text(upload_id, "an upload id"),
        _size(size_bytes),
        _part_size(part_size_bytes),
    )
    equal = _equal(entry, file, upload.part_size_bytes) if "equal" in entry else {}
    equal_bytes = sum(e.size_bytes for part in equal.values() for e in part.extents)
    if upload.size_bytes != file.size_bytes - equal_bytes:
        raise ValueError("an upload does not have the rest of its file")
    return UploadRecord(file, upload, equal=equal)


def _equal(entry: Entry, file: StagedFile, part_size_bytes: int) -> dict[int, EqualPart]:
    parts = part_count(file.size_bytes, part_size_bytes)
    if parts > PARTS_MAX:
        raise ValueError("the file has too many parts")
    listed = bounds.items(entry["equal"], "parts", PARTS_MAX)
    indices = [bounds.integer(index, "a part", 0, parts - 1) for index in listed]
    if indices != sorted(set(indices)):
        raise ValueError("the parts are not in order")
    digests, heads = _bytes(entry, "digests"), _heads(entry, len(indices))
    if len(digests) != len(indices) * DIGEST_BYTES:
        raise ValueError("a part has no digest")
    crcs = [_crc32c(value) for value in _list(entry, "crc32c", len(indices))]
    extents = _extents(entry)
    starts = list(accumulate((extent.size_bytes for extent in extents), initial=0))
    equal, offset = {}, 0
    for n, index in enumerate(indices):
        size_bytes = min(part_size_bytes, file.size_bytes - index * part_size_bytes)
        equal[index] = EqualPart(
            part_digest(digests, n),
            heads[n * HEAD_DIGEST_BYTES : (n + 1) * HEAD_DIGEST_BYTES],
            crcs[n],
            tuple(cut(extents, starts, offset, size_bytes)),
        )
        offset += size_bytes
    if offset != starts[-1]:
        raise ValueError("the extents do not have the size of the parts")
    return equal


def part_of(entry: Entry, parts_max: int) -> PartRecord:
    number, etag, crc32c = _list(entry, "receipt", 3)
    receipt = PartReceipt(
        bounds.integer(number, "a part number", 1, parts_max),
        bounds.text(etag, "an ETag"),
        bounds.integer(crc32c, "a CRC32C", CRC32C_UNKNOWN, _CRC32C_MAX),
    )
    digest = _bytes(entry, "digest")
    if len(digest) != DIGEST_BYTES:
        raise ValueError("a part has no digest")
    return PartRecord(receipt, digest, _heads(entry, 1, "head"))


def set_of(entry: Entry) -> str:
    return text_of(entry, "set")


def text_of(entry: Entry, name: str) -> str:
    return bounds.text(entry.get(name), name)


def ref_fields(ref: CommitRef) -> list[int]:
    return [ref.generation, ref.step, int(ref.is_final)]


def ref_of(entry: Entry) -> CommitRef:
    generation, step, is_final = _list(entry, "ref", 3)
    return CommitRef(
        bounds.integer(generation, "a generation", 0, bounds.BYTES_MAX),
        bounds.integer(step, "a step", 0, bounds.BYTES_MAX),
        bool(bounds.integer(is_final, "is_final", 0, 1)),
    )


def file_of(entry: Entry) -> StagedFile:
    path, size_bytes, mtime_ns, inode = _list(entry, "file", 4)
    return StagedFile(
        path=bounds.text(path, "a path"),
        size_bytes=_size(size_bytes),
        mtime_ns=bounds.integer(mtime_ns, "a time", -(2**63), 2**63 - 1),
        inode=bounds.integer(inode, "an inode", 0, 2**64 - 1),
    )


def _fields(file: StagedFile) -> list[str | int]:
    return [file.path, file.size_bytes, file.mtime_ns, file.inode]


def _extents(entry: Entry) -> tuple[Extent, ...]:
    objects = [
        _object(value) for value in bounds.items(entry.get("objects"), "objects", EXTENTS_MAX)
    ]
    listed = bounds.items(entry.get("extents"), "extents", EXTENTS_MAX)
    return tuple(_extent(value, objects) for value in listed)


def _object(value: Any) -> StoredObject:
    key, size_bytes = bounds.items(value, "an object", 2)
    return StoredObject(bounds.text(key, "a key"), _size(size_bytes))


def _extent(value: Any, objects: Sequence[StoredObject]) -> Extent:
    number, offset_bytes, size_bytes = bounds.items(value, "an extent", 3)
    stored = objects[bounds.integer(number, "an object", 0, len(objects) - 1)]
    extent = Extent(
        stored, _size(offset_bytes), bounds.integer(size_bytes, "a size", 1, stored.size_bytes)
    )
    if extent.offset_bytes + extent.size_bytes > stored.size_bytes:
        raise ValueError("an extent leads beyond its object")
    return extent


def _list(entry: Entry, name: str, length: int) -> list[Any]:
    found = bounds.items(entry.get(name), name, length)
    if len(found) != length:
        raise bounds.BoundsError(f"{name} has {len(found)} items, not {length}")
    return found


def _size(value: Any) -> int:
    return bounds.integer(value, "a size", 0, bounds.BYTES_MAX)


def _part_size(value: Any) -> int:
    return bounds.integer(value, "a part size", 1, PART_SIZE_BYTES_MAX)


def _crc32c(value: Any) -> int:
    return bounds.integer(value, "a CRC32C", 0, _CRC32C_MAX)


def _bytes(entry: Entry, name: str) -> bytes:
    return bytes.fromhex(bounds.text(entry.get(name), name, LINE_BYTES_MAX))


def _heads(entry: Entry, parts: int, name: str = "heads") -> bytes:
    heads = _bytes(entry, name)
    if len(heads) not in (0, parts * HEAD_DIGEST_BYTES):
        raise ValueError("a part has no head")
    return heads
