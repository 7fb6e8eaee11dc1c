# SPDX-License-Identifier: Apache-2.0
"""The schedule of follow-up checkpoints: what fits, what pays, and what it saves."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from swansong.bounds import SECONDS_MAX
from swansongd.core.followup import LATENCY_S, ROUND_S
from swansongd.core.schedule import (
    INTERVAL_MIN_S,
    LATE_S,
    MISSED_SHARE,
    Ending,
    FollowUpCost,
    earlier_count,
    next_start_s,
)

RESERVE_S = 3.0


def a_cost(
    data_s: float = 2.0, *, stall_s: float = 0.1, step_s: float = 0.5, commit_s: float | None = None
) -> FollowUpCost:
    return FollowUpCost(
        data_s=data_s,
        commit_s=data_s if commit_s is None else commit_s,
        stall_s=stall_s,
        step_s=step_s,
    )


def starts(
    left_s: float, cost: FollowUpCost, *, early_per_s: float = 0.0, age_s: float = 0.0
) -> list[float]:
    """Seconds left at the start of each follow-up, where each one takes the time of the cost."""
    found = []
    while True:
        ending = Ending(left_s=left_s, early_per_s=early_per_s)
        wait_s = next_start_s(ending, cost, reserve_s=RESERVE_S, age_s=age_s)
        if wait_s is None:
            return found
        left_s -= wait_s
        age_s += wait_s
        if wait_s == 0 or next_start_s(
            Ending(left_s=left_s, early_per_s=early_per_s), cost, reserve_s=RESERVE_S, age_s=age_s
        ) == pytest.approx(0.0, abs=1e-6):
            found.append(left_s)
            left_s -= cost.commit_s + cost.step_s
            age_s = cost.commit_s + cost.step_s


costs = st.builds(
    lambda data_s, manifest_s, **times: a_cost(data_s, commit_s=data_s + manifest_s, **times),
    st.floats(0.01, 100),
    st.floats(0.0, 20),  # it may exceed the reserve
    stall_s=st.floats(0.0, 20),
    step_s=st.floats(0.01, 10),
)


def needed_s(cost: FollowUpCost) -> float:
    """Data and reserve, or data and manifest if that takes longer, after one step."""
    return max(cost.data_s + RESERVE_S, cost.commit_s) + cost.step_s


@given(costs, st.floats(0, 300), st.floats(0, 0.1), st.floats(0, 3600))
def test_no_follow_up_starts_that_does_not_fit(
    cost: FollowUpCost, left_s: float, early_per_s: float, age_s: float
) -> None:
    """Data, reserve, manifest and a step fit into the time left at each start, and no two follow-ups overlap.

    A wait always ends in time.  Only a start without a wait is late by up to LATE_S: at the first look, or
    just after another follow-up.
    """
    found = starts(left_s, cost, early_per_s=early_per_s, age_s=age_s)
    busy_s = cost.commit_s + cost.step_s
    for left, at_once in zip(found, [left_s, *(left - busy_s for left in found)], strict=False):
        late_s = LATE_S if left == at_once else 0.0
        assert left >= needed_s(cost) - late_s - 1e-6
    for before, after in itertools.pairwise(found):
        assert before - after >= max(INTERVAL_MIN_S, busy_s) - 1e-6 or (
            after == found[-1] and before - after >= busy_s - 1e-6
        )


@pytest.mark.parametrize(
    ("late_s", "age_s", "tried_s", "starts_now"),
    [
        (LATE_S - 0.001, 60.0, math.inf, True),
        (LATE_S + 0.001, 60.0, math.inf, False),
        (0.001, LATE_S, math.inf, False),
        (0.001, 60.0, LATE_S, False),
        (0.001, LATE_S + 0.001, LATE_S + 0.001, True),
    ],
)
def test_the_lateness_of_the_last_one_is_limited(
    late_s: float, age_s: float, tried_s: float, starts_now: bool
) -> None:
    """At most LATE_S, and not shortly after another attempt: that one was the last one."""
    cost = a_cost(6.0, commit_s=7.0, stall_s=0.1)
    look = Ending(left_s=needed_s(cost) - late_s)
    wait_s = next_start_s(look, cost, reserve_s=RESERVE_S, age_s=age_s, tried_s=tried_s)
    assert wait_s == (0.0 if starts_now else None)


@given(costs, st.floats(0, 300), st.floats(0, 0.1), st.floats(0, 3600))
def test_a_late_start_uses_up_the_latency_and_not_the_reserve(
    cost: FollowUpCost, left_s: float, early_per_s: float, age_s: float
) -> None:
    """The daemon backs off by a step, and by its own latency.

    The latency is that of the tick which makes a start late, so a late start uses up this part only.  Data,
    reserve and a whole step remain.
    """
    assert min(LATENCY_S, ROUND_S) >= LATE_S
    served = replace(cost, step_s=cost.step_s + LATENCY_S)
    for left in starts(left_s, served, early_per_s=early_per_s, age_s=age_s):
        assert left >= max(cost.data_s + RESERVE_S, cost.commit_s) + cost.step_s - 1e-6


@given(costs, st.floats(0, 300), st.floats(0, 0.01), st.floats(0, 3600))
def test_the_training_to_repeat_is_bounded(
    cost: FollowUpCost, left_s: float, early_per_s: float, age_s: float
) -> None:
    """At most save, send, reserve and a step are repeated, with what each of these cases adds.

    - A manifest that takes longer than the reserve counts in its place.
    - The last one does not start if it gains no more training than it blocks: the stall is added.
    - If the VM may end early, and only one more fits, it may start now.  That is less than a whole follow-up
      before the last moment.
    """
    bound_s = needed_s(cost)
    assume(left_s > bound_s)
    found = starts(left_s, cost, early_per_s=early_per_s, age_s=age_s)
    newest_s = found[-1] if found else left_s + age_s
    is_alone = early_per_s * left_s * (age_s + left_s) > 0
    alone_s = cost.commit_s + cost.step_s if is_alone else 0.0
    assert newest_s <= bound_s + cost.stall_s + alone_s + 1e-6


@given(costs, st.floats(0, 3600), st.floats(0, 3600))
def test_with_an_exact_end_the_last_one_starts_as_late_as_is_safe(
    cost: FollowUpCost, left_s: float, age_s: float
) -> None:
    """A step before the last moment, and at most one before it, unless they block more than they gain.

    So at most save, send, reserve and a step are repeated, without any addition.
    """
    found = starts(left_s, cost, age_s=age_s)
    assert len(found) <= 2
    lead = needed_s(cost)
    if left_s >= lead and age_s + left_s - lead > cost.stall_s:
        assert found[-1] == pytest.approx(lead)


def test_the_one_before_the_last_is_over_when_the_last_one_starts() -> None:
    """One in ten last ones is too late: a cheap save just before it keeps most of the training."""
    last_s = 6.0 + RESERVE_S + 0.5
    found = starts(120.0, a_cost(6.0, stall_s=0.4))
    assert found == [pytest.approx(last_s + 6.5 + LATE_S), pytest.approx(last_s)]
    dear_s = MISSED_SHARE * 120.0
    assert starts(120.0, a_cost(6.0, stall_s=dear_s)) == [pytest.approx(last_s)]


@given(costs, st.floats(LATE_S, 60, exclude_min=True), st.floats(0.001, LATE_S))
def test_a_loop_that_looks_at_intervals_starts_the_last_one(
    cost: FollowUpCost, age_s: float, interval_s: float
) -> None:
    """Also shortly after another checkpoint, no look falls exactly on the last moment."""
    looks = (Ending(left_s=needed_s(cost) + x) for x in (0.0005, 0.0005 - interval_s))
    waits = [next_start_s(look, cost, reserve_s=RESERVE_S, age_s=age_s) for look in looks]
    assert waits[0] is None or waits[0] > 0
    assert waits[1] == (None if age_s <= cost.stall_s else 0.0)


@given(
    st.floats(1, 10_000), st.floats(1e-6, 0.1), st.floats(0, 100), st.floats(INTERVAL_MIN_S, 100)
)
def test_no_other_number_of_earlier_ones_is_better(
    between_s: float, early_per_s: float, stall_s: float, apart_s: float
) -> None:
    """The count minimises stalls plus the training that an early end repeats, among those that fit."""

    def loss_s(count: int) -> float:
        return count * stall_s + early_per_s * between_s**2 / 2 / (count + 1)

    count = earlier_count(between_s, early_per_s=early_per_s, stall_s=stall_s, apart_s=apart_s)
    room = max(0, math.floor(between_s / apart_s) - 1)
    assert 0 <= count <= room
    for other in {0, count - 1, count + 1, room // 2, room}:
        if 0 <= other <= room:
            assert loss_s(count) <= loss_s(other) * (1 + 1e-9)


def test_a_notice_of_aws_has_a_few_cheap_ones_and_the_last() -> None:
    """120 s, a save that blocks for 0.1 s, and one end in twenty that comes early."""
    found = starts(118.0, a_cost(2.0, stall_s=0.1), early_per_s=0.05 / 120)
    assert len(found) == 6
    assert found[-1] == pytest.approx(2.0 + RESERVE_S + 0.5)
    gaps = [before - after for before, after in itertools.pairwise(found[:-1])]
    assert gaps == [pytest.approx(gaps[0], rel=0.2)] * 4


@pytest.mark.parametrize(
    ("left_s", "cost", "age_s", "last_s"),
    [
        (100.0, a_cost(20.0, stall_s=10.0), 0.0, 23.5),  # an early end, which is rare, costs less
        (70.0, a_cost(40.0), 40.0, 43.5),  # one more fits; it starts late, not at once
    ],
)
def test_an_earlier_one_never_costs_the_last_one(
    left_s: float, cost: FollowUpCost, age_s: float, last_s: float
) -> None:
    """A save that blocks for 10 s, and a state that takes 40 s, have the last one only."""
    found = starts(left_s, cost, early_per_s=0.05 / 120, age_s=age_s)
    assert found == [pytest.approx(last_s)]


def test_a_start_now_beats_a_later_one_that_gains_little() -> None:
    """The end may come any second, much training is unsaved, and waiting gains a second or two only."""
    cost = a_cost(8.0, stall_s=0.1)
    likely = Ending(left_s=13.0, early_per_s=1 / 60)
    assert next_start_s(likely, cost, reserve_s=RESERVE_S, age_s=20.0) == 0.0
    unlikely = Ending(left_s=13.0, early_per_s=1e-5)
    assert next_start_s(unlikely, cost, reserve_s=RESERVE_S, age_s=20.0) == pytest.approx(1.5)


def test_a_failed_one_is_not_repeated_at_once_and_does_not_delay_the_last() -> None:
    """After a failure an interval passes, as after a success; the last one starts at its moment."""
    cost, ending = a_cost(2.0), Ending(left_s=100.0, early_per_s=0.05 / 120)
    assert next_start_s(ending, cost, reserve_s=RESERVE_S, age_s=60.0) == 0.0
    wait_s = next_start_s(ending, cost, reserve_s=RESERVE_S, age_s=60.0, tried_s=1.0)
    assert wait_s is not None
    assert wait_s >= INTERVAL_MIN_S
    near = Ending(left_s=6.0, early_per_s=0.05 / 120)
    last_s = next_start_s(near, cost, reserve_s=RESERVE_S, age_s=60.0, tried_s=1.0)
    assert last_s == pytest.approx(0.5)


def test_none_starts_that_blocks_more_than_it_gains() -> None:
    """Ten seconds since the newest state, and a save that blocks for twenty."""
    cost = a_cost(2.0, stall_s=20.0)
    assert next_start_s(Ending(left_s=10.0), cost, reserve_s=RESERVE_S, age_s=5.0) is None


@pytest.mark.fault("S13")
@given(*[st.floats(0, SECONDS_MAX)] * 5)
def test_any_report_of_a_trainer_gives_a_finite_time(
    left_s: float, data_s: float, stall_s: float, step_s: float, age_s: float
) -> None:
    """No time that a trainer may report breaks the arithmetic."""
    cost = a_cost(data_s, stall_s=stall_s, step_s=step_s)
    ending = Ending(left_s=left_s, early_per_s=0.01)
    wait_s = next_start_s(ending, cost, reserve_s=RESERVE_S, age_s=age_s)
    assert wait_s is None or 0 <= wait_s <= SECONDS_MAX
