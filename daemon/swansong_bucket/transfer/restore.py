# SPDX-License-Identifier: Apache-2.0
"""Restores the newest whole commit.

Restore skips a damaged commit, reports the reason, and takes the next older one.  It treats as damaged:

- a commit with a chunk that is missing or does not match its name, or with a damaged manifest;
- a commit whose manifests are larger, or cost more processor time, than a real one can;
- a commit with an object that the store refuses while it returns others.

A slow download is not damage.  A failing store, an unknown object among the commits, and an unusable target
are errors: an older commit would not help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import structlog
from swansong.layout import is_rank_manifest, rank_of_directory

from swansong_bucket.errors import CorruptError, NothingToRestore, StoreError
from swansong_bucket.format import wall
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest, check_paths
from swansong_bucket.model import CommitRef, StoredShard, is_healthy, merged_health
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer.journal import identity_of
from swansong_bucket.transfer.reader import PassResult, Reader, ReadOptions
from swansong_bucket.transfer.target import RestoreTarget

_REASONS_MAX = 10
"""Skipped commits that an error message names."""

_log = structlog.get_logger(__name__)

Result = TypeVar("Result")

Skipped = Callable[[CommitRef, str], None]
"""Takes a commit that was skipped, and the reason."""

Chosen = Callable[[CommitRef, Sequence[StoredShard]], None]
"""Takes a commit that is about to be fetched, and its shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The commits that a restore considers, newest first.

    Args:
        step: only commits of this step.
        near: a generation near that of the commit; 0 if it is unknown.
        accepts: only commits that it accepts; the others cost no request.
        is_healthy: only commits that are known to be healthy.
        skipped: called for each damaged commit.
        files: only shards that it accepts are fetched.
        ranks: only the manifests with the files of these ranks are read, if they are found; empty: all.
        chosen: called with each commit that is about to be fetched, and the shards that will be.
    """

    step: int | None = None
    near: int = 0
    accepts: Callable[[CommitRef], bool] = lambda _ref: True
    is_healthy: bool = False
    skipped: Skipped | None = None
    files: Callable[[StoredShard], bool] | None = None
    ranks: frozenset[int] = frozenset()
    chosen: Chosen | None = None


_NEWEST = Selection()
_DEFAULT = ReadOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The restored commit."""

    ref: CommitRef
    path: Path
    created_wall_s: float | None
    """When its manifest was written; None if that time is not valid."""
    size_bytes: int
    reused_bytes: int
    """Bytes that an interrupted restore had fetched already."""
    local_bytes: int
    """Bytes that were copied from files on this machine."""
    skipped: tuple[tuple[CommitRef, str], ...]
    """Newer commits that are damaged, and the reasons."""
    from_mirror: tuple[str, ...] = ()
    """Manifests, and files with bytes, that the store has lost or damaged and the mirror had."""
    is_of_store: bool
    """All manifests and bytes came from the store."""


def restore(
    store: ObjectStore,
    keys: RunKeys,
    target: RestoreTarget,
    selection: Selection = _NEWEST,
    options: ReadOptions = _DEFAULT,
    *,
    mirror: ObjectStore | None = None,
) -> RestoreResult:
    """Restore the newest whole commit of the selection to the target.

    The destination appears whole or not at all.  The store is only read.  Chunks that an interrupted restore
    of the same commit left beside the destination are reused.  A restore that ends with Stopped or with an
    error of the store leaves its chunks for the next one.

    Args:
        mirror: read for a manifest or a chunk that is damaged or missing in the store.

    Raises:
        NothingToRestore: no commit of the selection is whole; names the reasons.
        CorruptError: there is an unknown object among the commits.
        StagingError: the destination cannot be used, or has too little space.
        StoreError: the store could not be read.
        Stopped: ``options.stop`` was set.
    """
    skipped: list[tuple[CommitRef, str]] = []

    def restored(commit: Commit) -> RestoreResult | None:
        """None if the commit is not known to be healthy, and must be."""
        if target.leaves_room and not selection.ranks and commit.nodes > catalog.MANIFEST_READS:
            _expect_capacity(store, keys, commit, target)
        manifests, from_mirror = manifests_of(store, keys, commit, mirror, selection.ranks)
        if selection.is_healthy and not is_healthy(health_of(manifests)):
            return None
        shards = merged(manifests)
        wanted = [shard for shard in shards if selection.files is None or selection.files(shard)]
        if selection.chosen is not None:
            selection.chosen(commit.ref, wanted)
        done = fetch(
            store,
            keys,
            commit.ref,
            manifests,
            target,
            wanted=wanted,
            options=options,
            mirror=mirror,
        )
        return RestoreResult(
            ref=commit.ref,
            path=target.destination,
            created_wall_s=wall.instant_s(manifests[0].created),
            size_bytes=sum(shard.size_bytes for shard in wanted),
            reused_bytes=done.reused_bytes,
            local_bytes=done.local_bytes,
            skipped=tuple(skipped),
            from_mirror=(*from_mirror, *done.from_mirror),
            is_of_store=done.is_of_store and not from_mirror,
        )

    with target:
        return newest_usable(store, keys, selection, restored, skipped)


