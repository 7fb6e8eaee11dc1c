# SPDX-License-Identifier: Apache-2.0
"""The last step of a generation, from what its VM has left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import bounds
from swansong_bucket.loss_records import LastReport, Point, ending

REPORT = LastReport(
    step=100,
    wall_s=1000.0,
    step_s=2.0,
    ranks=4,
    saves_s=5.0,
    stall_s=1.5,
    is_over=False,
    deadline_wall_s=1021.0,
)


def test_the_end_is_exact_if_the_farewell_says_that_training_is_over() -> None:
    """Nothing is estimated then, however long the VM lived on."""
    found = ending(3, report=replace(REPORT, is_over=True), points=[], ended_by_s=(5000.0,))
    assert found is not None
    assert (found.step, found.wall_s, found.is_estimated) == (100, 1000.0, False)
    assert (found.ranks, found.saves_s, found.stall_s) == (4, 5.0, 1.5)


@pytest.mark.parametrize(
    ("ended_by_s", "step"),
    [((5000.0,), 110), ((10.0, 1008.0, 5000.0), 104), ((10.0,), 100), ((), 100)],
)
def test_training_continues_after_a_farewell(ended_by_s: tuple[float, ...], step: int) -> None:
    """At its pace, until the deadline or the next VM; not at all if no later VM is known."""
    found = ending(3, report=REPORT, points=[Point(80, 900.0)], ended_by_s=ended_by_s)
    assert found is not None
    assert (found.step, found.is_estimated) == (step, True)
    assert found.wall_s == pytest.approx(1000.0 + 2.0 * (step - 100))


def test_a_vm_without_a_farewell_lived_half_an_interval_more() -> None:
    """The pace is that of its commits; the next VM is a bound here, too."""
    points = [Point(50, 900.0), Point(1, 802.0), Point(25, 850.0)]
    found = ending(3, report=None, points=points, ended_by_s=(9000.0,))
    assert found is not None
    assert (found.step, found.wall_s) == (62, pytest.approx(924.0))
    assert (found.step_s, found.stall_s, found.is_estimated) == (2.0, None, True)
    soon = ending(3, report=None, points=points, ended_by_s=(910.0,))
    assert soon is not None
    assert soon.step == 55


def test_a_commit_after_the_farewell_counts() -> None:
    """The VM has outlived its notice."""
    points = [Point(300, 2000.0), Point(250, 1900.0)]
    found = ending(3, report=replace(REPORT, is_over=True), points=points, ended_by_s=(9000.0,))
    assert found is not None
    assert (found.step, found.is_estimated) == (325, True)


steps = st.integers(0, bounds.STEP_MAX)
instants = st.floats(0.0, 4_102_444_800.0)


@pytest.mark.fault("S25")
@given(
    report=st.none()
    | st.builds(
        LastReport,
        step=steps,
        wall_s=instants,
        step_s=st.none() | st.floats(0.0, 1e9),
        ranks=st.just(1),
        saves_s=st.just(0.0),
        stall_s=st.just(0.0),
        is_over=st.booleans(),
        deadline_wall_s=st.none() | instants,
    ),
    points=st.lists(st.builds(Point, steps, instants), max_size=4),
    ended_by_s=st.lists(instants, max_size=3),
)
def test_forged_traces_give_a_step_within_the_bounds(
    report: LastReport | None, points: list[Point], ended_by_s: list[float]
) -> None:
    """Any numbers lead to an end at or after the last trace, and raise nothing."""
    found = ending(1, report=report, points=points, ended_by_s=ended_by_s)
    if found is not None:
        assert 0 <= found.step <= bounds.STEP_MAX
        assert 0.0 <= found.wall_s <= 4_102_444_801.0
