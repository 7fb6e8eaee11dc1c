# SPDX-License-Identifier: Apache-2.0
"""Compares stored chunks with their names.  The store is only read.

A chunk that several commits name is read once.  The size of every chunk is compared by a listing; a random
sample of the chunks is enough to notice that a store loses bytes.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swansong_bucket.errors import CorruptError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest, chunks_of
from swansong_bucket.model import Chunk, CommitRef, StoredShard
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer.chunks import defect_of_size
from swansong_bucket.transfer.reader import Reader, ReadOptions
from swansong_bucket.transfer.restore import merged, nothing_found

_DEFAULT = ReadOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A shard, or the manifest, of a commit that cannot be restored."""

    ref: CommitRef
    problem: str
    chunks: frozenset[Chunk] = frozenset()
    """The damaged chunks with bytes of the shard; empty for a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The outcome of a verification."""

    defects: Sequence[Defect]
    """Newest commit first; empty if everything that was read is intact."""
    damaged: Mapping[Chunk, str]
    """The chunks that are missing, have a wrong size, or do not match their names."""
    commits: int
    objects: int
    shared: int
    """Number of the objects that several commits name."""
    size_bytes: int
    """All chunks of the commits, each once."""
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
    """Read the chunks of the run's commits (or those of ``step``) again.

    A commit that some nodes have not committed yet is not damage; the existing part of it is read as well.
    A commit that was deleted meanwhile is left out.

    Args:
        sample: share of the chunks that are read, chosen at random; the sizes of all chunks are compared.
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
    is_shared: dict[Chunk, bool] = {}
    """The chunks that manifests name, and whether several commits do."""

    def name(_commit: Commit, shards: Sequence[StoredShard]) -> None:
        is_shared.update({chunk: chunk in is_shared for chunk in chunks_of(shards)})

    each_commit(store, keys, commits, name, defects, progress=manifests, stop=options.stop)
    damaged = wrong_sizes(store, is_shared, options)
    readable = [chunk for chunk in is_shared if chunk not in damaged]
    chosen = [chunk for chunk in readable if sample >= 1 or chance() < sample]
    chosen = chosen or readable[:1]
    refused = partial(catalog.refused, store, keys, commits[0].ref.generation)
    damaged |= Reader(store, options, refused).check(chosen)
    if damaged:
        # The manifests are read a second time: which shards have bytes of each chunk is too much for memory.
        unread = {defect.ref for defect in defects}
        again = [commit for commit in commits if commit.ref not in unread]
        blame = partial(_blame, defects, damaged)
        each_commit(store, keys, again, blame, defects, progress=None, stop=options.stop)
    present = {ref for ref in {d.ref for d in defects} if catalog.list_commits(store, keys, ref)}
    return Findings(
        defects=sorted(
            (defect for defect in defects if defect.ref in present),
            key=lambda defect: (defect.ref, defect.problem),
            reverse=True,
        ),
        damaged=damaged,
        commits=len(commits),
        objects=len(is_shared),
        shared=sum(is_shared.values()),
        size_bytes=sum(chunk.size_bytes for chunk in is_shared),
        read_bytes=sum(chunk.size_bytes for chunk in chosen),
    )


def _blame(
    defects: list[Defect],
    damaged: Mapping[Chunk, str],
    commit: Commit,
    shards: Sequence[StoredShard],
) -> None:
    """Append a defect for each shard of the commit with bytes in a damaged chunk."""
    for shard in shards:
        found = [chunk for chunk in chunks_of([shard]) if chunk in damaged]
        if found:
            problem = f"{shard.path} {damaged[found[0]]}"
            defects.append(Defect(ref=commit.ref, problem=problem, chunks=frozenset(found)))


def wrong_sizes(
    store: ObjectStore, chunks: Collection[Chunk], options: ReadOptions
) -> dict[Chunk, str]:
    """The chunks that are missing or have another size, each with its defect, by one listing a generation."""
    reader = Reader(store, options)
    sizes_bytes = reader.sizes(chunks, listed_min=0)
    unlisted = [chunk for chunk in chunks if chunk not in sizes_bytes]
    sizes_bytes |= reader.sizes(unlisted, listed_min=sys.maxsize)
    defects = ((chunk, defect_of_size(chunk, sizes_bytes.get(chunk))) for chunk in chunks)
    return {chunk: why for chunk, why in defects if why}


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