def _expect_capacity(
    store: ObjectStore, keys: RunKeys, commit: Commit, target: RestoreTarget
) -> None:
    """Fail before all manifests are read if the shards of all VMs are larger than the file system.

    The parts of all VMs have about the same size.
    """
    with suppress(CorruptError):
        first = catalog.load_node(store, keys, commit, 0)
        target.expect_capacity(commit.nodes * first.size_bytes)


def fetch(
    store: ObjectStore,
    keys: RunKeys,
    ref: CommitRef,
    manifests: Sequence[Manifest],
    target: RestoreTarget,
    *,
    wanted: Sequence[StoredShard],
    options: ReadOptions,
    mirror: ObjectStore | None,
) -> PassResult:
    """Fetch these shards of a commit, and publish the target.

    Raises:
        CorruptError: a chunk is missing or damaged in all places.
        StagingError, StoreError, Stopped: as :func:`restore`.
    """
    refused = partial(catalog.refused, store, keys, ref.generation)
    reader = Reader(store, options, refused, mirror)
    with options.local(ref, wanted) as local:
        # The next checkpoints of this VM are as large as the largest share of a VM.
        set_bytes = max(manifest.size_bytes for manifest in manifests)
        identity = identity_of(keys.run, ref, manifests[0].nodes)
        noted = target.begin(identity, wanted, set_bytes=set_bytes)
        done = reader.read(wanted, target=target, noted=noted, local=local)
    target.publish()
    return done


def manifests_of(
    store: ObjectStore,
    keys: RunKeys,
    commit: Commit,
    mirror: ObjectStore | None,
    ranks: frozenset[int] = frozenset(),
) -> tuple[tuple[Manifest, ...], list[str]]:
    """The manifests of a commit, or of these ranks if they are found, and what the mirror had of them.

    Raises:
        CorruptError: the commit is incomplete, or a manifest that was read is damaged.
    """
    try:
        if ranks and commit.is_complete and (found := _of_ranks(store, keys, commit, ranks)):
            return found, []
        return whole(store, keys, commit), []
    except CorruptError as error:
        manifests = _manifests_of_mirror(mirror, keys, commit, error)
    return manifests, [f"manifest of {commit.ref}"]


