# SPDX-License-Identifier: Apache-2.0
"""Fetches the newest whole commit, and re-reads stored bytes against manifests.

What is wrong with a commit makes restore take the next older one, and say so.  What is wrong with the
store, or with the place to restore to, is an error: an older commit would not mend it.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swansongd import catalog
from swansongd.catalog import Commit
from swansongd.digests import part_count, part_digest, shard_digest
from swansongd.errors import CorruptError, NotFound, NothingToRestore
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest, check_paths
from swansongd.model import CommitRef, StoredShard
from swansongd.restore_target import RestoreTarget
from swansongd.stores.base import ObjectStore
from swansongd.threads import Task, parallel

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all; called from any thread, one call at a time."""
Skipped = Callable[[CommitRef, str], None]
"""Told of a commit that is not restored, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore brought back."""

    ref: CommitRef
    path: Path
    size_bytes: int
    skipped: tuple[tuple[CommitRef, str], ...]
    """Newer commits that could not be restored, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that ``verify`` found wrong."""

    ref: CommitRef
    problem: str


def restore(
    store: ObjectStore,
    keys: RunKeys,
    destination: Path,
    *,
    step: int | None = None,
    connections: int = 8,
    progress: Progress | None = None,
    skipped: Skipped | None = None,
    stop: threading.Event | None = None,
) -> Restored:
    """Bring the newest whole commit of the run (or of ``step``) to ``destination``, or nothing.

    ``destination`` appears whole or not at all; it must not exist, or be an empty directory.  The
    store is only read.

    Raises:
        NothingToRestore: no commit is whole; says why for each.
        StagingError: ``destination`` cannot be used, or has too little space.
        StoreError: the store could not be read.
        Stopped: ``stop`` was set.
    """
    reader = _Reader(store, connections, stop)
    refused: list[tuple[CommitRef, str]] = []
    with RestoreTarget(destination) as target:
        for commit in _commits(store, keys, step):
            try:
                shards = _shards(store, keys, commit)
                reader.fetch(shards, target, progress)
            except CorruptError as error:
                refused.append((commit.ref, error.line()))
                if skipped is not None:
                    skipped(*refused[-1])
                continue
            target.publish()
            return Restored(
                ref=commit.ref,
                path=destination,
                size_bytes=_size_bytes(shards),
                skipped=tuple(refused),
            )
    raise _nothing(keys, step, refused)


