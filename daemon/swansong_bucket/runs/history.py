# SPDX-License-Identifier: Apache-2.0
"""The history of a run for reports and metrics: its commits, its evacuations and its lives.

Readers hold the newest objects only, so memory and requests are bounded for a run of any age.  A damaged
object never makes a report fail: it is marked or counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from heapq import nlargest

from swansong_bucket.errors import CorruptError, Stopped
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import lives
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.lives import Lives
from swansong_bucket.runs.run import READS, Progress, RecordedCommit, Run
from swansong_bucket.stores.base import ObjectStore

_Key = tuple[CommitRef, int]

ProgressOf = Callable[[str], AbstractContextManager[Progress | None]]

COMMITS_MAX = 500
EVACUATIONS_MAX = 20
FAREWELLS_MAX = 1000
"""Number of newest farewells that are read: an evacuation may leave a dozen."""
STORED_MAX = 500_000
"""Number of stored objects that are listed: 500 requests."""
OUTLIVED_S = 120.0
"""An evacuation whose deadline was this long before the end of the VM was a drill, or was withdrawn."""


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
    run: Run,
    *,
    evacuations_max: int = EVACUATIONS_MAX,
    progress_of: ProgressOf = lambda _: nullcontext(),
) -> RunHistory:
    """The history of a run.

    Args:
        evacuations_max: number of newest evacuations.
        progress_of: the progress of reading ``farewells``, ``commits`` or ``resumptions``.

    Raises:
        StoreError: a request to the store failed.
        Stopped: the run's ``stop`` was set.
    """
    with progress_of("farewells") as progress:
        evacuated = evacuations(run, evacuations_max=evacuations_max, progress=progress)
    with progress_of("commits") as progress:
        committed = commits(run, progress=progress)
    with progress_of("resumptions") as progress:
        lived = lives.lives_of(run, progress=progress)
    return RunHistory(commits=committed, evacuations=evacuated, lives=lived)


def commits(
    run: Run, *, commits_max: int = COMMITS_MAX, progress: Progress | None = None
) -> Commits:
    """The newest commits of a run, whole or not.

    Raises:
        StoreError, Stopped: as :func:`read`.
    """
    newest = run.commits[:commits_max]
    added = AddedBytes()
    # One more: the oldest one adds what the commit before it does not name.
    run.read_commits(run.commits[: commits_max + 1], take=added.take, progress=progress)
    sent_bytes = added.by_commit()
    return Commits(
        commits=tuple(
            replace(found, bytes_sent=sent_bytes[found.ref, found.nodes])
            for found in run.recorded(reversed(newest))
        ),
        left_out=len(run.commits) - len(newest),
    )


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


def evacuations(
    run: Run, *, evacuations_max: int = EVACUATIONS_MAX, progress: Progress | None = None
) -> Evacuations:
    """The newest evacuations of a run; those of several VMs count separately.

    Raises:
        StoreError, Stopped: as :func:`read`.
    """
    count = len(run.farewells.infos)
    # A bucket writer can plant any number of farewells.
    newest = nlargest(FAREWELLS_MAX, run.farewells.infos)
    found: dict[tuple[int, str, int], RecordedEvacuation] = {}
    done = 0
    for start in range(0, len(newest), READS):
        batch = newest[start : start + READS]
        for recorded in run.farewells.contents(batch):
            identity = (recorded.generation, recorded.evacuation_id, recorded.node)
            found[identity] = max(recorded, found.get(identity, recorded), key=newness)
        done += len(batch)
        if progress is not None:
            progress(done, len(newest))
        # One more: the farewells of one second have no order, so the next batch may have a newer one.
        if len(found) > evacuations_max:
            break
    if progress is not None:
        progress(len(newest), len(newest))
    real = (each for each in found.values() if not each.is_void)
    newest_first = sorted(real, key=_opening, reverse=True)
    return Evacuations(
        evacuations=tuple(reversed(newest_first[:evacuations_max])),
        farewells_left_out=count - done,
        damaged=run.farewells.damaged,
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


def newness(recorded: RecordedEvacuation) -> tuple[int, float, float]:
    """Farewells of one second have no order in their keys."""
    entries = len(recorded.timeline) + recorded.left_out
    return entries, recorded.written_wall_s, -recorded.slack_s


def _opening(recorded: RecordedEvacuation) -> tuple[int, float]:
    return recorded.generation, recorded.opened_wall_s
