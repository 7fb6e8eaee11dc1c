# SPDX-License-Identifier: Apache-2.0
"""Copies chunks from one store to another, and verifies them by the digests in their names.

A chunk is read into memory, compared with its name, and then sent: no damaged byte reaches the mirror, and a
repeated request needs no second read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from blake3 import blake3

from swansong_bucket.errors import CorruptError, Exists, NotFound, Permanent
from swansong_bucket.mirror.gate import Gate
from swansong_bucket.model import Chunk
from swansong_bucket.retention.survey import stored_objects
from swansong_bucket.stores.base import Body, BytesSink, ObjectStore
from swansong_bucket.util.threads import parallel

VERIFIED_MAX = 200_000
"""Verified chunks that are remembered, besides those of the manifest that is being copied."""
_LISTED_MIN = 100
"""With more chunks of one generation, a listing costs less than their HEADs."""


Moved = Callable[[int], None]
"""Takes the size of a chunk that the second store has acknowledged."""


@dataclass(eq=False, repr=False)
class ChunkCopier:
    """Copies chunks.

    Args:
        primary: the store that is read.
        mirror: the store that is written.
        gate: pauses transfers.
        stop: ends all transfers.
        connections: chunks in flight, each of them in memory.
        moved: called in any thread.
    """

    primary: ObjectStore
    mirror: ObjectStore
    gate: Gate
    stop: threading.Event
    _: KW_ONLY
    connections: int
    moved: Moved = lambda _size_bytes: None
    verified: set[str] = field(init=False, default_factory=set)
    """Keys of chunks that this process has written to the mirror, or has read back from it."""

    def absent(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that the mirror lacks.

        Raises:
            CorruptError: the mirror has an object of another size under a key.
            StoreError: the mirror failed.
        """
        if len(self.verified) > VERIFIED_MAX:
            self.verified &= {chunk.key for chunk in chunks}
        sizes_bytes: dict[str, int] = {}
        of_directory: defaultdict[str, set[str]] = defaultdict(set)
        for chunk in chunks:
            of_directory[chunk.key.rpartition("/")[0]].add(chunk.key)
        few: list[str] = []
        for directory, keys in of_directory.items():
            if len(keys) <= _LISTED_MIN:
                few += keys
                continue
            for info in stored_objects(self.mirror, f"{directory}/"):
                if info.key in keys:
                    sizes_bytes[info.key] = info.size_bytes

        def head(key: str) -> None:
            if (info := self.mirror.head(key)) is not None:
                sizes_bytes[key] = info.size_bytes

        parallel(few, head, threads=self.connections, stop=self.stop)
        for chunk in chunks:
            if sizes_bytes.get(chunk.key, chunk.size_bytes) != chunk.size_bytes:
                raise self._other(chunk)
        return [chunk for chunk in chunks if chunk.key not in sizes_bytes]

    def copy(self, chunks: Collection[Chunk]) -> None:
        """Copy these chunks.

        Raises:
            CorruptError: the bytes of the store do not match a name, or the mirror has other bytes.
            StoreError: a store failed.
            Stopped: the stop was set.
        """
        parallel(chunks, self._copy, threads=self.connections, stop=self.stop)

    def verify(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks back from the mirror that are not verified yet; raises as :meth:`copy`."""
        unverified = [chunk for chunk in chunks if chunk.key not in self.verified]
        parallel(unverified, self._verify, threads=self.connections, stop=self.stop)

    def _copy(self, chunk: Chunk) -> None:
        try:
            data = self._read(self.primary, chunk)
        except (NotFound, Permanent):
            self._expect_in_store(chunk)
            raise
        if blake3(data).digest() != chunk.digest:
            raise CorruptError(f"the bytes of {chunk.key} do not match the digest in its name")
        check = self.gate.check
        try:
            self.gate.run(lambda: self.mirror.create(chunk.key, Body(data, lambda _: check())))
        except Exists:
            raise self._other(chunk) from None
        self.verified.add(chunk.key)
        self.moved(chunk.size_bytes)

    def _verify(self, chunk: Chunk) -> None:
        try:
            data = self._read(self.mirror, chunk)
        except NotFound:  # retention of the mirror has deleted it
            self._copy(chunk)
            return
        if blake3(data).digest() != chunk.digest:
            raise self._other(chunk)
        self.verified.add(chunk.key)

    def _read(self, store: ObjectStore, chunk: Chunk) -> memoryview:
        sink = _ChunkSink(chunk.size_bytes, self.gate)
        self.gate.run(lambda: store.get_range(chunk.key, 0, chunk.size_bytes, sink))
        return memoryview(sink.data)

    def _expect_in_store(self, chunk: Chunk) -> None:
        """Raise CorruptError if the primary store lacks the chunk, or has it in another size."""
        info = self.primary.head(chunk.key)
        if info is None:
            raise CorruptError(f"{chunk.key} is missing from the store")
        if info.size_bytes != chunk.size_bytes:
            raise CorruptError(
                f"{chunk.key} has {info.size_bytes} bytes in the store instead of {chunk.size_bytes}"
            )

    def _other(self, chunk: Chunk) -> CorruptError:
        return CorruptError(
            f"the mirror has other bytes under {self.mirror.url}/{chunk.key}",
            hint="Delete that object, or choose another mirror.url",
        )


class _ChunkSink(BytesSink):
    """Collects a chunk in memory; pauses or ends the request when copies must pause."""

    def __init__(self, size_bytes: int, gate: Gate) -> None:
        super().__init__(size_bytes)
        self._gate = gate

    def write(self, window: memoryview) -> None:
        self._gate.check()
        super().write(window)
