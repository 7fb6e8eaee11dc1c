# SPDX-License-Identifier: Apache-2.0
"""The upload journal: which parts and shards the store has acknowledged, so that a restarted daemon resumes.

The journal is one file in the daemon's own directory.  Each line is an entry: JSON, preceded by the digest
of the file up to here.  Reading ends at the first line with a wrong digest.  So a torn tail, a hole and a
repeated line lose only the entries from there on.  The file is never synced: after SIGKILL the kernel still
has all of it, and entries lost in a power cut only cause bytes to be sent again.  An entry proves nothing:
the flush asks the store to confirm the entries of an earlier daemon.

The file is read only if its directory and the file belong to this user, and each entry is checked field by
field.  A flush uses the content in memory, as :class:`UploadRecord` and :class:`ShardRecord`.  All methods
are thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3
from swansong import bounds, openat

from swansongd.digests import DIGEST_BYTES, PART_SIZE_BYTES_MAX, part_count
from swansongd.model import Extent, StagedFile, StoredObject, StoredShard
from swansongd.stores.base import CRC32C_UNKNOWN, PartReceipt, Upload

FILE_NAME = "uploads.journal"
_TEMPORARY = f".{FILE_NAME}.new"
SETS_MAX = 4
"""Sets in the journal; a further set replaces the oldest one."""
BYTES_MAX = 256 * 2**20
"""Largest file that is read; enough for a million parts."""
_COMPACT_OVER_BYTES = 4 * 2**20
_LINE_BYTES_MAX = 8 * 2**20
_CRC32C_MAX = 2**32 - 1
_EXTENTS_MAX = 20_000
_VERSION = 2

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

_log = structlog.get_logger(__name__)

Entry = dict[str, Any]
"""One line of the journal, as JSON."""


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part that the store has acknowledged.

    ``digest`` is the BLAKE3 of its bytes.
    """

    receipt: PartReceipt
    digest: bytes


@dataclass(eq=False, slots=True)
class UploadRecord:
    """A multipart upload that is not completed, with its acknowledged parts by number."""

    file: StagedFile
    upload: Upload
    parts: dict[int, PartRecord] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the store has acknowledged all parts."""
        return len(self.parts) == self.parts_max

    @property
    def parts_max(self) -> int:
        return part_count(self.upload.size_bytes, self.upload.part_size_bytes)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that is stored completely."""

    file: StagedFile
    shard: StoredShard
    is_referenced: bool = False
    """Whether another set has stored the object."""


FileRecord = UploadRecord | ShardRecord


@dataclass(slots=True)
class Contents:
    """The content of a journal."""

    sets: dict[str, dict[str, FileRecord]] = field(default_factory=dict)
    """By set and path."""
    known: dict[str, ShardRecord] = field(default_factory=dict)
    """The shards of the newest committed set, by path."""

    def apply(self, entry: Entry) -> None:
        """Apply one entry.

        Raises:
            ValueError: this version does not write such an entry.
        """
        match entry.get("is"):
            case "upload":
                self.put(_set(entry), UploadRecord(_file(entry), _upload(entry)))
            case "part":
                record = self.sets.get(_set(entry), {}).get(_text(entry, "path"))
                if isinstance(record, UploadRecord):
                    receipt = _receipt(entry, record.parts_max)
                    record.parts[receipt.number] = PartRecord(receipt, _digest(entry.get("digest")))
            case "shard":
                self.put(_set(entry), _shard(entry))
            case "known":
                record = _shard(entry)
                self.known[record.shard.path] = record
            case "dropped":
                records = self.sets.get(_set(entry), {})
                records.pop(_text(entry, "path"), None)
                if not records:
                    self.sets.pop(_set(entry), None)
            case "committed":
                records = self.sets.pop(_set(entry), {})
                self.known = {
                    path: record
                    for path, record in records.items()
                    if isinstance(record, ShardRecord)
                }
            case unknown:
                raise ValueError(unknown)

    def entries(self) -> Iterator[Entry]:
        """The fewest entries with this content."""
        for known in self.known.values():
            yield _shard_entry("", known) | {"is": "known"}
        for name, paths in self.sets.items():
            for path, record in paths.items():
                if isinstance(record, ShardRecord):
                    yield _shard_entry(name, record)
                    continue
                yield _upload_entry(name, record)
                for part in list(record.parts.values()):
                    yield _part_entry(name, path, part)

    def put(self, name: str, record: FileRecord) -> None:
        """Add or replace the record of a file."""
        while name not in self.sets and len(self.sets) >= SETS_MAX:
            del self.sets[next(iter(self.sets))]
        self.sets.setdefault(name, {})[record.file.path] = record


