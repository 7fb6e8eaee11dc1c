# SPDX-License-Identifier: Apache-2.0
"""The time axis keeps the order of all times, and breaks only gaps that dwarf everything else."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong_tools.report.axis import BREAKS_MAX, TICKS_MAX, axis

times = st.lists(st.floats(-1e9, 5e9, allow_nan=False), max_size=30)
FAR = (1e9, 4.1e9, 1e11, 1e16, 1e300, math.inf)
hostile_times = st.lists(st.floats() | st.sampled_from(FAR) | st.floats(-1e12, 1e12), max_size=30)


def test_an_axis_without_long_gaps_is_proportional() -> None:
    """Equal times have equal widths, and nothing is left out."""
    on = axis([0, 10, 20, 30])
    assert on.breaks == ()
    assert on.at(20) - on.at(10) == pytest.approx(on.at(30) - on.at(20))
    assert [tick.time_s for tick in on.ticks()] == [0, 10, 20, 30]


def test_a_night_without_a_vm_does_not_squash_the_evacuation() -> None:
    """Two minutes, eight hours of nothing, one minute: both ends stay readable."""
    night_s = 8 * 3600
    on = axis([0, 50, 120, night_s, night_s + 60])
    (only,) = on.breaks
    assert only.length_s == night_s - 120
    assert on.at(120) - on.at(0) > 0.5
    assert on.at(night_s + 60) - on.at(night_s) > 0.25


def test_several_nights() -> None:
    """Each of them becomes a break, up to a limit."""
    starts = [number * 86400 for number in range(9)]
    on = axis([start + offset for start in starts for offset in (0, 600)])
    assert len(on.breaks) <= BREAKS_MAX


@pytest.mark.parametrize("values", [[], [5.0], [5.0, 5.0], [0.0, 1e-9]])
def test_an_axis_of_hardly_any_time(values: list[float]) -> None:
    """A single moment has a position, too."""
    on = axis(values)
    assert 0 <= on.at(5.0) <= 1
    assert len(on.ticks()) <= 2


@given(times, times)
def test_positions_are_ordered_and_inside(shown: list[float], asked: list[float]) -> None:
    """For any times, those of the axis and others."""
    on = axis(shown)
    positions = [on.at(time_s) for time_s in sorted(shown + asked)]
    assert all(0.0 <= position <= 1.0 for position in positions)
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(positions))
    ticks = on.ticks()
    assert all(0.0 <= tick.at <= 1.0 for tick in ticks)
    assert all(later.at - earlier.at > 0.2 for earlier, later in pairwise(ticks))
    assert all(0 < each.left < each.right < 1 for each in on.breaks)


@given(hostile_times, st.floats())
@example([0.0, 1e300], 1.0)
@example([1e16, 1e16 + 2], 1e16)
@example([0.0, math.nan, math.inf, -math.inf], math.nan)
def test_hostile_times_make_few_ticks(shown: list[float], asked: float) -> None:
    """Any floats: a far time costs no loop, and everything lies inside."""
    on = axis(shown)
    ticks = on.ticks()
    assert len(ticks) <= TICKS_MAX
    assert all(0.0 <= position <= 1.0 for position in (on.at(asked), *map(on.at, shown)))
    assert all(0.0 <= tick.at <= 1.0 for tick in ticks)
    assert all(later.at - earlier.at > 0.2 for earlier, later in pairwise(ticks))


@pytest.mark.parametrize("last_s", [1.0, 1e3, 1e6, 1e9, 4.1e9, 9.9e10])
def test_an_axis_of_any_length_has_round_ticks(last_s: float) -> None:
    """From seconds to centuries there are two to five, at multiples of one step."""
    ticks = axis([0.0, last_s]).ticks()
    assert 2 <= len(ticks) <= TICKS_MAX
    step_s = ticks[1].time_s - ticks[0].time_s
    assert [tick.time_s for tick in ticks] == [number * step_s for number in range(len(ticks))]
