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

from swansongd.digests import part_count
from swansongd.flush.known_parts import KnownParts
from swansongd.flush.records import (
    EXTENTS_MAX,
    LINE_BYTES_MAX,
    PARTS_MAX,
    Entry,
    EqualPart,
    FileRecord,
    PartRecord,
    ShardRecord,
    UploadRecord,
    part_entry,
    part_of,
    ref_fields,
    ref_of,
    set_of,
    shard_entry,
    shard_of,
    text_of,
    upload_entry,
    upload_of,
)
from swansongd.model import CommitRef, StagedFile, StoredShard
from swansongd.stores.base import Upload

FILE_NAME = "uploads.journal"
_TEMPORARY = f".{FILE_NAME}.new"
SETS_MAX = 4
"""Sets in the journal; a further set replaces the oldest one."""
BYTES_MAX = 256 * 2**20
"""Largest file that is read; enough for a million parts."""
SEED_PARTS_MAX = 250_000
"""Parts of a commit of another VM: 4 TB, with 60 MB of memory.  Further shards are sent again."""
_COMPACT_OVER_BYTES = 4 * 2**20
_VERSION = 2

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Contents:
    """The content of a journal."""

    sets: dict[str, dict[str, FileRecord]] = field(default_factory=dict)
    """By set and path."""
    known: dict[str, ShardRecord] = field(default_factory=dict)
    """The shards of the newest commit, by path."""
    known_ref: CommitRef | None = None
    """The newest commit."""
    known_parts: KnownParts | None = None
    """The index of ``known``, once it was needed."""

    def apply(self, entry: Entry) -> None:
        """Apply one entry.

        Raises:
            ValueError: this version does not write such an entry.
        """
        match entry.get("is"):
            case "upload":
                self.put(set_of(entry), upload_of(entry))
            case "part":
                record = self.sets.get(set_of(entry), {}).get(text_of(entry, "path"))
                if isinstance(record, UploadRecord):
                    part = part_of(entry, record.parts_max)
                    record.parts[part.receipt.number] = part
            case "shard":
                self.put(set_of(entry), shard_of(entry))
            case "newest":
                self.known, self.known_ref, self.known_parts = {}, ref_of(entry), None
            case "known":
                record = shard_of(entry)
                self.known[record.shard.path] = record
                self.known_parts = None
            case "dropped":
                records = self.sets.get(set_of(entry), {})
                records.pop(text_of(entry, "path"), None)
                if not records:
                    self.sets.pop(set_of(entry), None)
            case "committed":
                ref = ref_of(entry)
                records = self.sets.pop(set_of(entry), {})
                stored = {p: each for p, each in records.items() if isinstance(each, ShardRecord)}
                self.known, self.known_ref, self.known_parts = stored, ref, None
            case unknown:
                raise ValueError(unknown)

    def entries(self) -> Iterator[Entry]:
        """The fewest entries with this content."""
        if self.known_ref is not None:
            yield _newest_entry(self.known_ref)
        for known in self.known.values():
            yield _known_entry(known)
        for name, paths in self.sets.items():
            for path, record in paths.items():
                if isinstance(record, ShardRecord):
                    yield shard_entry(name, record)
                    continue
                yield upload_entry(name, record)
                for part in list(record.parts.values()):
                    yield part_entry(name, path, part)

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

    def known_parts(self) -> KnownParts:
        """The parts of the newest commit."""
        with self._lock:
            contents = self._contents
            if contents.known_parts is None:
                known = contents.known.values()
                contents.known_parts = KnownParts((each.shard, each.heads) for each in known)
            return contents.known_parts

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

    def upload_begun(
        self,
        set_name: str,
        file: StagedFile,
        upload: Upload,
        equal: Mapping[int, EqualPart] | None = None,
    ) -> UploadRecord:
        """Note the upload of a file, except its ``equal`` parts."""
        record = UploadRecord(file, upload, equal=equal or {})
        with self._lock:
            self._contents.put(set_name, record)
            self._append(_encoded(upload_entry(set_name, record)))
        return record

    def part_stored(self, set_name: str, record: UploadRecord, part: PartRecord) -> None:
        path = record.file.path
        body = _encoded(part_entry(set_name, path, part))
        with self._lock:
            record.parts[part.receipt.number] = part
            # Otherwise the set was forgotten, or the upload was restarted, in the meantime.
            if self._contents.sets.get(set_name, {}).get(path) is record:
                self._append(body)

    def shard_stored(self, set_name: str, record: ShardRecord) -> None:
        self.shards_stored(set_name, [record])

    def shards_stored(self, set_name: str, records: Sequence[ShardRecord]) -> None:
        """Note complete shards, in one write."""
        bodies = [_encoded(shard_entry(set_name, record)) for record in records]
        with self._lock:
            for record in records:
                self._contents.put(set_name, record)
            self._append(*bodies)

    def is_current(self, set_name: str) -> bool:
        """Whether all objects that the shards of a set reference belong to the newest commit.

        A cleanup of the bucket may delete objects of earlier commits at any time.
        """
        known = self.known_parts()
        records = self.records_of(set_name).values()
        return all(record.referenced <= known.objects for record in records)

    def committed(self, set_name: str, shards: Sequence[StoredShard], ref: CommitRef) -> None:
        """Note that the set is committed as these shards; later sets may reference them."""
        with self._lock:
            records = self._contents.sets.get(set_name, {})
            newest = self._contents.known_ref
            named = set(shards) if newest is None or newest <= ref else set()
            for path, record in list(records.items()):
                if not isinstance(record, ShardRecord) or record.shard not in named:
                    self._take({"is": "dropped", "set": set_name, "path": path})
            if newest is None or newest <= ref:
                self._take({"is": "committed", "set": set_name, "ref": ref_fields(ref)})

    def superseded(self, ref: CommitRef) -> None:
        """Note the newest commit of the run: shards of an older commit are not referenced any more."""
        with self._lock:
            known = self._contents.known_ref
            if known is None or known < ref:
                self._take(_newest_entry(ref))

    def seed(self, ref: CommitRef, shards: Sequence[StoredShard]) -> None:
        """Note the shards of the newest commit, made by another VM, unless a newer one is known."""
        self.superseded(ref)
        with self._lock:
            if self._contents.known or self._contents.known_ref != ref:
                return
            parts_left = SEED_PARTS_MAX
            for shard in shards:
                parts = part_count(shard.size_bytes, shard.part_size_bytes)
                is_large = parts > min(PARTS_MAX, parts_left) or len(shard.extents) > EXTENTS_MAX
                if is_large:
                    continue
                parts_left -= parts
                file = StagedFile(path=shard.path, size_bytes=shard.size_bytes, mtime_ns=0, inode=0)
                self._take(_known_entry(ShardRecord(file, shard)))

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
        end := data.find(b"\n", begin, begin + LINE_BYTES_MAX)
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
    return bounds.json_object(body, "the journal entry", LINE_BYTES_MAX), chain


def _chained(body: bytes, chain: str) -> str:
    return blake3(chain.encode() + body).hexdigest(8)


def _newest_entry(ref: CommitRef) -> Entry:
    return {"is": "newest", "ref": ref_fields(ref)}


def _known_entry(record: ShardRecord) -> Entry:
    return shard_entry("", record) | {"is": "known"}
