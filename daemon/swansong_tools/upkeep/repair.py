# SPDX-License-Identifier: Apache-2.0
"""Replaces damaged and missing chunks by intact copies.

This is the only code that replaces an object.  The name of a chunk contains the digest of its bytes, and this
digest alone decides: no claim of a manifest can make a repair write other bytes.  The object under the key is
hashed first, and one that matches its name is never written.  An intact copy comes from

1. another chunk of the run with the same digest;
2. files on this machine;
3. the mirror.

The store replaces the object atomically, or creates it.  A crash leaves the old object.  In a bucket with
versions, the damaged version remains below the new one, and Object Lock keeps protecting both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog
from blake3 import blake3
from swansong_bucket.errors import (
    CorruptError,
    NotFound,
    Permanent,
    StagingError,
    Transient,
    UnreadableError,
)
from swansong_bucket.format import manifest as manifests
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CHUNK_BYTES_MAX, Chunk, CommitRef, StoredShard
from swansong_bucket.runs import catalog, pins
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.pins import Pins
from swansong_bucket.stores.base import BytesSink, ObjectStore
from swansong_bucket.transfer.chunks import Place, cover, places_of
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.util.threads import parallel
from swansongd.restore.local_files import LocalSet

from swansong_tools.upkeep.verify import Defect, each_commit

_THREADS = 4
"""Each holds one copy of a chunk in memory, and what the store returns for it."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class RepairOutcome:
    """The outcome for one object."""

    key: str
    size_bytes: int = 0
    commits: Sequence[CommitRef] = ()
    """The commits that name the object, newest first."""
    problem: str = ""
    """Why it is still damaged; empty if it is whole again."""
    origin: str = ""
    """The source of the bytes: ``object`` if it was intact, ``run``, ``staging`` or ``mirror``."""


@dataclass(slots=True)
class _Plan:
    """The content of the run's manifests about one damaged chunk."""

    refs: set[CommitRef] = field(default_factory=set)
    covers: dict[tuple[Place, ...], None] = field(default_factory=dict)
    """Ranges of files that have the bytes of the chunk."""
    others: Sequence[str] = ()
    """Keys of other chunks with the same digest."""


def repair(
    store: ObjectStore,
    keys: RunKeys,
    damaged: Collection[Chunk],
    *,
    mirror: ObjectStore | None = None,
    local: Sequence[LocalSet] = (),
    options: ReadOptions,
) -> list[RepairOutcome]:
    """Replace these chunks by intact copies.  A chunk that no commit names any more is left out.

    Args:
        options: with the progress, which is called with the bytes of the chunks that are done.

    Raises:
        StoreError: a store failed.
        Stopped: ``options.stop`` was set.
    """
    plans = {chunk: _Plan() for chunk in damaged}
    commits = catalog.list_commits(store, keys)
    keys_of: dict[bytes, dict[str, None]] = {chunk.digest: {} for chunk in plans}
    add = partial(_add, plans, keys_of)
    each_commit(store, keys, commits, add, [], progress=None, stop=options.stop)
    total_bytes = sum(chunk.size_bytes for chunk in plans)
    done: dict[Chunk, RepairOutcome] = {}
    done_bytes = 0
    lock = threading.Lock()

    def one(chunk: Chunk) -> None:
        nonlocal done_bytes
        plan = plans[chunk]
        refs = sorted(plan.refs, reverse=True)
        if any(catalog.list_commits(store, keys, ref) for ref in refs):
            plan.others = [key for key in keys_of[chunk.digest] if key != chunk.key]
            done[chunk] = _repaired(store, chunk, refs, _copies(store, chunk, plan, local, mirror))
        with lock:
            done_bytes += chunk.size_bytes
            if options.progress is not None:
                options.progress(done_bytes, total_bytes)

    parallel(plans, one, threads=_THREADS, stop=options.stop)
    return [done[chunk] for chunk in plans if chunk in done]


def _add(
    plans: Mapping[Chunk, _Plan],
    keys_of: Mapping[bytes, dict[str, None]],
    commit: Commit,
    shards: Sequence[StoredShard],
) -> None:
    """Add the places of the planned chunks in a commit, and the keys that it names by their digests."""
    for chunk, places in places_of(shards).items():
        if chunk in plans:
            plans[chunk].refs.add(commit.ref)
            plans[chunk].covers.setdefault(cover(chunk, places))
        if chunk.digest in keys_of:
            keys_of[chunk.digest].setdefault(chunk.key)


def _repaired(
    store: ObjectStore,
    chunk: Chunk,
    commits: Sequence[CommitRef],
    copies: Iterator[tuple[str, bytes | bytearray]],
) -> RepairOutcome:
    """Replace the object by the first intact copy; the outcome has the reason if that is impossible."""
    outcome = RepairOutcome(key=chunk.key, size_bytes=chunk.size_bytes, commits=commits)
    with _reasons(outcome, "object"):
        outcome.origin = _replaced(store, chunk, copies)
    if outcome.problem:
        _log.error("object_not_repaired", key=chunk.key, reason=outcome.problem)
    else:
        _log.info("object_repaired", key=chunk.key, origin=outcome.origin)
    return outcome


@contextmanager
def _reasons(outcome: RepairOutcome, kind: str, where: str = "") -> Iterator[None]:
    """Note in the outcome why an object of this kind was not replaced."""
    try:
        yield
    except CorruptError as error:
        outcome.problem = f"{where}{error.line()}"
    except Permanent as error:
        outcome.problem = f"the store refused the new {kind}: {error.line()}"


