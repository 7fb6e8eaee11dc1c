# SPDX-License-Identifier: Apache-2.0
"""Copies objects from one store to another, and verifies their bytes before the second store completes them.

An object moves in chunks.  A chunk is read into memory, compared with the digests, and sent.  Chunks of a
large object move in parallel if no digest covers bytes of two chunks; otherwise one after another.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swansongd.bucket.keys import set_directory
from swansongd.digests import part_count
from swansongd.errors import CorruptError, Exists, SwansongError, Transient
from swansongd.mirror.checks import Check, Verifier
from swansongd.mirror.gate import Gate
from swansongd.model import StoredObject
from swansongd.stores.base import BytesBody, ObjectStore, PartReceipt, Upload
from swansongd.util.threads import parallel

CHUNK_BYTES = 16 * 2**20
CHUNK_BYTES_MAX = 128 * 2**20
"""Larger chunks would take too much memory: such an object moves in smaller ones, in one thread."""
_PARTS_MAX = 9_999
_LISTED_MIN = 3
"""With more objects under one prefix, a listing costs less than their HEADs."""

Moved = Callable[[int], None]
"""Takes the size of a chunk that the second store has acknowledged."""


class ObjectCopier:
    """Copies objects.

    Args:
        primary: the store that is read.
        mirror: the store that is written.
        gate: pauses transfers.
        stop: ends all transfers.
        connections: chunks in flight.
        chunk_bytes: usual size of a chunk.
        moved: called in any thread.
    """

    def __init__(
        self,
        primary: ObjectStore,
        mirror: ObjectStore,
        gate: Gate,
        stop: threading.Event,
        *,
        connections: int,
        chunk_bytes: int = CHUNK_BYTES,
        moved: Moved = lambda _size_bytes: None,
    ) -> None:
        self._primary = primary
        self._mirror = mirror
        self._gate = gate
        self._stop = stop
        self._connections = connections
        self._chunk_bytes = chunk_bytes
        self._moved = moved
        self.uploads: set[str] = set()
        """Ids of the multipart uploads in progress."""

    def missing(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """The objects that the mirror lacks.

        Raises:
            CorruptError: the mirror has an object of another size under a key.
            StoreError: the mirror failed.
        """
        # Objects of one flush have one prefix: one page of a listing covers a thousand of them.
        beside: defaultdict[str, list[StoredObject]] = defaultdict(list)
        for stored in objects:
            beside[set_directory(stored.key)].append(stored)
        absent: list[StoredObject] = []

        def look(prefix: str) -> None:
            sizes_bytes = self._sizes_bytes(prefix, beside[prefix])
            for wanted in beside[prefix]:
                size_bytes = sizes_bytes.get(wanted.key)
                if size_bytes is None:
                    absent.append(wanted)
                elif size_bytes != wanted.size_bytes:
                    raise _other(self._mirror, wanted.key)

        parallel(beside, look, threads=min(self._connections, len(beside)), stop=self._stop)
        return absent

    def _sizes_bytes(self, prefix: str, wanted: Sequence[StoredObject]) -> dict[str, int]:
        """Sizes of the objects that the mirror has, by key."""
        if len(wanted) >= _LISTED_MIN:
            return {info.key: info.size_bytes for info in self._mirror.list(prefix)}
        found = (self._mirror.head(stored.key) for stored in wanted)
        return {info.key: info.size_bytes for info in found if info is not None}

    def copy(self, objects: Mapping[StoredObject, Sequence[Check]]) -> None:
        """Copy these objects; each is in the mirror completely, or not at all.

        Args:
            objects: with the ranges to verify, by offset.

        Raises:
            CorruptError: the bytes of the store do not match a digest, or the mirror has other bytes.
            StoreError: a store failed.
            Stopped: the stop was set.
        """
        small, large = [], []
        for stored, checks in objects.items():
            size_bytes, is_aligned = self._chunking(stored, checks)
            if stored.size_bytes <= size_bytes:
                small.append(stored)
            else:
                large.append((stored, size_bytes, is_aligned))

        def whole(stored: StoredObject) -> None:
            self._copy_whole(stored, objects[stored])

        parallel(small, whole, threads=min(self._connections, len(small)), stop=self._stop)
        for stored, size_bytes, is_aligned in large:
            self._copy_chunks(stored, objects[stored], size_bytes, is_aligned=is_aligned)

    def _chunking(self, stored: StoredObject, checks: Sequence[Check]) -> tuple[int, bool]:
        """Size of the chunks, and whether each range lies within one chunk."""
        least_bytes = max(
            self._chunk_bytes,
            self._mirror.part_size_bytes_min,
            -(-stored.size_bytes // _PARTS_MAX),
        )
        unit_bytes = max((check.size_bytes for check in checks), default=1) or 1
        size_bytes = -(-least_bytes // unit_bytes) * unit_bytes
        is_aligned = size_bytes <= CHUNK_BYTES_MAX and all(
            check.offset_bytes // size_bytes == (check.end_bytes - 1) // size_bytes
            for check in checks
            if check.size_bytes
        )
        return (size_bytes, True) if is_aligned else (least_bytes, False)

    def _copy_whole(self, stored: StoredObject, checks: Sequence[Check]) -> None:
        data = self._read(stored, 0, stored.size_bytes)
        Verifier(stored.key, checks).feed(0, data)
        try:
            self._gate.run(lambda: self._mirror.put_shard(stored.key, _Body(data, self._gate)))
        except Exists:
            raise _other(self._mirror, stored.key) from None
        self._moved(stored.size_bytes)

    def _copy_chunks(
        self, stored: StoredObject, checks: Sequence[Check], size_bytes: int, *, is_aligned: bool
    ) -> None:
        upload = self._mirror.begin(stored.key, stored.size_bytes, size_bytes)
        self.uploads.add(upload.upload_id)
        count = part_count(stored.size_bytes, size_bytes)
        receipts: dict[int, PartReceipt] = {}
        in_order = Verifier(stored.key, checks)
        by_chunk: dict[int, list[Check]] = {}
        for check in checks:
            by_chunk.setdefault(check.offset_bytes // size_bytes, []).append(check)

        def chunk(number: int) -> None:
            offset = (number - 1) * size_bytes
            data = self._read(stored, offset, upload.part_length_bytes(number))
            verifier = in_order
            if is_aligned:
                verifier = Verifier(stored.key, by_chunk.get(number - 1, ()))
            verifier.feed(offset, data)
            receipts[number] = self._gate.run(
                lambda: self._mirror.put_part(upload, number, _Body(data, self._gate))
            )
            self._moved(data.nbytes)

        try:
            threads = min(self._connections, count) if is_aligned else 1
            parallel(range(1, count + 1), chunk, threads=threads, stop=self._stop)
            self._mirror.complete(upload, [receipts[number] for number in range(1, count + 1)])
        except BaseException:
            self._abort(upload)
            raise
        finally:
            self.uploads.discard(upload.upload_id)

    def _abort(self, upload: Upload) -> None:
        with suppress(SwansongError):  # the sweep aborts what is left
            self._mirror.abort(upload.key, upload.upload_id)

    def _read(self, stored: StoredObject, offset: int, size_bytes: int) -> memoryview:
        sink = _ChunkSink(size_bytes, self._gate)
        self._gate.run(lambda: self._primary.get_range(stored.key, offset, size_bytes, sink))
        return sink.data


class _ChunkSink:
    """Collects a chunk in memory; ends the request when copies must pause."""

    def __init__(self, size_bytes: int, gate: Gate) -> None:
        self.data = memoryview(bytearray(size_bytes))
        self._at = 0
        self._gate = gate

    def rewind(self) -> None:
        self._at = 0

    def write(self, window: memoryview) -> None:
        self._gate.check()
        end = self._at + window.nbytes
        if end > self.data.nbytes:
            raise Transient("the store sent more bytes than the requested range has")
        self.data[self._at : end] = window
        self._at = end


class _Body(BytesBody):
    """A chunk that ends its request when copies must pause."""

    def __init__(self, data: memoryview, gate: Gate) -> None:
        super().__init__(data)
        self._gate = gate

    def read_into(self, window: memoryview) -> None:
        self._gate.check()
        super().read_into(window)


def _other(mirror: ObjectStore, key: str) -> CorruptError:
    return CorruptError(
        f"the mirror has other bytes under {mirror.url}/{key}",
        hint="Delete that object if no VM of this run wrote it, or choose another mirror.url",
    )
