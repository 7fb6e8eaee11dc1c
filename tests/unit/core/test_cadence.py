# SPDX-License-Identifier: Apache-2.0
"""The interval between periodic checkpoints."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import SECONDS_MAX
from swansong_bucket.loss_records import History
from swansongd.core.cadence import INTERVAL_MIN_S, expected_mtbf_s, interval_s, optimum_interval_s


def run_time_s(interval: float, save_cost_s: float, mtbf_s: float) -> float:
    """Expected time for an hour of training, with random interruptions at this mean interval."""
    return mtbf_s * (math.exp((interval + save_cost_s) / mtbf_s) - 1) * 3600 / interval


@given(st.floats(0.001, 1000), st.floats(0.00001, 0.5))
def test_no_other_interval_is_better(save_cost_s: float, ratio: float) -> None:
    """No longer or shorter interval reduces the expected time of a run by more than a thousandth."""
    mtbf_s = save_cost_s / ratio
    best_s = run_time_s(optimum_interval_s(save_cost_s, mtbf_s), save_cost_s, mtbf_s)
    for factor in (0.2, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 5):
        other_s = factor * optimum_interval_s(save_cost_s, mtbf_s)
        assert run_time_s(other_s, save_cost_s, mtbf_s) > best_s * 0.999


def test_a_cheap_save_follows_young() -> None:
    """Saves of half a second, four hours between interruptions: nearly the root of twice their product."""
    assert optimum_interval_s(0.5, 14_400) == pytest.approx(math.sqrt(2 * 0.5 * 14_400), rel=0.01)
    assert optimum_interval_s(100.0, 40.0) == 40.0


def test_observed_interruptions_correct_the_prior() -> None:
    """None in a day: longer than assumed; ten in ten hours: about an hour each."""
    assert expected_mtbf_s(14_400, History()) == 14_400
    assert expected_mtbf_s(14_400, History(86_400, 0)) == 14_400 + 86_400
    assert expected_mtbf_s(14_400, History(36_000, 10)) == pytest.approx(4582, abs=1)


def test_never_more_often_than_the_store_can_follow() -> None:
    """A checkpoint begins after the last one is stored; the first comes early, to be measured."""
    assert interval_s(save_cost_s=None, store_s=0.0, mtbf_s=14_400) == INTERVAL_MIN_S
    assert interval_s(save_cost_s=0.001, store_s=0.0, mtbf_s=14_400) == INTERVAL_MIN_S
    assert interval_s(save_cost_s=0.001, store_s=400.0, mtbf_s=14_400) == 400.0
    assert interval_s(save_cost_s=2.0, store_s=5.0, mtbf_s=14_400) == optimum_interval_s(
        2.0, 14_400
    )


@pytest.mark.fault("S13")
@given(
    st.none() | st.floats(-1e9, 1e9),
    st.floats(0, 1e9),
    st.floats(1e-3, 1e9),
    st.floats(-1e300, 1e300),
    st.integers(-5, 10**9),
)
def test_no_measurement_makes_the_interval_fail(
    save_cost_s: float | None, store_s: float, prior_s: float, observed_s: float, uncovered: int
) -> None:
    """A negative or huge cost, from a clock that jumps or a hostile trainer, still gives an interval."""
    mtbf_s = expected_mtbf_s(prior_s, History(observed_s, uncovered))
    assert 0 < mtbf_s < math.inf
    found_s = interval_s(save_cost_s=save_cost_s, store_s=store_s, mtbf_s=mtbf_s)
    assert INTERVAL_MIN_S <= found_s <= SECONDS_MAX