def _replaced(
    store: ObjectStore, chunk: Chunk, copies: Iterator[tuple[str, bytes | bytearray]]
) -> str:
    """Make the object match its name; returns the source of the bytes.

    Raises:
        CorruptError: there is no intact copy, or a manifest claims another size than the bytes have.
    """
    info = store.head(chunk.key)
    size_bytes = 0 if info is None else info.size_bytes
    if size_bytes <= CHUNK_BYTES_MAX and _is_intact(chunk, _read(store, chunk.key, size_bytes)):
        if size_bytes != chunk.size_bytes:
            raise CorruptError(
                f"it matches its name and has {size_bytes} bytes; the manifest is wrong"
            )
        return "object"
    for origin, data in copies:
        if len(data) == chunk.size_bytes and _is_intact(chunk, data):
            store.put(chunk.key, memoryview(data))
            if _read(store, chunk.key, len(data)) != data:
                raise CorruptError("the store does not return the bytes that were written")
            return origin
    raise CorruptError(f"there is no intact copy of its {chunk.size_bytes} bytes")


def _is_intact(chunk: Chunk, data: bytes | bytearray) -> bool:
    return blake3(data).digest() == chunk.digest


def _copies(
    store: ObjectStore,
    chunk: Chunk,
    plan: _Plan,
    local: Sequence[LocalSet],
    mirror: ObjectStore | None,
) -> Iterator[tuple[str, bytes | bytearray]]:
    """The bytes of possible copies, each with its origin."""
    for key in plan.others:
        yield "run", _read(store, key, chunk.size_bytes)
    for each in local:
        for ranges in plan.covers:
            yield "staging", _read_local(each, ranges)
    if mirror is not None:
        try:
            yield "mirror", _read(mirror, chunk.key, chunk.size_bytes)
        except Transient as error:
            raise CorruptError(
                f"there is no intact copy here, and the mirror failed: {error.line()}"
            ) from None


def _read(store: ObjectStore, key: str, size_bytes: int) -> bytes | bytearray:
    """The first bytes of an object; empty if the store does not return all of them."""
    sink = BytesSink(size_bytes)
    try:
        store.get_range(key, 0, size_bytes, sink)
    except (NotFound, Permanent):
        return b""
    return sink.data


def _read_local(directory: LocalSet, ranges: Sequence[Place]) -> bytes | bytearray:
    """The bytes of these ranges of files in one set; empty if a file is missing or has another size."""
    data = bytearray()
    for each in ranges:
        file = directory.find(each.path, each.file_bytes)
        if file is None:
            return b""
        try:
            with os.fdopen(directory.open(file), "rb") as opened:
                data += os.pread(opened.fileno(), each.size_bytes, each.offset_bytes)
        except (OSError, StagingError):
            return b""
    return data


def repair_manifests(
    store: ObjectStore,
    keys: RunKeys,
    mirror: ObjectStore,
    options: ReadOptions,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[RepairOutcome]:
    """Replace each damaged manifest by that of the mirror.  A missing one is not a commit: it stays away.

    Args:
        progress: called with the number of commits whose manifests were read, and of all commits.

    Raises:
        StoreError: a store failed.
        Stopped: ``options.stop`` was set.
    """
    unread: list[Defect] = []
    commits = catalog.list_commits(store, keys)
    each_commit(
        store,
        keys,
        commits,
        lambda _commit, _shards: None,
        unread,
        progress=progress,
        stop=options.stop,
    )
    refs = {defect.ref for defect in unread}
    done = []
    for commit in commits:
        for node in commit.manifest_keys if commit.ref in refs else ():
            outcome = _repaired_manifest(store, keys, mirror, commit, node)
            if outcome is not None:
                done.append(outcome)
    return done


def repair_pins(store: ObjectStore, keys: RunKeys, mirror: ObjectStore) -> list[RepairOutcome]:
    """Replace each damaged pin by that of the mirror.

    Raises:
        StoreError: a store failed.
    """
    done = []
    for stored in Pins(store, keys).now():
        if stored.pin is not None:
            continue
        outcome = RepairOutcome(key=stored.key)
        with _reasons(outcome, "pin", "in the mirror "):
            pin = pins.read(mirror, keys, stored.key)
            if pin is None:
                outcome.problem = "the mirror has no such pin"
            else:
                outcome.commits = [pin.ref]
                _copied(outcome, store, pins.encode(pin))
        done.append(outcome)
    return done


def _repaired_manifest(
    store: ObjectStore, keys: RunKeys, mirror: ObjectStore, commit: Commit, node: int
) -> RepairOutcome | None:
    """None if the manifest is intact, or not there any more."""
    try:
        catalog.load_node(store, keys, commit, node)
        return None
    except UnreadableError:
        return None  # the store refuses it, and would refuse to replace it
    except CorruptError:
        pass
    outcome = RepairOutcome(key=commit.manifest_keys[node], commits=[commit.ref])
    with _reasons(outcome, "manifest", "in the mirror "):
        catalog.load_node(mirror, keys, commit, node)
        data = mirror.get(outcome.key)
        manifests.decode(data)
        if store.head(outcome.key) is None:
            return None  # prune has deleted it meanwhile
        _copied(outcome, store, data)
    return outcome


def _copied(outcome: RepairOutcome, store: ObjectStore, data: bytes) -> None:
    """Replace the object by these bytes from the mirror."""
    outcome.size_bytes = len(data)
    store.put(outcome.key, data)
    outcome.origin = "mirror"
