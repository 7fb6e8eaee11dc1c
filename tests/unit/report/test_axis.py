# SPDX-License-Identifier: Apache-2.0
"""The time axis keeps the order of all times, and breaks only gaps that dwarf everything else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.report.axis import BREAKS_MAX, axis

times = st.lists(st.floats(-1e9, 5e9, allow_nan=False), max_size=30)


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
