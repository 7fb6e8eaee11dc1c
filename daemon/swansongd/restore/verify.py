# SPDX-License-Identifier: Apache-2.0
"""Compares stored bytes with the manifests.  The store is only read.

The unit is the part of a shard.  A part that several commits share is read once, and neighbouring parts are
read in one request.  The size of every object is compared; of the parts, a random sample is enough to notice
that a store loses bytes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from blake3 import blake3

from swansongd.bucket import catalog
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import CorruptError, NotFound, Permanent, Stopped, Transient
from swansongd.model import CommitRef, Extent, StoredObject, StoredShard
from swansongd.restore.reader import Progress, Reader, ReadOptions
from swansongd.restore.restore import merged, nothing_found
from swansongd.restore.stored_parts import StoredPart, parts_of, runs
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

RUN_BYTES = 16 * 2**20
"""Size of the parts that one request reads, unless one part is larger."""

_DEFAULT = ReadOptions()

Refused = Callable[[str, Permanent], CorruptError]
"""Makes the error for an object that the store refuses while it returns others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A shard, or the manifest, of a commit that cannot be restored."""

    ref: CommitRef
    problem: str
    keys: frozenset[str] = frozenset()
    """The damaged objects with bytes of the shard; empty for a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The outcome of a verification."""

    defects: Sequence[Defect]
    """Newest commit first; empty if everything that was read is intact."""
    damaged: Mapping[StoredObject, str]
    """The objects that are missing, have a wrong size, or have a part with other bytes."""
    commits: int
    objects: int
    shared: int
    """Number of the objects that several commits name."""
    size_bytes: int
    """All parts of the commits, each once."""
    read_bytes: int
    """Those that were read."""


def verify(
    store: ObjectStore,
    keys: RunKeys,
    *,
    step: int | None = None,
    sample: float = 1.0,
    options: ReadOptions = _DEFAULT,
    manifests: Callable[[int, int], None] | None = None,
    chance: Callable[[], float] = random.random,
) -> Findings:
    """Read the stored bytes of the run's commits (or those of ``step``) again.

    A commit that some nodes have not committed yet is not damage; the existing part of it is read as well.
    A commit that was deleted meanwhile is left out.

    Args:
        sample: share of the parts that are read, chosen at random; the sizes of all objects are compared.
        manifests: called with the number of commits whose manifests were read, and the total.
        chance: returns a random number from 0 to 1.

    Raises:
        NothingToRestore: there is no commit.
        CorruptError: there is an unknown object among the commits.
        StoreError: the store could not be read.
        Stopped: ``options.stop`` was set.
    """
    commits = [
        commit
        for commit in catalog.list_commits(store, keys)
        if step is None or commit.ref.step == step
    ]
    if not commits:
        raise nothing_found(keys, step, [])
    defects: list[Defect] = []
    named = _Named()
    each_commit(store, keys, commits, named.add, defects, progress=manifests, stop=options.stop)
    refused = partial(catalog.refused, store, keys, commits[0].ref.generation)
    objects = list(named.is_shared)
    wrong = Reader(store, options, refused).wrong_objects(objects)
    readable = [p for p in named.parts if not any(e.object in wrong for e in p.pieces)]
    chosen = [part for part in readable if sample >= 1 or chance() < sample]
    chosen = chosen or readable[:1]
    bad = read_parts(store, chosen, refused, options)
    if wrong or bad:
        # The manifests are read a second time: which commits name each part is too much for memory.
        unread = {defect.ref for defect in defects}
        again = [commit for commit in commits if commit.ref not in unread]
        blame = partial(_blame, defects, wrong, bad)
        each_commit(store, keys, again, blame, defects, progress=None, stop=options.stop)
    present = {ref for ref in {d.ref for d in defects} if catalog.list_commits(store, keys, ref)}
    damaged = wrong | {e.object: why for part, why in bad.items() for e in part.pieces}
    return Findings(
        defects=sorted(
            (defect for defect in defects if defect.ref in present),
            key=lambda defect: (defect.ref, defect.problem),
            reverse=True,
        ),
        damaged=damaged,
        commits=len(commits),
        objects=len(objects),
        shared=sum(named.is_shared.values()),
        size_bytes=sum(part.size_bytes for part in named.parts),
        read_bytes=sum(part.size_bytes for part in chosen),
    )


@dataclass(slots=True)
class _Named:
    """The objects and parts that manifests name, each once."""

    is_shared: dict[StoredObject, bool] = field(default_factory=dict)
    parts: set[StoredPart] = field(default_factory=set)
    _shards: set[bytes] = field(default_factory=set)

    def add(self, _commit: Commit, shards: Sequence[StoredShard]) -> None:
        objects = dict.fromkeys(extent.object for shard in shards for extent in shard.extents)
        self.is_shared.update({stored: stored in self.is_shared for stored in objects})
        for shard in shards:
            known = _fingerprint(shard)
            if known not in self._shards:  # most commits repeat most shards of the one before
                self._shards.add(known)
                self.parts.update(part for part in parts_of(shard) if part.pieces)


def _fingerprint(shard: StoredShard) -> bytes:
    hasher = blake3(shard.part_digests)
    for extent in shard.extents:
        place = f"|{extent.object.key}|{extent.object.size_bytes}"
        hasher.update(f"{place}|{extent.offset_bytes}|{extent.size_bytes}".encode())
    hasher.update(f"|{shard.part_size_bytes}".encode())
    return hasher.digest(length=16)


def _blame(
    defects: list[Defect],
    wrong: Mapping[StoredObject, str],
    bad: Mapping[StoredPart, str],
    commit: Commit,
    shards: Sequence[StoredShard],
) -> None:
    """Append a defect for each shard of the commit with bytes in a damaged object or part."""
    suspects = {extent.object for part in bad for extent in part.pieces}
    for shard in shards:
        objects = {extent.object for extent in shard.extents}
        found = {stored.key: wrong[stored] for stored in objects if stored in wrong}
        if not suspects.isdisjoint(objects):
            for part in parts_of(shard):
                if part in bad:
                    found |= {piece.object.key: bad[part] for piece in part.pieces}
        if found:
            problem = f"{shard.path} {next(iter(found.values()))}"
            defects.append(Defect(ref=commit.ref, problem=problem, keys=frozenset(found)))


def each_commit(
    store: ObjectStore,
    keys: RunKeys,
    commits: Sequence[Commit],
    take: Callable[[Commit, Sequence[StoredShard]], None],
    defects: list[Defect],
    *,
    progress: Callable[[int, int], None] | None,
    stop: threading.Event | None,
) -> None:
    """Pass the shards of each commit to ``take``; append the defect of an unreadable one to ``defects``."""

    def merge(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        try:
            if isinstance(loaded, CorruptError):
                raise loaded
            take(commit, merged(loaded))
        except CorruptError as error:
            defects.append(Defect(ref=commit.ref, problem=error.line()))

    catalog.load_each(store, keys, commits, merge, progress=progress, stop=stop)


# ---------------------------------------------------------------- bytes


def read_parts(
    store: ObjectStore,
    parts: Collection[StoredPart],
    refused: Refused,
    options: ReadOptions,
) -> dict[StoredPart, str]:
    """The parts whose stored bytes do not match their digests, each with its defect in words.

    Raises:
        StoreError: the store could not be read.
        Stopped: ``options.stop`` was set.
    """
    bad: dict[StoredPart, str] = {}
    counter = ByteCounter(sum(part.size_bytes for part in parts), options.progress, options.stop)

    def one(run: list[StoredPart]) -> None:
        sink = _RunSink([part.size_bytes for part in run], counter)
        try:
            for piece in run[0].pieces if len(run) == 1 else (_span(run),):
                sink.begin_piece()
                store.get_range(piece.object.key, piece.offset_bytes, piece.size_bytes, sink)
        except NotFound:
            bad.update(dict.fromkeys(run, "is missing from the store"))
            return
        except Permanent as error:
            why = f"cannot be read: {refused(run[0].pieces[0].object.key, error).line()}"
            bad.update(dict.fromkeys(run, why))
            return
        for part, digest in zip(run, sink.digests(), strict=True):
            if part.digest != digest:
                bad[part] = "does not match its digest"

    grouped = runs(parts, RUN_BYTES)
    threads = min(options.connections, len(grouped))
    parallel(grouped, one, threads=threads, stop=options.stop)
    return bad


def _span(run: Sequence[StoredPart]) -> Extent:
    """The range of the object that has the bytes of all these neighbours."""
    first = run[0].pieces[0]
    return replace(first, size_bytes=sum(part.size_bytes for part in run))


class ByteCounter:
    """Counts bytes over all threads."""

    def __init__(
        self, total_bytes: int, progress: Progress | None, stop: threading.Event | None
    ) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._stop = stop
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Raises Stopped after the stop."""
        if self._stop is not None and self._stop.is_set():
            raise Stopped("stopped before it was done")
        with self._lock:
            self._done_bytes += size_bytes
            if self._progress is not None and size_bytes > 0:
                self._progress(self._done_bytes, self._total_bytes)


