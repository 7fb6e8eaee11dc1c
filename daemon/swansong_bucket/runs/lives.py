# SPDX-License-Identifier: Apache-2.0
"""The lives of a run: when each generation trained, from resumptions, farewells, commits and claims.

The number of requests is limited: a run may have thousands of commits.  A resumption contains the end of the
generation before it, so farewells and manifests are read only where it is missing, and for the newest
generation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import GenerationEnd, Life, Point, Resumption, ended_by, ending
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.run import Progress, Run
from swansong_bucket.stores.base import ObjectStore

LIVES_MAX = 1000
"""Number of newest generations that are read."""
_EARLIER_MAX = 8
"""Number of generations without any training that are passed over."""
_COMMITS_MAX = 2
"""Two commits give the interval between them."""


@dataclass(frozen=True, slots=True)
class Lives:
    """The generations that trained, oldest first."""

    lives: tuple[Life, ...]
    left_out: int = 0
    """Number of older generations that were not read."""


def lives_of(run: Run, *, lives_max: int = LIVES_MAX, progress: Progress | None = None) -> Lives:
    """The lives of a run, at most this number of newest ones.

    Args:
        progress: of reading resumptions.

    Raises:
        StoreError: a request to the store failed.
        Stopped: the run's ``stop`` was set.
    """
    commits = _by_generation(run.commits)
    known = sorted(run.trained.union(commits).intersection(run.claims.infos))
    newest = known[-lives_max:]
    run.resumptions.read(newest, progress)
    run.claims.read(number for number in newest if run.resumptions.get(number) is None)
    lives: list[Life] = []
    following: Resumption | None = None
    ended_by_s: tuple[float, ...] = ()
    for number in reversed(newest):
        own = run.resumptions.get(number)
        claimed_wall_s = run.claims.get(number) if own is None else None
        last = following.earlier if following is not None else None
        if last is None or last.generation != number:
            last = _ending(run, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s)
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
) -> GenerationEnd | None:
    """The end of the newest generation before this one that trained; None for the first one of a run.

    Args:
        ended_by_s: see :func:`swansong_bucket.loss_records.ending`.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: a request to the store failed.
    """
    run = Run.listed(store, keys, since=max(1, generation - _EARLIER_MAX))
    commits = _by_generation(run.commits)
    for number in sorted(run.claims.infos, reverse=True):
        if number < generation:
            own = run.resumptions.get(number)
            last = _ending(run, number, commits.get(number, ()), own=own, ended_by_s=ended_by_s)
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


def _ending(
    run: Run,
    generation: int,
    commits: Sequence[Commit],
    *,
    own: Resumption | None,
    ended_by_s: Sequence[float],
) -> GenerationEnd | None:
    report = run.report(generation)
    points = [] if own is None else [Point(own.first_step, own.first_step_wall_s)]
    if report is None or (commits and commits[0].ref.step > report.step):
        for commit in commits[:_COMMITS_MAX]:
            created_wall_s = run.created_wall_s(commit)
            if created_wall_s is not None:
                points.append(Point(commit.ref.step, created_wall_s))
    return ending(generation, report=report, points=points, ended_by_s=ended_by_s)
