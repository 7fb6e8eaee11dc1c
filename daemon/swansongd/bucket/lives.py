# SPDX-License-Identifier: Apache-2.0
"""The lives of a run: when each generation trained, from resumptions, farewells, commits and claims.

The number of requests is limited: a run may have thousands of commits.  A resumption contains the end of the
generation before it, so farewells and manifests are read only where it is missing, and for the newest
generation.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import Protocol

from swansong.bounds import BoundsError

from swansongd.bucket import catalog, wall
from swansongd.bucket import farewell as farewells
from swansongd.bucket import resumption as resumptions
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import CorruptError, NotFound, TooLarge
from swansongd.loss_records import Ending, LastReport, Life, Point, Resumption, ended_by, ending
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

LIVES_MAX = 1000
"""Number of newest generations that are read."""
_READS = 16
_EARLIER_MAX = 8
"""Number of generations without any training that are passed over."""
FAREWELLS_MAX = 5
"""Number of newest farewells of a generation that are read: the keys of one second have no order."""
_COMMITS_MAX = 2
"""Two commits give the interval between them."""


@dataclass(frozen=True, slots=True)
class Lives:
    """The generations that trained, oldest first."""

    lives: tuple[Life, ...]
    left_out: int = 0
    """Number of older generations that were not read."""


class Records(Protocol):
    """The content of the records from which the lives of a run are computed."""

    def resumption(self, generation: int) -> Resumption | None:
        """The resumption of a generation; None without a valid one."""

    def report(self, generation: int) -> LastReport | None:
        """The newest report of the training in a farewell of a generation."""

    def created_wall_s(self, commit: Commit) -> float | None:
        """When the commit became whole."""

    def claimed_wall_s(self, generation: int) -> float | None:
        """When a generation was claimed."""


def read(
    store: ObjectStore,
    keys: RunKeys,
    *,
    lives_max: int = LIVES_MAX,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Lives:
    """The lives of a run, at most this number of newest ones.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
        Stopped: ``stop`` was set.
    """
    numbers = catalog.claimed(store, keys)
    commits = by_generation(catalog.list_commits(store, keys))
    said = {
        number for info in store.list(keys.farewells) if (number := keys.parse_farewell(info.key))
    }
    recorded = {
        number
        for info in store.list(keys.resumptions)
        if (number := keys.parse_resumption(info.key))
    }
    known = [number for number in numbers if number in commits or number in said | recorded]
    newest = known[-lives_max:]
    found = _resumptions(store, keys, recorded.intersection(newest), progress, stop)
    lives = lives_of(_Stored(store, keys, found), newest, commits)
    return Lives(lives, left_out=len(known) - len(newest))


def lives_of(
    records: Records, numbers: Sequence[int], commits: Mapping[int, Sequence[Commit]]
) -> tuple[Life, ...]:
    """The lives of these generations, oldest first.

    Args:
        numbers: ascending.
        commits: the whole commits of each generation, newest first; see :func:`by_generation`.
    """
    lives: list[Life] = []
    following: Resumption | None = None
    ended_by_s: tuple[float, ...] = ()
    for number in reversed(numbers):
        claimed_wall_s = None
        own = records.resumption(number)
        if own is None:
            claimed_wall_s = records.claimed_wall_s(number)
        last = following.earlier if following is not None else None
        if last is None or last.generation != number:
            last = _ending(records, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s)
        if last is None:
            continue  # no trainer reported a step, and nothing was committed
        start_step = _step_before(commits, number) if own is None else own.start_step
        lives.append(
            Life(
                generation=number,
                claimed_wall_s=claimed_wall_s,
                resumption=own,
                start_step=start_step,
                ending=last,
            )
        )
        following = own
        claimed_s = () if claimed_wall_s is None else (claimed_wall_s,)
        ended_by_s = claimed_s if own is None else ended_by(own)
    return tuple(reversed(lives))


def earlier_ending(
    store: ObjectStore, keys: RunKeys, generation: int, *, ended_by_s: Sequence[float]
) -> Ending | None:
    """The end of the newest generation before this one that trained; None for the first one of a run.

    Args:
        ended_by_s: see :func:`swansongd.loss_records.ending`.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
    """
    since = max(0, generation - _EARLIER_MAX)
    numbers = [
        number for number in catalog.claimed(store, keys, since=since) if number < generation
    ]
    commits = by_generation(catalog.list_commits(store, keys, since=since))
    records = _Stored(store, keys, {})
    for number in reversed(numbers):
        own = _resumption(store, keys, number)
        last = _ending(records, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s)
        if last is not None:
            return last
    return None


def by_generation(commits: Iterable[Commit]) -> Mapping[int, Sequence[Commit]]:
    """The whole commits of each generation, newest first."""
    found: defaultdict[int, list[Commit]] = defaultdict(list)
    for commit in commits:
        if commit.is_complete:
            found[commit.ref.generation].append(commit)
    return dict(found)


def _step_before(commits: Mapping[int, Sequence[Commit]], generation: int) -> int:
    """Step of the newest whole commit before this generation; 0 without one."""
    before = max((number for number in commits if number < generation), default=None)
    return 0 if before is None else commits[before][0].ref.step


def _resumptions(
    store: ObjectStore,
    keys: RunKeys,
    numbers: Iterable[int],
    progress: Callable[[int, int], None] | None,
    stop: threading.Event | None,
) -> dict[int, Resumption]:
    found: dict[int, Resumption] = {}
    wanted = sorted(numbers)
    done: list[int] = []
    counting = threading.Lock()

    def one(number: int) -> None:
        resumption = _resumption(store, keys, number)
        with counting:
            done.append(number)
            if resumption is not None:
                found[number] = resumption
            if progress is not None:
                progress(len(done), len(wanted))

    parallel(wanted, one, threads=min(_READS, len(wanted)), stop=stop)
    return found


def _resumption(store: ObjectStore, keys: RunKeys, generation: int) -> Resumption | None:
    """None if it is missing, damaged, or of another run or generation."""
    data = _content(store, keys.resumption(generation))
    try:
        found = None if data is None else resumptions.decode(data)
    except CorruptError:
        return None
    is_own = found is not None and (found.run, found.generation) == (keys.run, generation)
    return found if is_own else None


def _ending(
    records: Records,
    generation: int,
    commits: Sequence[Commit],
    *,
    own: Resumption | None,
    ended_by_s: Sequence[float],
) -> Ending | None:
    report = records.report(generation)
    points = [] if own is None else [Point(own.first_step, own.first_step_wall_s)]
    if report is None or (commits and commits[0].ref.step > report.step):
        for commit in commits[:_COMMITS_MAX]:
            created_wall_s = records.created_wall_s(commit)
            if created_wall_s is not None:
                points.append(Point(commit.ref.step, created_wall_s))
    return ending(generation, report=report, points=points, ended_by_s=ended_by_s)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The records of a run in the store, each read when it is needed."""

    store: ObjectStore
    keys: RunKeys
    resumptions: Mapping[int, Resumption]

    def resumption(self, generation: int) -> Resumption | None:
        return self.resumptions.get(generation)

    def report(self, generation: int) -> LastReport | None:
        prefix = self.keys.farewell_prefix(generation)
        newest = nlargest(FAREWELLS_MAX, self.store.list(prefix), key=attrgetter("key"))
        found = []
        for info in newest:
            data = _content(self.store, info.key)
            with suppress(CorruptError):
                found.append(None if data is None else farewells.decode(data).training)
        return newest_report(found)

    def created_wall_s(self, commit: Commit) -> float | None:
        try:
            # One manifest in memory at a time: those of many VMs take hundreds of megabytes.
            return whole_since_s(
                catalog.load_node(self.store, self.keys, commit, node)
                for node in sorted(commit.manifest_keys)
            )
        except CorruptError:
            return None

    def claimed_wall_s(self, generation: int) -> float | None:
        claim = catalog.claim_of(self.store, self.keys, generation)
        return None if claim is None else instant_s(claim.identity.get("claimed", ""))


def newest_report(reports: Iterable[LastReport | None]) -> LastReport | None:
    """The newest of these reports of a generation; None without any."""
    found = [report for report in reports if report is not None]
    return max(found, key=lambda report: (report.wall_s, report.is_over), default=None)


def whole_since_s(manifests: Iterable[Manifest]) -> float | None:
    """When the last manifest of a commit was created; None without a valid time."""
    created_s = [instant_s(manifest.created) for manifest in manifests]
    return max((at_s for at_s in created_s if at_s is not None), default=None)


def instant_s(text: str) -> float | None:
    """None if the text is not a time that a record can have."""
    try:
        return wall.required_s(text, "time")
    except BoundsError:
        return None


def _content(store: ObjectStore, key: str) -> bytes | None:
    """None if the object is missing, too large, or not signed."""
    try:
        return store.get(key)
    except (CorruptError, NotFound, TooLarge):
        return None