def verify(
    store: ObjectStore,
    keys: RunKeys,
    *,
    step: int | None = None,
    connections: int = 8,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[Finding]:
    """Re-read all stored bytes of the run's commits (or those of ``step``); empty when all is well.

    A commit that not all nodes have made yet is no finding; what there is of it is read as well.

    Raises:
        NothingToRestore: there is no commit.
        StoreError: the store could not be read.
        Stopped: ``stop`` was set.
    """
    findings: list[Finding] = []
    # Commits share shards, so each is read once, however many commits name it.
    owners: defaultdict[StoredShard, list[CommitRef]] = defaultdict(list)
    commits = _commits(store, keys, step)
    if not commits:
        raise _nothing(keys, step, [])
    for commit in commits:
        try:
            for shard in _merged(catalog.load(store, keys, commit)):
                owners[shard].append(commit.ref)
        except CorruptError as error:
            findings.append(Finding(ref=commit.ref, problem=error.line()))
    reader = _Reader(store, connections, stop)
    bad = reader.check_sizes(list(owners))
    bad |= reader.read([shard for shard in owners if shard not in bad], None, progress)
    findings += [
        Finding(ref=ref, problem=problem) for shard, problem in bad.items() for ref in owners[shard]
    ]
    return sorted(findings, key=lambda finding: (finding.ref, finding.problem), reverse=True)


# ---------------------------------------------------------------- commits


def _commits(store: ObjectStore, keys: RunKeys, step: int | None) -> list[Commit]:
    return [
        commit
        for commit in catalog.list_commits(store, keys)
        if step is None or commit.ref.step == step
    ]


def _nothing(
    keys: RunKeys, step: int | None, refused: Sequence[tuple[CommitRef, str]]
) -> NothingToRestore:
    wanted = f"run {keys.run}" if step is None else f"step {step} of run {keys.run}"
    if not refused:
        return NothingToRestore(f"{wanted} has no commit")
    reasons = "; ".join(f"{ref}: {reason}" for ref, reason in refused)
    return NothingToRestore(f"{wanted} has no commit that is whole: {reasons}")


def _shards(store: ObjectStore, keys: RunKeys, commit: Commit) -> list[StoredShard]:
    """The shards of all nodes of a commit, each path once.

    Raises:
        CorruptError: the commit is not complete, or its manifests cannot be believed.
    """
    if not commit.is_complete:
        raise CorruptError(f"{len(commit.manifest_keys)} of {commit.nodes} nodes committed it")
    return _merged(catalog.load(store, keys, commit))


def _merged(manifests: Sequence[Manifest]) -> list[StoredShard]:
    by_path: dict[str, StoredShard] = {}
    for shard in itertools.chain.from_iterable(manifest.shards for manifest in manifests):
        other = by_path.setdefault(shard.path, shard)
        if (other.size_bytes, other.digest) != (shard.size_bytes, shard.digest):
            raise CorruptError(f"two nodes have different files called {shard.path}")
    check_paths(list(by_path))
    return list(by_path.values())


def _size_bytes(shards: Sequence[StoredShard]) -> int:
    return sum(shard.size_bytes for shard in shards)


# ---------------------------------------------------------------- shards

_MISSING = "{} is missing from the store"
_Write = Callable[[str, int, memoryview], None]
"""Given path, offset and bytes of what was read."""


@dataclass(frozen=True, slots=True)
class _Part:
    shard: StoredShard
    index: int

    @property
    def offset(self) -> int:
        return self.index * self.shard.part_size_bytes

    @property
    def size_bytes(self) -> int:
        return min(self.shard.part_size_bytes, self.shard.size_bytes - self.offset)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads shards over many connections.  What is wrong with them comes back by shard, in words."""

    store: ObjectStore
    connections: int
    stop: threading.Event | None

    def fetch(
        self, shards: Sequence[StoredShard], target: RestoreTarget, progress: Progress | None
    ) -> None:
        """Bring the shards into the target, verified and synced.

        Raises:
            CorruptError: a shard is gone, or does not match its digest when read again.
        """
        _refuse(self.check_sizes(shards))
        target.begin({shard.path: shard.size_bytes for shard in shards})
        problems = self.read(shards, target.write, progress)
        if problems:
            # The wire or our own memory may have been at fault; an older commit would cost more.
            problems = self.read(list(problems), target.write, None)
        _refuse(problems)
        self._each(shards, lambda shard: target.sync(shard.path))

    def check_sizes(self, shards: Sequence[StoredShard]) -> dict[StoredShard, str]:
        problems: dict[StoredShard, str] = {}

        def check(shard: StoredShard) -> None:
            info = self.store.head(shard.key)
            if info is None:
                problems[shard] = _MISSING.format(shard.path)
            elif info.size_bytes != shard.size_bytes:
                problems[shard] = (
                    f"{shard.path} has {info.size_bytes} bytes instead of {shard.size_bytes}"
                )

        self._each(shards, check)
        return problems

    def read(
        self, shards: Sequence[StoredShard], write: _Write | None, progress: Progress | None
    ) -> dict[StoredShard, str]:
        """Read all bytes of the shards, hash them as they pass, and hand them to ``write``."""
        digests = {
            shard: [b""] * part_count(shard.size_bytes, shard.part_size_bytes) for shard in shards
        }
        problems: dict[StoredShard, str] = {}
        total_bytes = _size_bytes(shards)
        done_bytes = 0
        lock = threading.Lock()
        buffers: list[bytearray] = []  # not in use; one for each connection in the end

        def read_part(part: _Part) -> None:
            nonlocal done_bytes
            with lock:
                buffer = buffers.pop() if buffers else bytearray()
            if len(buffer) < part.size_bytes:
                buffer = bytearray(part.size_bytes)
            with memoryview(buffer)[: part.size_bytes] as data:
                if data:  # no store can be asked for a range of nothing
                    try:
                        self.store.get_range(part.shard.key, part.offset, data)
                    except NotFound:
                        problems[part.shard] = _MISSING.format(part.shard.path)
                        return
                digests[part.shard][part.index] = part_digest(data)
                if write is not None:
                    write(part.shard.path, part.offset, data)
            with lock:
                buffers.append(buffer)
                done_bytes += part.size_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)

        self._each(
            [_Part(shard, index) for shard in shards for index in range(len(digests[shard]))],
            read_part,
        )
        for shard in shards:
            if shard not in problems and shard_digest(digests[shard]) != shard.digest:
                problems[shard] = f"{shard.path} does not match its digest"
        return problems

    def _each(self, tasks: Sequence[Task], function: Callable[[Task], None]) -> None:
        parallel(tasks, function, threads=self.connections, stop=self.stop)


def _refuse(problems: dict[StoredShard, str]) -> None:
    if problems:
        first, *others = problems.values()
        raise CorruptError(f"{first} (and {len(others)} more)" if others else first)
