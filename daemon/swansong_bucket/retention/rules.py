# SPDX-License-Identifier: Apache-2.0
"""The rules that keep commits.  Pure; docs/operations/retention.md explains them.

Prune deletes a commit only if no function of this module returns a reason to keep it.

One rule protects the writers: prune keeps the run as it was a while ago, and everything since.  It keeps the
newest whole commit that is older than ``keep_within_s``, and everything newer.  A writer references only
objects of the newest commit that it knows:

- A VM that has committed in its generation references its own newest commit.  The newest whole commit is not
  newer, as long as no newer generation has fenced the VM.
- A fenced VM can still have a request in flight.  It chose its references less than ``keep_within_s`` ago,
  when its newest commit was not older than the newest whole one.
- A VM whose generation has no whole commit yet references the newest whole commit at the time of its claim.
  A VM that it fenced may have committed since.  So the while ends ``keep_within_s`` before the oldest such
  claim.

Without a signing key, another writer can plant any number of newer commits.  A commit is *settled* if it is
older than ``keep_starts_s``.  For that time, planted commits displace neither the last commit of an earlier
day of any start, nor what the rules about the newest, the healthy, the best and the steps choose among the
settled commits.

Ages are those of the store's clock.  The wall clock only cuts time into hours, days, weeks and months.  An
error of this clock moves the cuts, and deletes nothing that another rule keeps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby

from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.model import CommitRef, is_healthy

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S

CommitKey = tuple[CommitRef, int]
"""A commit, and its number of nodes: two jobs of different size can commit one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """A commit as the rules see it."""

    ref: CommitRef
    nodes: int = 1
    age_s: float | None
    """Age of its newest manifest by the store's clock; None counts as young."""
    is_whole: bool
    """The manifests of all nodes are valid, and all their objects are stored."""
    health: Mapping[str, float] = field(default_factory=dict)
    pins: Sequence[str] = ()

    @property
    def key(self) -> CommitKey:
        return self.ref, self.nodes

    def is_younger(self, age_s: float) -> bool:
        return self.age_s is None or self.age_s < age_s


def reasons_to_keep(
    commits: Iterable[CommitFacts],
    claims: Mapping[int, float | None],
    rules: RetentionConfig,
    now_wall_s: float,
) -> dict[CommitKey, list[str]]:
    """The commits to keep, each with all its reasons.  All other commits may be deleted.

    Args:
        commits: all commits of the run.
        claims: the age of each claim, by generation; None if the store does not return it.
        rules: the configured rules.
        now_wall_s: the wall clock; only for the cuts between hours, days, weeks and months.
    """
    newest_first = sorted(commits, key=lambda commit: commit.key, reverse=True)
    whole = [commit for commit in newest_first if commit.is_whole]
    settled = [commit for commit in whole if not commit.is_younger(rules.keep_starts_s)]
    reasons: defaultdict[CommitKey, list[str]] = defaultdict(list)
    for found in (
        _always(newest_first, whole, settled, claims, rules),
        _by_rule(whole, settled, rules, now_wall_s),
    ):
        for commit, reason in found:
            if reason not in reasons[commit.key]:
                reasons[commit.key].append(reason)
    return dict(reasons)


def _always(
    newest_first: Sequence[CommitFacts],
    whole: Sequence[CommitFacts],
    settled: Sequence[CommitFacts],
    claims: Mapping[int, float | None],
    rules: RetentionConfig,
) -> Iterator[tuple[CommitFacts, str]]:
    """The commits that no configuration gives up."""
    within_s = rules.keep_within_s
    since_s = _writers_since_s(whole, claims, rules)
    base = next((commit for commit in whole if not commit.is_younger(since_s)), None)
    healthy = [
        next((commit for commit in counted if is_healthy(commit.health)), None)
        for counted in (whole, settled)
    ]
    for commit in newest_first:
        is_newest = bool(whole) and commit is whole[0]
        if is_newest:
            yield commit, "newest"
        if commit in healthy:
            yield commit, "healthy"
        for name in commit.pins:
            yield commit, f"pin {name}"
        if commit.is_younger(within_s):
            yield commit, f"younger than {age_text(within_s)}"
        elif commit is base and not is_newest:
            yield commit, f"newest before the last {age_text(since_s)}"
        elif base is None:
            yield commit, f"no whole commit is older than {age_text(since_s)}"
        elif commit.key > base.key:
            yield commit, f"newer than that of {base.ref}"
        if not commit.is_whole and commit.is_younger(rules.orphans_after_s):
            yield commit, "not yet whole"