class _RunSink:
    """Takes the bytes of neighbouring parts, or of one part piece by piece, and hashes each part."""

    def __init__(self, sizes_bytes: Sequence[int], counter: ByteCounter) -> None:
        self._sizes_bytes = sizes_bytes
        self._counter = counter
        self._digests: list[bytes] = []
        self._hash = blake3()
        self._left_bytes = sizes_bytes[0]
        self._piece_bytes = 0
        self.begin_piece()

    def begin_piece(self) -> None:
        """The next range follows; a repeated request begins here again."""
        self._mark = (len(self._digests), self._left_bytes, self._hash.copy())
        self._piece_bytes = 0

    def rewind(self) -> None:
        count, self._left_bytes, hasher = self._mark
        self._hash = hasher.copy()
        del self._digests[count:]
        self._counter.add(-self._piece_bytes)
        self._piece_bytes = 0

    def write(self, window: memoryview) -> None:
        self._piece_bytes += window.nbytes
        self._counter.add(window.nbytes)
        while window.nbytes:
            if len(self._digests) == len(self._sizes_bytes):
                raise Transient("the store sent more bytes than the requested range has")
            size_bytes = min(self._left_bytes, window.nbytes)
            self._hash.update(window[:size_bytes])
            window = window[size_bytes:]
            self._left_bytes -= size_bytes
            if not self._left_bytes:
                self._digests.append(self._hash.digest())
                self._hash = blake3()
                if len(self._digests) < len(self._sizes_bytes):
                    self._left_bytes = self._sizes_bytes[len(self._digests)]

    def digests(self) -> list[bytes]:
        return self._digests
