# SPDX-License-Identifier: Apache-2.0
"""Fetches the newest whole commit, and re-reads stored bytes against manifests.

A damaged commit makes restore take the next older one, and give the reason.  So does a commit whose manifests
are larger, name more parts, or cost more processor time than any honest ones, and one of which the store
refuses an object while it returns others; a slow download does not.  A failing store, an object of an unknown
kind among the commits, or an unusable target is an error: an older commit would not fix it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swansongd.bucket import catalog
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest, check_paths
from swansongd.errors import CorruptError, NothingToRestore, Permanent
from swansongd.model import CommitRef, StoredShard, is_healthy, merged_health
from swansongd.restore.journal import identity_of
from swansongd.restore.reader import Problems, Progress, Reader
from swansongd.restore.target import Access, RestoreTarget
from swansongd.stores.base import ObjectStore

_REASONS_MAX = 10
"""Refused commits that an error message names."""
CONNECTIONS = 16
"""At most, unless the caller says otherwise."""

Skipped = Callable[[CommitRef, str], None]
"""Told of a commit that is not restored, and why."""

Wanted = Callable[[CommitRef, Mapping[str, float]], bool]
"""Whether a commit of this health will do."""


def healthy(_ref: CommitRef, health: Mapping[str, float]) -> bool:
    """A :data:`Wanted`: only what is known to be healthy."""
    return is_healthy(health) is True


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What a restore brought back."""

    ref: CommitRef
    path: Path
    size_bytes: int
    reused_bytes: int
    """So many of them were there already, from a restore that was interrupted."""
    skipped: tuple[tuple[CommitRef, str], ...]
    """Newer commits that could not be restored, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A damaged or missing object that ``verify`` found."""

    ref: CommitRef
    problem: str


def restore(
    store: ObjectStore,
    keys: RunKeys,
    destination: Path,
    *,
    parent_fd: int | None = None,
    access: Access | None = None,
    step: int | None = None,
    wanted: Wanted | None = None,
    connections: int = CONNECTIONS,
    progress: Progress | None = None,
    skipped: Skipped | None = None,
    stop: threading.Event | None = None,
) -> RestoreResult:
    """Bring the newest whole commit of the run (or of ``step``) to ``destination``, or nothing.

    Commits that are not ``wanted`` are passed over.

    ``destination`` appears whole or not at all; it must not exist, or be an empty directory.  The
    store is only read.  What an interrupted restore of the same commit left beside the destination is
    used; one that is ended by Stopped or by an error of the store leaves what it has for the next.

    Args:
        parent_fd, access: see :class:`swansongd.restore.target.RestoreTarget`.

    Raises:
        NothingToRestore: no commit is whole; says why for each.
        CorruptError: an object that no swansong wrote lies among the commits.
        StagingError: ``destination`` cannot be used, or has too little space.
        StoreError: the store could not be read.
        Stopped: ``stop`` was set.
    """
    refused: list[tuple[CommitRef, str]] = []
    with RestoreTarget(destination, parent_fd=parent_fd, access=access) as target:
        commits = _commits(store, keys, step)
        is_fresh = step is None and not any(commit.is_complete for commit in commits)
        for commit in commits:
            try:
                manifests = whole(store, keys, commit)
                if wanted is not None and not wanted(commit.ref, health_of(manifests)):
                    continue
                shards = _merged(manifests)
                identity = identity_of(keys.run, commit.ref, shards)
                reader = Reader(store, connections, stop, _refused(store, keys, commit))
                reused_bytes = _fetch(reader, shards, target, identity, progress)
            except CorruptError as error:
                refused.append((commit.ref, error.line()))
                if skipped is not None:
                    skipped(*refused[-1])
                continue
            target.publish()
            return RestoreResult(
                ref=commit.ref,
                path=destination,
                size_bytes=sum(shard.size_bytes for shard in shards),
                reused_bytes=reused_bytes,
                skipped=tuple(refused),
            )
    if is_fresh and (farewell := catalog.farewell_with_commit(store, keys)) is not None:
        raise NothingToRestore(
            f"the listing of {store.url} contains no commit of run {keys.run}, but {farewell} names one",
            hint=f"If the commits were deleted on purpose, delete {store.url}/{keys.farewells} as well, or "
            "continue under another run.name",
        )
    raise _nothing(keys, step, refused, is_fresh=is_fresh)


