# SPDX-License-Identifier: Apache-2.0
"""Examples of the rules of retention; ``testkit/simulation/retention.py`` states all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.model import CommitRef
from swansong_bucket.retention.rules import CommitFacts, reasons_to_keep

from testkit.records import NO_RULE

HOUR_S, DAY_S = 3600.0, 86400.0
NOON_WALL_S = 1_800_014_400.0  # a Friday, 12:00 UTC


def rules(**changes: Any) -> RetentionConfig:
    """No rule but those given."""
    return replace(NO_RULE, **changes)


def whole(step: int, age_s: float | None, generation: int = 1, **more: Any) -> CommitFacts:
    return CommitFacts(ref=CommitRef(generation, step), age_s=age_s, is_whole=True, **more)


def kept(
    commits: list[CommitFacts],
    config: RetentionConfig,
    claims: Mapping[int, float | None] | None = None,
) -> dict[int, list[str]]:
    """Reasons by step."""
    found = reasons_to_keep(commits, claims or {}, config, NOON_WALL_S)
    return {ref.step: reasons for (ref, _), reasons in found.items()}


def test_without_rules_the_newest_commits_stay() -> None:
    """Also the newest one before the last day, and everything that is newer than it."""
    commits = [whole(step, (50 - step) * HOUR_S) for step in range(0, 60, 10)]
    parts = [
        CommitFacts(ref=CommitRef(1, step), nodes=2, age_s=30 * DAY_S, is_whole=False)
        for step in (15, 25)
    ]
    assert kept([*commits, *parts], NO_RULE) == {
        50: ["newest", "younger than 24 h"],
        40: ["younger than 24 h"],
        30: ["younger than 24 h"],
        25: ["newer than that of generation 1 step 20"],
        20: ["newest before the last 24 h"],
    }


@pytest.mark.fault("G45")
def test_a_generation_that_has_not_committed_may_reference_the_state_at_its_claim() -> None:
    """A VM that it fenced can have committed since, so all commits from then on stay."""
    commits = [whole(step, (60 - step) * DAY_S) for step in (10, 20, 30, 40)]
    assert kept(commits, NO_RULE, {1: 90 * DAY_S}).keys() == {40}
    assert kept(commits, NO_RULE, {1: 90 * DAY_S, 2: 25 * DAY_S}).keys() == {30, 40}
    assert kept(commits, NO_RULE, {1: 90 * DAY_S, 2: None}).keys() == {10, 20, 30, 40}
    young = whole(50, 0.0, generation=2)
    assert kept([*commits, young], NO_RULE, {2: 25 * DAY_S}).keys() == {40, 50}
    settled = whole(50, 2 * DAY_S, generation=3)
    assert kept([*commits, settled], NO_RULE, {2: 25 * DAY_S, 3: 2 * DAY_S}).keys() == {50}


def test_an_unknown_age_counts_as_young() -> None:
    """A store that returns no age loses no commit."""
    assert kept([whole(1, None), whole(2, 0.0)], NO_RULE)[1] == ["younger than 24 h"]


def test_the_newest_healthy_commit_and_pins_stay() -> None:
    """Under their reasons, at any age."""
    bad, good = {"loss_is_finite": 0.0}, {"loss_is_finite": 1.0}
    commits = [
        whole(1, 400 * DAY_S, health=good, pins=("paper",)),
        whole(2, 300 * DAY_S, health=good),
        whole(3, 200 * DAY_S, health=good, pins=("a", "b")),
        *(whole(step, 0.0, health=bad) for step in (4, 5)),
        whole(0, 500 * DAY_S, health=good),
    ]
    found = kept(commits, NO_RULE)
    assert found[1] == ["pin paper"]
    assert found[3][:3] == ["healthy", "pin a", "pin b"]
    assert 2 not in found
    assert 0 not in found


@pytest.mark.fault("G44")
@example([20.0, 10.0], [1, 0], [(0.5, 9, 1)], NO_RULE)
@given(
    ages_days=st.lists(st.floats(0, 30), min_size=1, max_size=8),
    losses=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    planted=st.lists(
        st.tuples(st.floats(0, 7), st.integers(1, 9), st.integers(0, 99)), max_size=12
    ),
    config=st.sampled_from(
        [NO_RULE, RetentionConfig(), rules(keep_best=1, keep_every_steps=20)],
    ),
)
def test_planted_commits_displace_little_for_a_week(
    ages_days: list[float],
    losses: list[int],
    planted: list[tuple[float, int, int]],
    config: RetentionConfig,
) -> None:
    """A writer passes for the run, in its newest start or in others, at any times of a week.

    A commit stays that is at least as new as the last one before the first day.  Of those that were a week
    old, the best one and the first one of each interval of steps stay.
    """
    config = replace(config, keep_starts_s=7 * DAY_S)
    began_wall_s = NOON_WALL_S
    made = [
        (began_wall_s - age_days * DAY_S, CommitRef(5, 10 + 10 * n), float(losses[n]))
        for n, age_days in enumerate(sorted(ages_days)[::-1])
    ]
    honest = {ref for _, ref, _ in made}
    old = [(ref, loss) for at_s, ref, loss in made if at_s <= began_wall_s - 7 * DAY_S]
    before = max((ref for at_s, ref, _ in made if at_s < began_wall_s - DAY_S / 2), default=None)
    made += [
        (began_wall_s + days * DAY_S, CommitRef(generation, step), -1.0)
        for days, generation, step in planted
        if CommitRef(generation, step) not in honest
    ]
    left = {ref: (at_s, loss) for at_s, ref, loss in made}
    for hours in range(0, 7 * 24, 6):
        now_wall_s = began_wall_s + hours * HOUR_S
        commits = [
            CommitFacts(
                ref=ref,
                age_s=now_wall_s - at_s,
                is_whole=True,
                health={"loss": loss, "loss_is_finite": float(loss != 0)},
            )
            for ref, (at_s, loss) in left.items()
            if at_s <= now_wall_s
        ]
        stay = reasons_to_keep(commits, {}, config, now_wall_s)
        for commit in commits:
            if commit.key not in stay:
                del left[commit.ref]
    rest = left.keys() & honest
    assert before is None or max(rest) >= before
    healthy = {ref: loss for ref, loss in old if loss}
    still = {ref: left[ref][1] for ref in rest if left[ref][1]}
    if healthy:
        assert max(still) >= max(healthy)
        assert not config.keep_best or min(still.values()) <= min(healthy.values())
    if config.keep_every_steps:
        assert set({ref.step // 20: ref for ref, _ in reversed(old)}.values()) <= rest


def test_the_last_commit_of_each_span_stays() -> None:
    """The newest spans that have a commit count, whatever lies between them."""
    old = [whole(step, (200 - step) * DAY_S + HOUR_S) for step in range(0, 200, 5)]
    newest = whole(999, 0.0)
    for key, name, expected in (
        ("keep_daily", "daily", {999, 195, 190}),
        ("keep_weekly", "weekly", {999, 195, 185}),
        ("keep_monthly", "monthly", {999, 185, 150}),
    ):
        found = kept([*old, newest], rules(**{key: 3}))
        assert {step for step, reasons in found.items() if name in reasons} == expected, name
    minutes = [whole(step, (60 - step) * 600.0 + DAY_S) for step in range(60)]
    found = kept([*minutes, newest], rules(keep_hourly=4, keep_within_s=HOUR_S))
    assert {step for step, reasons in found.items() if "hourly" in reasons} == {999, 59, 53, 47}


@pytest.mark.parametrize("now_wall_s", [0.0, 5e9, 1e15])
def test_each_month_counts_whatever_the_clock_shows(now_wall_s: float) -> None:
    """The clock of the VM may be at 1970, or centuries ahead; the store knows the ages."""
    old = [whole(step, (20 - step) * 31 * DAY_S) for step in range(20)]
    found = reasons_to_keep(old, {}, rules(keep_monthly=12), now_wall_s)
    assert sum("monthly" in reasons for reasons in found.values()) == 12