class UploadJournal:
    """The journal of one run and one store.

    The constructor reads the existing file and replaces it by a shorter one with the same content.  A failed
    write is logged; then a restarted daemon sends more bytes again.

    Args:
        directory: the daemon's own directory in staging.
        run, store_url: the journal of another run or store is ignored.
    """

    def __init__(self, directory: Path, *, run: str, store_url: str) -> None:
        self._directory = directory
        self._header: Entry = {
            "is": "journal", "version": _VERSION, "run": run, "store": store_url,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._fd = -1
        self._chain = ""
        self._size_bytes = 0
        self._compact_at_bytes = 0
        self._contents = replay(self._read(), self._header)
        with self._lock:
            self._rewrite()

    def records_of(self, set_name: str) -> dict[str, FileRecord]:
        """The records of a set, by path."""
        with self._lock:
            return dict(self._contents.sets.get(set_name, {}))

    def known(self, path: str) -> ShardRecord | None:
        """The shard of the newest committed set under this path."""
        with self._lock:
            return self._contents.known.get(path)

    def shard_of(self, file: StagedFile) -> StoredShard | None:
        """The shard with the bytes of an unchanged file in staging; None if it is unknown."""
        with self._lock:
            contents = self._contents
            records = [paths.get(file.path) for paths in contents.sets.values()]
            for record in (contents.known.get(file.path), *records):
                if isinstance(record, ShardRecord) and record.file == file:
                    return record.shard
        return None

    def holds_upload(self, upload_id: str) -> bool:
        """Whether a flush may still resume this upload."""
        with self._lock:
            return any(
                isinstance(record, UploadRecord) and record.upload.upload_id == upload_id
                for paths in self._contents.sets.values()
                for record in paths.values()
            )

    def upload_begun(self, set_name: str, file: StagedFile, upload: Upload) -> UploadRecord:
        with self._lock:
            self._take(_upload_entry(set_name, UploadRecord(file, upload)))
            record = self._contents.sets[set_name][file.path]
        assert isinstance(record, UploadRecord)
        return record

    def part_stored(
        self, set_name: str, record: UploadRecord, receipt: PartReceipt, digest: bytes
    ) -> None:
        part = PartRecord(receipt, digest)
        path = record.file.path
        body = _encoded(_part_entry(set_name, path, part))
        with self._lock:
            record.parts[receipt.number] = part
            # Otherwise the set was forgotten, or the upload was restarted, in the meantime.
            if self._contents.sets.get(set_name, {}).get(path) is record:
                self._append(body)

    def shard_stored(self, set_name: str, record: ShardRecord) -> None:
        self.shards_stored(set_name, [record])

    def shards_stored(self, set_name: str, records: Sequence[ShardRecord]) -> None:
        """Note complete shards, in one write."""
        bodies = [_encoded(_shard_entry(set_name, record)) for record in records]
        with self._lock:
            for record in records:
                self._contents.put(set_name, record)
            self._append(*bodies)

    def committed(self, set_name: str, shards: Sequence[StoredShard]) -> None:
        """Note that the set is committed as these shards; later sets may reference them."""
        with self._lock:
            records = self._contents.sets.get(set_name)
            named = set(shards)
            if records is None:
                return
            for path, record in list(records.items()):
                if not isinstance(record, ShardRecord) or record.shard not in named:
                    self._take({"is": "dropped", "set": set_name, "path": path})
            self._take({"is": "committed", "set": set_name})

    def seed(self, shards: Sequence[StoredShard]) -> None:
        """Note the shards of the newest commit of an earlier VM, unless a commit of this VM is known."""
        with self._lock:
            if self._contents.known:
                return
            for shard in shards:
                file = StagedFile(path=shard.path, size_bytes=shard.size_bytes, mtime_ns=0, inode=0)
                self._take(_shard_entry("", ShardRecord(file, shard)) | {"is": "known"})

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    # ------------------------------------------------------------------ the file, under the lock

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        own_fd = openat.open_directory(self._directory, owners={os.geteuid()})
        try:
            yield own_fd
        finally:
            os.close(own_fd)

    def _read(self) -> bytes:
        try:
            with self._opened() as own_fd:
                return openat.read_file(
                    FILE_NAME, dir_fd=own_fd, max_bytes=BYTES_MAX, owners={os.geteuid()}
                )
        except FileNotFoundError:
            return b""
        except OSError as error:
            _log.warning(
                "journal_not_read",
                error=str(error),
                hint="Uploads of an earlier daemon are not resumed; their shards are sent again",
            )
            return b""

    def _take(self, entry: Entry) -> None:
        self._contents.apply(entry)
        self._append(_encoded(entry))

    def _append(self, *bodies: bytes) -> None:
        if self._fd < 0:
            return
        lines = []
        for body in bodies:
            line, self._chain = _line(body, self._chain)
            lines.append(line)
        data = b"".join(lines)
        try:
            openat.write_all(self._fd, data)
        except OSError as error:
            self._stop_writing(error)
            return
        self._size_bytes += len(data)
        if self._size_bytes > self._compact_at_bytes:
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by the shortest one with the same content."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        lines = []
        self._chain = ""
        for entry in (self._header, *self._contents.entries()):
            line, self._chain = _line(_encoded(entry), self._chain)
            lines.append(line)
        data = b"".join(lines)
        try:
            with self._opened() as own_fd:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_TEMPORARY, dir_fd=own_fd)  # a daemon was killed before the rename
                flags = os.O_WRONLY | os.O_APPEND
                self._fd = openat.create_file(_TEMPORARY, dir_fd=own_fd, flags=flags)
                openat.write_all(self._fd, data)
                os.rename(_TEMPORARY, FILE_NAME, src_dir_fd=own_fd, dst_dir_fd=own_fd)
        except OSError as error:
            self._stop_writing(error)
        self._size_bytes = len(data)
        self._compact_at_bytes = 2 * len(data) + _COMPACT_OVER_BYTES

    def _stop_writing(self, error: OSError) -> None:
        """Write nothing more until the next start: lines after a torn line would not be read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _log.warning(
            "journal_not_written",
            error=str(error),
            hint="Free space in staging; a daemon that restarts now sends stored parts again",
        )


def replay(data: bytes, header: Mapping[str, Any]) -> Contents:
    """The content of a journal up to the first damaged line; empty if it does not begin with ``header``."""
    contents = Contents()
    chain = ""
    is_first = True
    begin = 0
    while (
        end := data.find(b"\n", begin, begin + _LINE_BYTES_MAX)
    ) >= 0:  # a torn line ends the loop
        try:
            entry, chain = _parse(data[begin:end], chain)
            if not is_first:
                contents.apply(entry)
            elif entry != header:
                break
        except ValueError:
            break
        is_first = False
        begin = end + 1
    return contents


def _encoded(entry: Entry) -> bytes:
    return _ENCODE(entry).encode()


def _line(body: bytes, chain: str) -> tuple[bytes, str]:
    """The line of an entry that follows the line with digest ``chain``, and the digest of the line."""
    chain = _chained(body, chain)
    return b"%b %b\n" % (chain.encode(), body), chain


def _parse(line: bytes, chain: str) -> tuple[Entry, str]:
    """The entry of a line that follows the line with digest ``chain``, and the digest of the line.

    Raises:
        ValueError: the digest is wrong, or the line contains no entry.
    """
    claimed, _, body = line.partition(b" ")
    chain = _chained(body, chain)
    if claimed != chain.encode():
        raise ValueError("the digest is wrong")
    return bounds.json_object(body, "the journal entry", _LINE_BYTES_MAX), chain


def _chained(body: bytes, chain: str) -> str:
    return blake3(chain.encode() + body).hexdigest(8)


# ---------------------------------------------------------------------- entries


def _upload_entry(set_name: str, record: UploadRecord) -> Entry:
    upload = record.upload
    fields = [upload.key, upload.upload_id, upload.size_bytes, upload.part_size_bytes]
    return {"is": "upload", "set": set_name, "file": _fields(record.file), "upload": fields}


def _part_entry(set_name: str, path: str, part: PartRecord) -> Entry:
    receipt = part.receipt
    return {
        "is": "part",
        "set": set_name,
        "path": path,
        "receipt": [receipt.number, receipt.etag, receipt.crc32c],
        "digest": part.digest.hex(),
    }


def _shard_entry(set_name: str, record: ShardRecord) -> Entry:
    shard = record.shard
    return {
        "is": "shard",
        "set": set_name,
        "file": _fields(record.file),
        "shard": [shard.part_size_bytes, shard.crc32c],
        "parts": shard.part_digests.hex(),
        "extents": [
            [each.object.key, each.object.size_bytes, each.offset_bytes, each.size_bytes]
            for each in shard.extents
        ],
        "is_referenced": record.is_referenced,
    }


def _fields(file: StagedFile) -> list[str | int]:
    return [file.path, file.size_bytes, file.mtime_ns, file.inode]


def _set(entry: Entry) -> str:
    return _text(entry, "set")


def _text(entry: Entry, name: str) -> str:
    return bounds.text(entry.get(name), name)


def _list(entry: Entry, name: str, length: int) -> list[Any]:
    found = bounds.items(entry.get(name), name, length)
    if len(found) != length:
        raise bounds.BoundsError(f"{name} has {len(found)} items, not {length}")
    return found


def _size(value: Any) -> int:
    return bounds.integer(value, "a size", 0, bounds.BYTES_MAX)


def _part_size(value: Any) -> int:
    return bounds.integer(value, "a part size", 1, PART_SIZE_BYTES_MAX)


def _digest(value: Any) -> bytes:
    return bytes.fromhex(bounds.text(value, "a digest", bounds.ID_CHARS_MAX))


def _file(entry: Entry) -> StagedFile:
    path, size_bytes, mtime_ns, inode = _list(entry, "file", 4)
    return StagedFile(
        path=bounds.text(path, "a path"),
        size_bytes=_size(size_bytes),
        mtime_ns=bounds.integer(mtime_ns, "a time", -(2**63), 2**63 - 1),
        inode=bounds.integer(inode, "an inode", 0, 2**64 - 1),
    )


def _upload(entry: Entry) -> Upload:
    key, upload_id, size_bytes, part_size_bytes = _list(entry, "upload", 4)
    return Upload(
        bounds.text(key, "a key"),
        bounds.text(upload_id, "an upload id"),
        _size(size_bytes),
        _part_size(part_size_bytes),
    )


def _receipt(entry: Entry, parts_max: int) -> PartReceipt:
    number, etag, crc32c = _list(entry, "receipt", 3)
    return PartReceipt(
        bounds.integer(number, "a part number", 1, parts_max),
        bounds.text(etag, "an ETag"),
        bounds.integer(crc32c, "a CRC32C", CRC32C_UNKNOWN, _CRC32C_MAX),
    )


def _shard(entry: Entry) -> ShardRecord:
    file = _file(entry)
    part_size_bytes, crc32c = _list(entry, "shard", 2)
    shard = StoredShard(
        path=file.path,
        size_bytes=file.size_bytes,
        part_size_bytes=_part_size(part_size_bytes),
        part_digests=bytes.fromhex(bounds.text(entry.get("parts"), "digests", _LINE_BYTES_MAX)),
        crc32c=bounds.integer(crc32c, "a CRC32C", 0, _CRC32C_MAX),
        extents=tuple(
            _extent(each) for each in bounds.items(entry.get("extents"), "extents", _EXTENTS_MAX)
        ),
    )
    parts = part_count(shard.size_bytes, shard.part_size_bytes)
    if len(shard.part_digests) != parts * DIGEST_BYTES:
        raise ValueError("a shard does not have the digests of its parts")
    if sum(extent.size_bytes for extent in shard.extents) != shard.size_bytes:
        raise ValueError("the extents of a shard do not have its size")
    return ShardRecord(file, shard, bounds.boolean(entry.get("is_referenced"), "is_referenced"))


def _extent(value: Any) -> Extent:
    key, object_bytes, offset_bytes, size_bytes = bounds.items(value, "an extent", 4)
    stored = StoredObject(bounds.text(key, "a key"), _size(object_bytes))
    extent = Extent(stored, _size(offset_bytes), _size(size_bytes))
    if extent.offset_bytes + extent.size_bytes > stored.size_bytes:
        raise ValueError("an extent leads beyond its object")
    return extent