def verify(
    store: ObjectStore,
    keys: RunKeys,
    *,
    step: int | None = None,
    connections: int = CONNECTIONS,
    progress: Progress | None = None,
    manifests: Callable[[int, int], None] | None = None,
    sharing: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Defect]:
    """Re-read all stored bytes of the run's commits (or those of ``step``); empty when all is well.

    Each stored object is read once, however many commits name it.  A commit that not all nodes have made
    yet is no finding; what there is of it is read as well.

    Args:
        manifests: told the commits whose manifests were read, and the commits in all.
        sharing: told the stored objects, and how many of them more than one commit names.

    Raises:
        NothingToRestore: there is no commit.
        CorruptError: an object that no swansong wrote lies among the commits.
        StoreError: the store could not be read.
        Stopped: ``stop`` was set.
    """
    commits = _commits(store, keys, step)
    if not commits:
        raise _nothing(keys, step, [])
    findings: list[Defect] = []
    is_shared: dict[StoredShard, bool] = {}

    def take(_commit: Commit, shards: Sequence[StoredShard]) -> None:
        is_shared.update({shard: shard in is_shared for shard in shards})

    _merged_each(store, keys, commits, take, findings, progress=manifests, stop=stop)
    if sharing is not None:
        sharing(len(is_shared), sum(is_shared.values()))
    reader = Reader(store, connections, stop, _refused(store, keys, commits[0]))
    bad = reader.check_sizes(list(is_shared))
    sized = [shard for shard in is_shared if shard not in bad]
    bad |= reader.read(dict(enumerate(sized)), progress=progress)[0]
    if bad:
        # Read again, because damage is rare: who names which shard is more than memory may hold.
        def blame(commit: Commit, shards: Sequence[StoredShard]) -> None:
            named = [shard for shard in shards if shard in bad]
            findings.extend(Defect(ref=commit.ref, problem=bad[shard]) for shard in named)

        unread = {finding.ref for finding in findings}
        sound = [commit for commit in commits if commit.ref not in unread]
        _merged_each(store, keys, sound, blame, findings, progress=None, stop=stop)
    return sorted(findings, key=lambda finding: (finding.ref, finding.problem), reverse=True)


def _merged_each(
    store: ObjectStore,
    keys: RunKeys,
    commits: Sequence[Commit],
    take: Callable[[Commit, Sequence[StoredShard]], None],
    findings: list[Defect],
    *,
    progress: Callable[[int, int], None] | None,
    stop: threading.Event | None,
) -> None:
    """Hand the shards of each commit to ``take``; of one that does not count, the reason to ``findings``."""

    def merge(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        try:
            if isinstance(loaded, CorruptError):
                raise loaded
            take(commit, _merged(loaded))
        except CorruptError as error:
            findings.append(Defect(ref=commit.ref, problem=error.line()))

    catalog.load_each(store, keys, commits, merge, progress=progress, stop=stop)


# ---------------------------------------------------------------- commits


def _commits(store: ObjectStore, keys: RunKeys, step: int | None) -> list[Commit]:
    return [
        commit
        for commit in catalog.list_commits(store, keys)
        if step is None or commit.ref.step == step
    ]


def _nothing(
    keys: RunKeys,
    step: int | None,
    refused: Sequence[tuple[CommitRef, str]],
    *,
    is_fresh: bool = False,
) -> NothingToRestore:
    wanted = f"run {keys.run}" if step is None else f"step {step} of run {keys.run}"
    if not refused:
        return NothingToRestore(f"{wanted} has no commit", is_fresh=is_fresh)
    reasons = "; ".join(f"{ref}: {reason}" for ref, reason in refused[:_REASONS_MAX])
    more = f"; and {len(refused) - _REASONS_MAX} more" if len(refused) > _REASONS_MAX else ""
    return NothingToRestore(
        f"{wanted} has no commit that is whole: {reasons}{more}", is_fresh=is_fresh
    )


def _refused(
    store: ObjectStore, keys: RunKeys, commit: Commit
) -> Callable[[str, Permanent], CorruptError]:
    return partial(catalog.refused, store, keys, commit.ref.generation)


def whole(store: ObjectStore, keys: RunKeys, commit: Commit) -> tuple[Manifest, ...]:
    """The manifests of all nodes of a commit.

    Raises:
        CorruptError: the commit is not complete, or a manifest cannot be believed.
        StoreError: the store could not be read.
    """
    if not commit.is_complete:
        raise CorruptError(f"{len(commit.manifest_keys)} of {commit.nodes} nodes committed it")
    return catalog.load(store, keys, commit)


def health_of(manifests: Sequence[Manifest]) -> dict[str, float]:
    """The health of a commit, over its nodes."""
    return merged_health([manifest.health for manifest in manifests])


def _merged(manifests: Sequence[Manifest]) -> list[StoredShard]:
    """The shards of all nodes of a commit, each path once.

    Raises:
        CorruptError: the manifests contradict each other.
    """
    by_path: dict[str, StoredShard] = {}
    for shard in itertools.chain.from_iterable(manifest.shards for manifest in manifests):
        other = by_path.setdefault(shard.path, shard)
        if (other.size_bytes, other.digest) != (shard.size_bytes, shard.digest):
            raise CorruptError(f"two nodes have different files called {shard.path}")
    check_paths(list(by_path))
    return list(by_path.values())


def _fetch(
    reader: Reader,
    shards: Sequence[StoredShard],
    target: RestoreTarget,
    identity: str,
    progress: Progress | None,
) -> int:
    """Bring the shards into the target, verified and synced; returns the bytes that were there already.

    Raises:
        CorruptError: a shard is gone, or does not match its digest when read again.
    """
    _refuse(reader.check_sizes(shards))
    noted = target.begin(identity, shards)
    numbered = dict(enumerate(shards))
    problems, reused_bytes = reader.read(numbered, target=target, noted=noted, progress=progress)
    if problems:
        # The wire or our own memory may have been at fault; an older commit would cost more.
        again = {number: shard for number, shard in numbered.items() if shard in problems}
        problems, _ = reader.read(again, target=target)
    _refuse(problems)
    return reused_bytes


def _refuse(problems: Problems) -> None:
    if problems:
        first, *others = problems.values()
        raise CorruptError(f"{first} (and {len(others)} more)" if others else first)
