# SPDX-License-Identifier: Apache-2.0
"""Copies one commit from the primary store to the mirror: claims, missing chunks, manifest, in this order.

The mirror has the layout of the store.  Each object is created and never replaced, so two copiers at once are
harmless.  The manifest comes last, byte for byte: a commit of the mirror is as whole as one of the store.

A chunk is read into memory, compared with its name, and then sent: no damaged byte reaches the mirror, and a
repeated request needs no second read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swansong_bucket.errors import (
    CorruptError,
    Exists,
    NotFound,
    Stopped,
)
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.mirror.fence import PromotedError, foreign_claim
from swansong_bucket.model import Chunk
from swansong_bucket.runs import catalog
from swansong_bucket.runs.commit import mark_suspect
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.transfer.chunks import MISSING
from swansong_bucket.transfer.reader import Reader, ReadOptions

VERIFIED_MAX = 200_000
"""Verified chunks that are remembered, besides those of the manifest that is being copied."""
RECORD_BYTES_MAX = 2**20
"""Larger farewells, resumptions and pins are not copied: no writer makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The result of the copy of a manifest and its data."""

    chunks: int
    """Chunks that were copied; the others were in the mirror."""
    size_bytes: int
    is_new: bool
    """Whether the mirror lacked the manifest."""


Planned = Callable[[int], None]
"""Takes the bytes that are about to be copied."""
Copied = Callable[[int], None]
"""Takes the size of a chunk that the mirror has acknowledged."""


class Copier:
    """Copies commits of one run.

    All methods raise PromotedError if the mirror was promoted, CorruptError if stored bytes do not match
    their names, StoreError if a store failed, and Stopped.

    Args:
        primary: the store with the commits; retries failed requests.
        mirror: retries failed requests, and limits the rate.
        keys: of the run.
        stop: ends all requests.
        connections: chunks in flight, each of them in memory.
        copied: called in any thread.
    """

    def __init__(
        self,
        primary: ObjectStore,
        mirror: ObjectStore,
        keys: RunKeys,
        stop: threading.Event,
        *,
        connections: int,
        copied: Copied = lambda _size_bytes: None,
    ) -> None:
        self._primary = primary
        self._mirror = mirror
        self._keys = keys
        self._stop = stop
        self._copied = copied
        options = ReadOptions(connections=connections, stop=stop)
        self._originals = Reader(primary, options)
        self._copies = Reader(mirror, options)
        self._verified: set[str] = set()
        """Keys of chunks that this process has written to the mirror, or has read back from it."""

    def lacks(self, chunk: Chunk) -> bool:
        """Whether this copier has neither written nor verified the chunk in the mirror."""
        return chunk.key not in self._verified

    def check_fence(self) -> None:
        """Raise PromotedError if the mirror has a claim that the primary store does not have."""
        foreign = foreign_claim(self._primary, self._mirror, self._keys)
        if foreign is not None:
            raise PromotedError(self._mirror.url, foreign)

    def copy_claims(self) -> None:
        """Copy the claims that the mirror lacks, in ascending order."""
        self.check_fence()
        copied = set(catalog.claimed(self._mirror, self._keys))
        for number in catalog.claimed(self._primary, self._keys):
            if number not in copied and not self._put(self._keys.generation(number)):
                raise PromotedError(self._mirror.url, number)

    def absent(self) -> list[catalog.Commit]:
        """The commits of the primary store of which the mirror lacks a manifest, newest first."""
        known = {
            key
            for commit in catalog.list_commits(self._mirror, self._keys)
            for key in commit.manifest_keys.values()
        }
        commits = catalog.list_commits(self._primary, self._keys)
        return [c for c in commits if not known.issuperset(c.manifest_keys.values())]

    def absent_of(self, place: ManifestPlace) -> list[Chunk]:
        """The chunks of a manifest that the mirror lacks."""
        return self._absent(self._read_manifest(place)[1].chunks)

    def copy(self, place: ManifestPlace, planned: Planned = lambda _size_bytes: None) -> CopyResult:
        """Copy a manifest, after the claims and the chunks that it names.

        Raises:
            MissingError: the primary store has no such manifest any more.
        """
        key = self._keys.commit(place.ref, place.node, place.nodes)
        data, manifest = self._read_manifest(place)
        self.copy_claims()
        is_new = self._mirror.head(key) is None
        if not is_new:
            self._expect_same(key, data)
        absent = self._absent(manifest.chunks)
        size_bytes = sum(chunk.size_bytes for chunk in absent)
        planned(size_bytes)
        try:
            self._originals.each(absent, self._send)
            self._verify(manifest.chunks)
            # Retention of the mirror may have deleted a chunk that only older commits named so far.
            self._originals.each(self._absent(manifest.chunks), self._send)
        except CorruptError:
            self._read_manifest(place)  # raises MissingError if retention deletes this commit now
            raise
        self.check_fence()  # the data may have taken hours
        mark_suspect(self._mirror, self._keys, manifest)
        if not self._put(key, data):
            raise self._conflict(key)
        return CopyResult(chunks=len(absent), size_bytes=size_bytes, is_new=is_new)

    def copy_records(self, wait: Callable[[], object] = lambda: None) -> int:
        """Copy the farewells, resumptions and pins that the mirror lacks; returns their number.

        Args:
            wait: called before each of them.
        """
        count = 0
        for prefix in self._keys.records:
            copied = {info.key for info in self._mirror.list(prefix)}
            for info in self._primary.list(prefix):
                if info.key not in copied and 0 < info.size_bytes <= RECORD_BYTES_MAX:
                    wait()
                    self._put(info.key)
                    count += 1
        return count

    # ------------------------------------------------------------------ chunks

    def _absent(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that the mirror lacks; raises CorruptError if it has an object of another size."""
        if len(self._verified) > VERIFIED_MAX:
            self._verified &= {chunk.key for chunk in chunks}
        sizes_bytes = self._copies.sizes(chunks)
        for chunk, size_bytes in sizes_bytes.items():
            if size_bytes != chunk.size_bytes:
                raise self._other(chunk)
        return [chunk for chunk in chunks if chunk not in sizes_bytes]

    def _send(self, chunk: Chunk, data: bytearray) -> None:
        def moved(_size_bytes: int) -> None:
            if self._stop.is_set():
                raise Stopped("stopped before it was done")

        try:
            self._mirror.create(chunk.key, Body(memoryview(data), moved))
        except Exists:
            raise self._other(chunk) from None
        self._note(chunk)
        self._copied(chunk.size_bytes)

    def _verify(self, chunks: Sequence[Chunk]) -> None:
        """Read the chunks back from the mirror that are not verified yet."""
        unverified = [chunk for chunk in chunks if self.lacks(chunk)]
        defects = self._copies.check(unverified, self._note)
        for chunk, why in defects.items():
            if why != MISSING:
                raise self._other(chunk)
        self._originals.each(defects, self._send)  # retention of the mirror has deleted them

    def _note(self, chunk: Chunk) -> None:
        self._verified.add(chunk.key)

    def _other(self, chunk: Chunk) -> CorruptError:
        return CorruptError(
            f"the mirror has other bytes under {self._mirror.url}/{chunk.key}",
            hint="Delete that object, or choose another mirror.url",
        )

    # ------------------------------------------------------------------ small objects

    def _read_manifest(self, place: ManifestPlace) -> tuple[bytes, Manifest]:
        key = self._keys.commit(place.ref, place.node, place.nodes)
        data = catalog.content(self._primary, key, f"the manifest of {place.ref}")
        return data, catalog.decoded(self._keys, place, data)

    def _put(self, key: str, data: bytes | None = None) -> bool:
        """Create an object of the mirror; False if it has other bytes."""
        try:
            data = self._primary.get(key) if data is None else data
        except NotFound:
            return True  # deleted since it was listed
        try:
            self._mirror.put(key, data, if_absent=True)
        except Exists:
            return self._mirror.get(key) == data
        return True

    def _expect_same(self, key: str, data: bytes) -> None:
        if self._mirror.get(key) != data:
            raise self._conflict(key)

    def _conflict(self, key: str) -> CorruptError:
        return CorruptError(
            f"{self._mirror.url}/{key} differs from the same manifest of the store",
            hint="The mirror belongs to another line of this run: choose another mirror.url",
        )
