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
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter

from swansong.bounds import BoundsError

from swansongd.bucket import catalog, wall
from swansongd.bucket import farewell as farewells
from swansongd.bucket import resumption as resumptions
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import RunKeys
from swansongd.core.ledger import Ending, LastReport, Life, Point, Resumption, ended_by, ending
from swansongd.errors import CorruptError, NotFound, TooLarge
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

LIVES_MAX = 1000
"""Number of newest generations that are read."""
_READS = 16
_EARLIER_MAX = 8
"""Number of generations without any training that are passed over."""
_FAREWELLS_MAX = 5
"""Number of newest farewells of a generation that are read: the keys of one second have no order."""
_COMMITS_MAX = 2
"""Two commits give the interval between them."""


@dataclass(frozen=True, slots=True)
class Lives:
    """The generations that trained, oldest first."""

    lives: tuple[Life, ...]
    left_out: int = 0
    """Number of older generations that were not read."""


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
    commits = _by_generation(catalog.list_commits(store, keys))
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
    lives: list[Life] = []
    following: Resumption | None = None
    ended_by_s: tuple[float, ...] = ()
    for number in reversed(newest):
        claimed_wall_s = None
        own = found.get(number)
        if own is None:
            claimed_wall_s = _claimed_wall_s(store, keys, number)
        last = following.earlier if following is not None else None
        if last is None or last.generation != number:
            last = _ending(
                store, keys, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s
            )
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
    return Lives(tuple(reversed(lives)), left_out=len(known) - len(newest))


def earlier_ending(
    store: ObjectStore, keys: RunKeys, generation: int, *, ended_by_s: Sequence[float]
) -> Ending | None:
    """The end of the newest generation before this one that trained; None for the first one of a run.

    Args:
        ended_by_s: see :func:`swansongd.core.ledger.ending`.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
    """
    since = max(0, generation - _EARLIER_MAX)
    numbers = [
        number for number in catalog.claimed(store, keys, since=since) if number < generation
    ]
    commits = _by_generation(catalog.list_commits(store, keys, since=since))
    for number in reversed(numbers):
        own = _resumption(store, keys, number)
        last = _ending(store, keys, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s)
        if last is not None:
            return last
    return None


def _by_generation(commits: Iterable[Commit]) -> Mapping[int, Sequence[Commit]]:
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
    """None if it is missing, malformed, not signed, or of another run or generation."""
    data = _content(store, keys.resumption(generation))
    try:
        found = None if data is None else resumptions.decode(data, keys.signer)
    except CorruptError:
        return None
    is_own = found is not None and (found.run, found.generation) == (keys.run, generation)
    return found if is_own else None


def _ending(
    store: ObjectStore,
    keys: RunKeys,
    generation: int,
    commits: Sequence[Commit],
    *,
    own: Resumption | None,
    ended_by_s: Sequence[float],
) -> Ending | None:
    report = _report(store, keys, generation)
    points = [] if own is None else [Point(own.first_step, own.first_step_wall_s)]
    if report is None or (commits and commits[0].ref.step > report.step):
        points += _points(store, keys, commits[:_COMMITS_MAX])
    return ending(generation, report=report, points=points, ended_by_s=ended_by_s)


def _report(store: ObjectStore, keys: RunKeys, generation: int) -> LastReport | None:
    """The newest report of the training in a farewell."""
    newest = nlargest(
        _FAREWELLS_MAX, store.list(keys.farewell_prefix(generation)), key=attrgetter("key")
    )
    found = []
    for info in newest:
        data = _content(store, info.key)
        try:
            report = None if data is None else farewells.training(data)
        except CorruptError:
            continue
        if report is not None:
            found.append(report)
    return max(found, key=lambda report: (report.wall_s, report.is_over), default=None)


def _points(store: ObjectStore, keys: RunKeys, commits: Sequence[Commit]) -> list[Point]:
    points = []
    for commit in commits:
        try:
            created = catalog.load_node(store, keys, commit, 0).created
        except CorruptError:
            continue
        created_wall_s = _instant_s(created)
        if created_wall_s is not None:
            points.append(Point(commit.ref.step, created_wall_s))
    return points


def _claimed_wall_s(store: ObjectStore, keys: RunKeys, generation: int) -> float | None:
    claim = catalog.claim_of(store, keys, generation)
    return None if claim is None else _instant_s(claim.identity.get("claimed", ""))


def _instant_s(text: str) -> float | None:
    """None if the text is not a time that a record can have."""
    try:
        return wall.required_s(text, "time")
    except BoundsError:
        return None


def _content(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except (NotFound, TooLarge):
        return None