def _of_ranks(
    store: ObjectStore, keys: RunKeys, commit: Commit, ranks: frozenset[int]
) -> tuple[Manifest, ...]:
    """The manifest of node 0, and those with the files of these ranks; empty if one of them is elsewhere.

    Launchers number the ranks in the order of the VMs, and each VM but the last has equally many.
    """
    first = catalog.load_node(store, keys, commit, 0)
    per_vm = max(1, len(_ranks_in(first)))
    others = {rank // per_vm for rank in ranks} - {0}
    if not others.issubset(commit.manifests):
        return ()
    of_others = {node: commit.manifests[node] for node in others}
    rest = catalog.load(store, keys, replace(commit, manifests=of_others)) if others else ()
    found = (first, *rest)
    return found if ranks.issubset(chain.from_iterable(map(_ranks_in, found))) else ()


def _ranks_in(manifest: Manifest) -> set[int]:
    """The ranks whose own manifests are among the shards of this VM."""
    paths = (shard.path for shard in manifest.shards if is_rank_manifest(shard.path))
    return {rank_of_directory(path.removesuffix(".json")) for path in paths}


def _manifests_of_mirror(
    mirror: ObjectStore | None, keys: RunKeys, commit: Commit, error: CorruptError
) -> tuple[Manifest, ...]:
    """The manifests of a complete commit that cannot be read from the store.

    The listing of the store alone decides which commits exist, so a deleted commit stays deleted.

    Raises:
        CorruptError: ``error``, the defect in the store: the mirror has no intact copy, or fails.
    """
    if mirror is None or not commit.is_complete:
        raise error
    try:
        manifests = catalog.load(mirror, keys, commit)
    except (CorruptError, StoreError) as reason:
        _log.warning("mirror_not_read", commit=str(commit.ref), reason=reason.line())
        raise error from None
    _log.warning("read_from_mirror", what=f"manifest of {commit.ref}", reason=error.line())
    return manifests


# ---------------------------------------------------------------- commits


def newest_usable(
    store: ObjectStore,
    keys: RunKeys,
    selection: Selection,
    use: Callable[[Commit], Result | None],
    skipped: list[tuple[CommitRef, str]],
) -> Result:
    """The result of ``use`` for the newest commit of the selection that gives one.

    Args:
        use: raises CorruptError for a damaged commit, and returns None for one that is not wanted.
        skipped: takes the damaged commits, with the reasons.

    Raises:
        NothingToRestore, CorruptError, StoreError: as :func:`restore`.
    """
    passed: list[CommitRef] = []
    is_fresh = selection.step is None
    for commit in catalog.newest_commits(store, keys, near=selection.near):
        if selection.step not in (None, commit.ref.step):
            continue
        is_fresh = is_fresh and not commit.is_complete
        try:
            result = use(commit) if selection.accepts(commit.ref) else None
        except CorruptError as error:
            skipped.append((commit.ref, error.line()))
            if selection.skipped is not None:
                selection.skipped(*skipped[-1])
            continue
        if result is not None:
            return result
        passed.append(commit.ref)
    if is_fresh:
        catalog.expect_fresh(store, keys)
    raise nothing_found(keys, selection.step, skipped, passed=passed, is_fresh=is_fresh)


def nothing_found(
    keys: RunKeys,
    step: int | None,
    skipped: Sequence[tuple[CommitRef, str]],
    *,
    passed: Sequence[CommitRef] = (),
    is_fresh: bool = False,
) -> NothingToRestore:
    """The error of a search without a result.

    Args:
        keys: of the run.
        step: that was asked for; None for any.
        skipped: damaged commits, with the reasons.
        passed: commits of this step that were not asked for.
        is_fresh: the run has never committed.
    """
    wanted = f"run {keys.run}" if step is None else f"step {step} of run {keys.run}"
    if passed and not skipped:
        return NothingToRestore(
            f"{wanted} has no commit that was asked for: {passed[0]} is another one",
            hint="List the commits: swansong ls --wide",
        )
    if not skipped:
        return NothingToRestore(f"{wanted} has no commit", is_fresh=is_fresh)
    reasons = "; ".join(f"{ref}: {reason}" for ref, reason in skipped[:_REASONS_MAX])
    more = f"; and {len(skipped) - _REASONS_MAX} more" if len(skipped) > _REASONS_MAX else ""
    return NothingToRestore(
        f"{wanted} has no whole commit: {reasons}{more}",
        hint="" if step is None else "See: swansong verify",
        is_fresh=is_fresh,
        is_damaged=True,
    )


def whole(store: ObjectStore, keys: RunKeys, commit: Commit) -> tuple[Manifest, ...]:
    """The manifests of all nodes of a commit.

    Raises:
        CorruptError: the commit is not complete, or a manifest is invalid.
        StoreError: the store could not be read.
    """
    if not commit.is_complete:
        raise CorruptError(f"{len(commit.manifest_keys)} of {commit.nodes} nodes committed it")
    return catalog.load(store, keys, commit)


def health_of(manifests: Sequence[Manifest]) -> dict[str, float]:
    """The health of a commit, merged over its nodes."""
    return merged_health([manifest.health for manifest in manifests])


def merged(manifests: Sequence[Manifest]) -> list[StoredShard]:
    """The shards of all nodes of a commit, without duplicate paths.

    Raises:
        CorruptError: the manifests contradict each other.
    """
    by_path: dict[str, StoredShard] = {}
    for shard in chain.from_iterable(manifest.shards for manifest in manifests):
        other = by_path.setdefault(shard.path, shard)
        if other is not shard and bytes_of(other) != bytes_of(shard):
            raise CorruptError(f"two nodes have different files called {shard.path}")
    check_paths(list(by_path))
    return list(by_path.values())


def bytes_of(shard: StoredShard) -> tuple[int, list[tuple[bytes, int, int]]]:
    """Equal for two shards only if they have equal bytes."""
    extents = shard.extents
    ranges = [(each.chunk.digest, each.offset_bytes, each.size_bytes) for each in extents]
    return shard.size_bytes, ranges
