# SPDX-License-Identifier: Apache-2.0
"""Copies one commit from the primary store to the mirror: claims, data, manifest, in this order.

The mirror has the layout of the store.  Each object is created and never replaced, so two copiers at once are
harmless.  The manifest comes last, byte for byte: a commit of the mirror is as whole as one of the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from blake3 import blake3

from swansongd.bucket import catalog
from swansongd.bucket import manifest as manifests
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import CorruptError, Exists, NotFound, SwansongError, TooLarge
from swansongd.mirror.checks import Check, SplitPart, checks_of, covers
from swansongd.mirror.fence import PromotedError, foreign_claim
from swansongd.mirror.gate import Gate
from swansongd.mirror.transfer import CHUNK_BYTES, Moved, ObjectCopier
from swansongd.model import CommitRef, StoredObject
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

RECORD_BYTES_MAX = 2**20
"""Larger farewells, resumptions and pins are not copied: no writer makes them."""

_log = structlog.get_logger(__name__)


class Gone(SwansongError):
    """The store no longer has the manifest: retention or an operator deleted the commit."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestPlace:
    """The place of a manifest: the unit of a copy."""

    ref: CommitRef
    node: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The result of the copy of a manifest and its data."""

    objects: int = 0
    """Objects that were copied; the others were in the mirror."""
    size_bytes: int = 0
    is_new: bool = True
    """Whether the mirror lacked the manifest."""
    known: frozenset[StoredObject] = frozenset()
    """All objects of the manifest, which the mirror has now."""


Planned = Callable[[int], None]
"""Takes the bytes that are about to be copied."""


class Copier:
    """Copies commits of one run.

    All methods raise PromotedError if the mirror was promoted, CorruptError if stored bytes do not match
    their digests, StoreError if a store failed, and Stopped.

    Args:
        primary: the store with the commits; retries failed requests.
        mirror: retries failed requests, and limits the rate.
        keys: of the run.
        stop: ends all requests.
        gate: pauses copies; None: they never pause.
        connections: chunks in flight.
        moved: takes the size of each chunk that the mirror has acknowledged.
    """

    def __init__(
        self,
        primary: ObjectStore,
        mirror: ObjectStore,
        keys: RunKeys,
        stop: threading.Event,
        *,
        gate: Gate | None = None,
        connections: int,
        chunk_bytes: int = CHUNK_BYTES,
        moved: Moved = lambda _size_bytes: None,
    ) -> None:
        self._primary = primary
        self._mirror = mirror
        self._keys = keys
        self._stop = stop
        self._connections = connections
        self._gate = gate or Gate(stop)
        self._objects = ObjectCopier(
            primary,
            mirror,
            self._gate,
            stop,
            connections=connections,
            chunk_bytes=chunk_bytes,
            moved=moved,
        )

    def holds_upload(self, upload_id: str) -> bool:
        """Whether this copier sends parts of the upload now."""
        return upload_id in self._objects.uploads

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

    def missing_of(self, place: ManifestPlace) -> list[StoredObject]:
        """The objects of a manifest that the mirror lacks."""
        return self._objects.missing(self._read_manifest(place)[1].objects)

    def copy(self, place: ManifestPlace, planned: Planned = lambda _size_bytes: None) -> CopyResult:
        """Copy a manifest, after the claims and the data that it names.

        Raises:
            Gone: the primary store has no such manifest any more.
        """
        self.copy_claims()
        key = self._keys.commit(place.ref, place.node, place.nodes)
        data, manifest = self._read_manifest(place)
        if self._mirror.head(key) is not None:
            self._expect_same(key, data)
            return CopyResult(is_new=False, known=frozenset(manifest.objects))
        missing = self._objects.missing(manifest.objects)
        size_bytes = sum(stored.size_bytes for stored in missing)
        planned(size_bytes)
        try:
            self._copy_data(manifest, missing)
            # Retention of the mirror may have deleted an object that only older commits named so far.
            self._copy_data(manifest, self._objects.missing(manifest.objects))
        except NotFound:
            self._read_manifest(place)  # raises Gone if retention deletes this commit now
            self._expect_in_store(missing)
            raise
        self.check_fence()  # the data may have taken hours
        if not self._put(key, data):
            raise self._conflict(key)
        known = frozenset(manifest.objects)
        return CopyResult(objects=len(missing), size_bytes=size_bytes, known=known)

    def copy_records(self) -> int:
        """Copy the farewells, resumptions and pins that the mirror lacks; returns their number."""
        count = 0
        for prefix in self._keys.records:
            copied = {info.key for info in self._mirror.list(prefix)}
            for info in self._primary.list(prefix):
                if info.key not in copied and 0 < info.size_bytes <= RECORD_BYTES_MAX:
                    self._gate.wait()
                    self._put(info.key)
                    count += 1
        return count

    # ------------------------------------------------------------------ small objects

    def _read_manifest(self, place: ManifestPlace) -> tuple[bytes, Manifest]:
        key = self._keys.commit(place.ref, place.node, place.nodes)
        try:
            data = self._primary.get(key)
        except NotFound:
            raise Gone(f"{place.ref} was deleted") from None
        except TooLarge as error:
            raise CorruptError(f"the manifest of {place.ref} is too large: {error}") from None
        manifest = manifests.decode(data, self._keys.signer)
        named = ManifestPlace(manifest.ref, manifest.node, manifest.nodes)
        if (manifest.run, named) != (self._keys.run, place):
            raise CorruptError(f"{key} contains the manifest of {manifest.ref}")
        return data, manifest

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

    # ------------------------------------------------------------------ data

    def _copy_data(self, manifest: Manifest, missing: Sequence[StoredObject]) -> None:
        if not missing:
            return
        checks = checks_of(manifest.shards)
        wanted: dict[StoredObject, Sequence[Check]] = {
            stored: checks.by_object.get(stored, ()) for stored in missing
        }
        self._objects.copy(self._with_origins(manifest, wanted))
        changed = set(missing)
        split = [
            part for part in checks.split if any(each.object in changed for each in part.extents)
        ]
        parallel(
            split,
            self._verify_split,
            threads=min(self._connections, len(split)),
            stop=self._stop,
        )

    def _expect_in_store(self, objects: Sequence[StoredObject]) -> None:
        """Raise CorruptError if the primary store lacks one of these objects."""
        for stored in objects:
            if self._primary.head(stored.key) is None:
                raise CorruptError(f"{stored.key} is missing from the store")

    def _with_origins(
        self, manifest: Manifest, wanted: Mapping[StoredObject, Sequence[Check]]
    ) -> Mapping[StoredObject, Sequence[Check]]:
        """Add the checks of the commit that wrote an object, where this manifest names only a part of it."""
        origins = {
            self._keys.origin(stored.key)
            for stored, checks in wanted.items()
            if not covers(checks, stored.size_bytes)
        } - {None, (manifest.generation, manifest.step)}
        if not origins:
            return wanted
        found = {stored: set(checks) for stored, checks in wanted.items()}
        for generation, step in filter(None, origins):
            for ref in (CommitRef(generation, step), CommitRef(generation, step, is_final=True)):
                for commit in catalog.list_commits(self._primary, self._keys, ref):
                    self._add_checks(commit, found)
        return {stored: sorted(checks) for stored, checks in found.items()}

    def _add_checks(self, commit: catalog.Commit, found: Mapping[StoredObject, set[Check]]) -> None:
        try:
            shards = [s for m in catalog.load(self._primary, self._keys, commit) for s in m.shards]
        except CorruptError as error:
            _log.warning("origin_not_read", commit=str(commit.ref), reason=error.line())
            return
        for stored, checks in checks_of(shards).by_object.items():
            if stored in found:
                found[stored].update(checks)

    def _verify_split(self, part: SplitPart) -> None:
        """Read a part that lies in several objects back from the mirror, and compare its digest."""
        sink = _HashSink()
        for extent in part.extents:
            sink.begin()
            self._mirror.get_range(extent.object.key, extent.offset_bytes, extent.size_bytes, sink)
        if sink.digest.digest() != part.digest:
            raise CorruptError(f"a part of {part.path} does not match its digest")


class _HashSink:
    """Hashes the bytes of several ranges, one after another."""

    def __init__(self) -> None:
        self.digest = blake3()
        self._before = self.digest

    def begin(self) -> None:
        """Begin the next range."""
        self._before = self.digest.copy()

    def rewind(self) -> None:
        self.digest = self._before.copy()

    def write(self, window: memoryview) -> None:
        self.digest.update(window)
