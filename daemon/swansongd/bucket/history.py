# SPDX-License-Identifier: Apache-2.0
"""The history of a run for reports and metrics: its commits, its evacuations and its lives.

Readers hold the newest objects only, so memory and requests are bounded for a run of any age.  A damaged
object never makes a report fail: it is marked or counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import attrgetter

from swansongd.bucket import catalog, lives
from swansongd.bucket import farewell as farewells
from swansongd.bucket.catalog import Commit
from swansongd.bucket.farewell import RecordedEvacuation
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.lives import Lives
from swansongd.bucket.manifest import Manifest
from swansongd.errors import CorruptError, NotFound, Stopped, TooLarge
from swansongd.model import CheckpointKind, CommitRef, merged_health
from swansongd.stores.base import ObjectInfo, ObjectStore
from swansongd.util.threads import parallel

_Key = tuple[CommitRef, int]

Progress = Callable[[int, int], None]
ProgressOf = Callable[[str], AbstractContextManager[Progress | None]]

COMMITS_MAX = 500
EVACUATIONS_MAX = 20
FAREWELLS_MAX = 1000
"""Number of newest farewells that are read: an evacuation may leave a dozen."""
STORED_MAX = 500_000
"""Number of stored objects that are listed: 500 requests."""
OUTLIVED_S = 120.0
"""An evacuation whose deadline was this long before the end of the VM was a drill, or was withdrawn."""
_READS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCommit:
    """The facts of the manifests of one commit."""

    ref: CommitRef
    kind: CheckpointKind | None
    """None: a manifest is damaged, so all facts from manifests are missing."""
    created_wall_s: float | None
    """When the last VM wrote its manifest."""
    size_bytes: int
    bytes_sent: int
    """Size of the chunks that no older commit names."""
    loss: float | None
    nodes: int
    is_whole: bool
    """All VMs have committed their parts, and no manifest is damaged."""

    @property
    def bytes_referenced(self) -> int:
        return max(0, self.size_bytes - self.bytes_sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Commits, oldest first."""

    commits: tuple[RecordedCommit, ...]
    left_out: int = 0
    """Number of older commits that were not read."""

    @property
    def newest_whole(self) -> RecordedCommit | None:
        """The commit that a restore takes; None if no commit is whole."""
        return next((commit for commit in reversed(self.commits) if commit.is_whole), None)

    @property
    def unusable_since(self) -> int:
        """Number of newer commits, which are damaged or lack the parts of some VMs."""
        newest = self.newest_whole
        return len(self.commits) - (0 if newest is None else self.commits.index(newest) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuations:
    """The newest farewell of each evacuation, in the order in which the evacuations opened."""

    evacuations: tuple[RecordedEvacuation, ...]
    farewells_left_out: int = 0
    """Number of older farewells that were not read."""
    damaged: tuple[str, ...] = ()
    """Keys of farewells that were read, and are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The newest commits, evacuations and lives of a run."""

    commits: Commits
    evacuations: Evacuations
    lives: Lives


def read(
    store: ObjectStore,
    keys: RunKeys,
    *,
    commits_max: int = COMMITS_MAX,
    evacuations_max: int = EVACUATIONS_MAX,
    lives_max: int = lives.LIVES_MAX,
    progress_of: ProgressOf = lambda _: nullcontext(),
    stop: threading.Event | None = None,
) -> RunHistory:
    """The history of a run, at most this number of newest objects of each kind.

    Args:
        progress_of: the progress of reading ``farewells``, ``commits`` or ``resumptions``.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
        Stopped: ``stop`` was set.
    """
    with progress_of("farewells") as progress:
        evacuated = read_evacuations(
            store, keys, evacuations_max=evacuations_max, progress=progress, stop=stop
        )
    with progress_of("commits") as progress:
        commits = read_commits(store, keys, commits_max=commits_max, progress=progress, stop=stop)
    with progress_of("resumptions") as progress:
        lived = lives.read(store, keys, lives_max=lives_max, progress=progress, stop=stop)
    return RunHistory(commits=commits, evacuations=evacuated, lives=lived)


def read_commits(
    store: ObjectStore,
    keys: RunKeys,
    *,
    commits_max: int = COMMITS_MAX,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Commits:
    """The newest commits of a run, whole or not.

    Raises:
        CorruptError, StoreError, Stopped: as :func:`read`.
    """
    listed = catalog.list_commits(store, keys)
    newest = listed[:commits_max]
    found: dict[_Key, RecordedCommit] = {}
    added = AddedBytes()

    def take(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        added.take(commit, loaded)
        found[commit.key] = _recorded(commit, loaded)

    # One more: the oldest one adds what the commit before it does not name.
    read = listed[: commits_max + 1]
    catalog.load_each(store, keys, read, take, progress=progress, stop=stop)
    sent_bytes = added.by_commit()
    ordered = (
        replace(found[commit.key], bytes_sent=sent_bytes[commit.key]) for commit in reversed(newest)
    )
    return Commits(commits=tuple(ordered), left_out=len(listed) - len(newest))


class AddedBytes:
    """The bytes that each commit of a list added: a chunk counts for the oldest commit that names it."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[_Key, int]] = {}
        """The oldest commit that names a chunk, and the size of the chunk."""

    def take(self, commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        """Count the chunks of a commit; a damaged one has none."""
        if isinstance(loaded, CorruptError):
            return
        for chunk in (chunk for manifest in loaded for chunk in manifest.chunks):
            first = self._first.get(chunk.key)
            if first is None or commit.key < first[0]:
                self._first[chunk.key] = commit.key, chunk.size_bytes

    def by_commit(self) -> Counter[_Key]:
        """The bytes of each commit, after all commits were taken."""
        added: Counter[_Key] = Counter()
        for key, size_bytes in self._first.values():
            added[key] += size_bytes
        return added


def stored_bytes(
    store: ObjectStore, keys: RunKeys, *, stop: threading.Event | None = None
) -> tuple[int, bool]:
    """Bytes of the stored objects of checkpoints, each counted once, and whether all were counted.

    One listing, of 1,000 objects a request: manifests would cost a request for each commit.  Objects that
    wait for ``swansong prune`` count as well, because the store bills them.

    Raises:
        StoreError: a request to the store failed.
        Stopped: ``stop`` was set.
    """
    total_bytes = 0
    for number, info in enumerate(store.list(keys.data)):
        if number == STORED_MAX:
            return total_bytes, False
        if stop is not None and stop.is_set():
            raise Stopped("listing the stored objects was stopped")
        total_bytes += info.size_bytes
    return total_bytes, True


def read_evacuations(
    store: ObjectStore,
    keys: RunKeys,
    *,
    evacuations_max: int = EVACUATIONS_MAX,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Evacuations:
    """The newest evacuations of a run; those of several VMs count separately.

    Raises:
        StoreError: a request to the store failed.
        Stopped: ``stop`` was set.
    """
    # A bucket writer can plant any number of farewells.
    listed = [info for info in store.list(keys.farewells) if keys.parse_farewell(info.key)]
    newest = nlargest(FAREWELLS_MAX, listed, key=attrgetter("key"))
    found: dict[tuple[int, str, int], RecordedEvacuation] = {}
    damaged: list[str] = []
    done = 0
    for start in range(0, len(newest), _READS):
        batch = newest[start : start + _READS]
        for info, recorded in _farewells(store, keys, batch, stop):
            if recorded is None:
                damaged.append(info.key)
                continue
            identity = (recorded.generation, recorded.evacuation_id, recorded.node)
            found[identity] = max(recorded, found.get(identity, recorded), key=_newness)
        done += len(batch)
        if progress is not None:
            progress(done, len(newest))
        # One more: the farewells of one second have no order, so the next batch may have a newer one.
        if len(found) > evacuations_max:
            break
    if progress is not None:
        progress(len(newest), len(newest))
    newest_first = sorted(found.values(), key=_opening, reverse=True)
    return Evacuations(
        evacuations=tuple(reversed(newest_first[:evacuations_max])),
        farewells_left_out=len(listed) - done,
        damaged=tuple(damaged),
    )


def last_evacuation(
    evacuations: Iterable[RecordedEvacuation],
    ended_wall_s: float,
    usual_grace_s: Callable[[RecordedEvacuation], float],
) -> RecordedEvacuation | None:
    """The evacuation during which a VM ended; None if the VM outlived all of them.

    Args:
        evacuations: those of one generation.
        ended_wall_s: end of the generation.
        usual_grace_s: time from the opening to the deadline, for an evacuation without a recorded deadline.
    """

    def is_outlived(each: RecordedEvacuation) -> bool:
        grace_s = usual_grace_s(each) if each.deadline_s is None else each.deadline_s
        return ended_wall_s > each.opened_wall_s + grace_s + OUTLIVED_S

    possible = (each for each in evacuations if not is_outlived(each))
    return max(possible, key=lambda each: each.opened_wall_s, default=None)


def _farewells(
    store: ObjectStore,
    keys: RunKeys,
    infos: Sequence[ObjectInfo],
    stop: threading.Event | None,
) -> Iterator[tuple[ObjectInfo, RecordedEvacuation | None]]:
    read_by_key: dict[str, RecordedEvacuation | None] = {}

    def one(info: ObjectInfo) -> None:
        read_by_key[info.key] = _farewell(store, keys, info.key)

    parallel(infos, one, threads=min(_READS, len(infos)), stop=stop)
    for info in infos:
        yield info, read_by_key[info.key]


def _farewell(store: ObjectStore, keys: RunKeys, key: str) -> RecordedEvacuation | None:
    """None if the farewell is damaged, too large, deleted, or of another run or generation."""
    try:
        recorded = farewells.decode(store.get(key))
    except (CorruptError, NotFound, TooLarge):
        return None
    is_own = (recorded.run, recorded.generation) == (keys.run, keys.parse_farewell(key))
    return recorded if is_own else None


def _newness(recorded: RecordedEvacuation) -> tuple[int, float, float]:
    """Farewells of one second have no order in their keys."""
    entries = len(recorded.timeline) + recorded.left_out
    return entries, recorded.written_wall_s, -recorded.slack_s


def _opening(recorded: RecordedEvacuation) -> tuple[int, float]:
    return recorded.generation, recorded.opened_wall_s


def _recorded(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> RecordedCommit:
    if isinstance(loaded, CorruptError):
        return RecordedCommit(
            ref=commit.ref,
            kind=None,
            created_wall_s=None,
            size_bytes=0,
            bytes_sent=0,
            loss=None,
            nodes=commit.nodes,
            is_whole=False,
        )
    return RecordedCommit(
        ref=commit.ref,
        kind=loaded[0].kind,
        created_wall_s=lives.whole_since_s(loaded),
        size_bytes=sum(manifest.size_bytes for manifest in loaded),
        bytes_sent=0,
        loss=merged_health([manifest.health for manifest in loaded]).get("loss"),
        nodes=commit.nodes,
        is_whole=commit.is_complete,
    )