def _writers_since_s(
    whole: Sequence[CommitFacts], claims: Mapping[int, float | None], rules: RetentionConfig
) -> float:
    """The age of the oldest moment whose newest whole commit a writer may still reference."""
    within_s = rules.keep_within_s
    settled = next((commit for commit in whole if not commit.is_younger(within_s)), None)
    if settled is None:
        return within_s
    committed = {commit.ref.generation for commit in whole}
    return within_s + max(
        (
            math.inf if age_s is None else age_s
            for generation, age_s in claims.items()
            if generation > settled.ref.generation and generation not in committed
        ),
        default=0.0,
    )


def _by_rule(
    whole: Sequence[CommitFacts],
    settled: Sequence[CommitFacts],
    rules: RetentionConfig,
    now_wall_s: float,
) -> Iterator[tuple[CommitFacts, str]]:
    """The whole commits that a configured rule keeps."""

    def since(unit_s: float, offset_s: float = 0.0) -> Callable[[float], Hashable]:
        return lambda wall_s: (wall_s + offset_s) // unit_s

    day = since(_DAY_S)
    for commit in whole[: rules.keep_last]:
        yield commit, f"last {rules.keep_last}"
    for _, start in groupby(whole, key=lambda commit: commit.ref.generation):
        for commit in _last_of_each(start, math.inf, day, now_wall_s):
            if commit.is_younger(rules.keep_starts_s):
                yield commit, "daily of its start"
    if settled and settled[0] is not whole[0]:
        yield settled[0], f"newest before the last {age_text(rules.keep_starts_s)}"
    cuts = (
        ("hourly", rules.keep_hourly, since(_HOUR_S)),
        ("daily", rules.keep_daily, day),
        ("weekly", rules.keep_weekly, since(7 * _DAY_S, 3 * _DAY_S)),  # 1970 began on a Thursday
        ("monthly", rules.keep_monthly, _month),
    )
    for name, count, cut in cuts:
        for commit in _last_of_each(whole, count, cut, now_wall_s):
            yield commit, name
    for counted in (whole, settled):
        if rules.keep_every_steps is not None:
            first, turns = _first_of_each(counted, rules.keep_every_steps)
            for commit in first:
                yield commit, f"every {rules.keep_every_steps} steps"
            for commit in turns:
                yield commit, "training was repeated from here"
        for commit in _best(counted, rules):
            yield commit, f"best {rules.best_metric}"


def _month(wall_s: float) -> Hashable:
    # The calendar repeats after 400 years.  The clock of a VM may show any time.
    cycle, within_s = divmod(wall_s, 146_097 * _DAY_S)
    moment = datetime.fromtimestamp(within_s, UTC)
    return cycle, moment.year, moment.month


def _last_of_each(
    whole: Iterable[CommitFacts], count: float, cut: Callable[[float], Hashable], now_wall_s: float
) -> Iterator[CommitFacts]:
    """The newest commit of each of the newest ``count`` spans of time that have one."""
    seen: set[Hashable] = set()
    for commit in whole:
        if len(seen) >= count:
            return
        if commit.age_s is None:
            continue  # it counts as young
        span = cut(now_wall_s - commit.age_s)
        if span not in seen:
            seen.add(span)
            yield commit


def _first_of_each(
    whole: Sequence[CommitFacts], steps: int
) -> tuple[Iterable[CommitFacts], Iterable[CommitFacts]]:
    """The first commit of each interval of steps, in the line that ends with the newest commit.

    A commit is not in this line if a newer generation has a commit at its step or before: the training was
    repeated from there.

    Returns:
        The first commits, and those that show where the training was repeated.  Without the latter, the next
        prune would count an abandoned commit, which a pin may keep, instead of the first one.
    """
    first: dict[int, CommitFacts] = {}
    turns: dict[CommitKey, CommitFacts] = {}
    generation = 0
    lowest: CommitFacts | None = None
    turn: CommitFacts | None = None
    for commit in whole:
        ref = commit.ref
        if ref.generation != generation:
            generation, turn = ref.generation, lowest
        if turn is None or ref.step < turn.ref.step:
            lowest = commit
            first[ref.step // steps] = commit
        else:
            turns[turn.key] = turn
    return first.values(), turns.values()


def _best(whole: Sequence[CommitFacts], rules: RetentionConfig) -> list[CommitFacts]:
    """The best commits by the metric, without known unhealthy ones; of equal ones the newest."""
    metric, sign = rules.best_metric, -1.0 if rules.best_is_highest else 1.0
    rated = [
        commit
        for commit in whole
        if metric in commit.health and is_healthy(commit.health) is not False
    ]
    rated.sort(key=lambda commit: sign * commit.health[metric])  # stable: the newest first
    return rated[: rules.keep_best]


def age_text(age_s: float) -> str:
    """An age as ``90 min``, ``24 h`` or ``7 d``."""
    if age_s == math.inf:
        return "an unknown time"
    for unit, unit_s in (("d", _DAY_S), ("h", _HOUR_S)):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.3g} {unit}"
    return f"{age_s / 60:.3g} min"
