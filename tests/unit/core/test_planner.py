# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the planner, for all numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong.bounds import SECONDS_MAX
from swansong_bucket.model import CheckpointId
from swansongd.core.planner import (
    Candidate,
    Measurements,
    PlanKind,
    choose,
    decide,
    fits,
    forecast,
    seconds_to_store,
    updated_bandwidth,
)

seconds = st.floats(0, 1e5)
sizes = st.integers(0, 2**43)
bandwidths = st.none() | st.floats(1, 1e11)
measures = st.builds(
    Measurements,
    bandwidth_bytes_per_s=bandwidths,
    save_s=st.none() | seconds,
    save_bytes=st.none() | sizes,
)


def a_candidate(step: int, bytes_left: int) -> Candidate:
    id_ = CheckpointId(step, "n")
    return Candidate(id=id_, order=(0, id_), bytes_left=bytes_left)


candidates = st.lists(
    st.builds(a_candidate, st.integers(0, 99), sizes),
    max_size=6,
    unique_by=lambda candidate: candidate.id,
)


@given(st.floats(-1e3, 1e5), seconds, measures, st.booleans(), candidates, st.booleans())
def test_take_a_checkpoint_that_fits_or_is_the_only_chance(  # noqa: PLR0917 - hypothesis gives them by position
    left_s: float,
    reserve_s: float,
    measured: Measurements,
    has_trainer: bool,
    sealed: list[Candidate],
    is_committing: bool,
) -> None:
    """TAKE when save, send and reserve fit, or nothing else does; else the best of the rest."""
    plan = decide(
        left_s=left_s,
        reserve_s=reserve_s,
        measured=measured,
        has_trainer=has_trainer,
        candidates=sealed,
        is_committing=is_committing,
    )
    send_s = (measured.save_bytes or 0) / (measured.bandwidth_bytes_per_s or float("inf"))
    fits = (measured.save_s or 0) + send_s + reserve_s <= left_s
    is_better_known = is_committing or any(
        seconds_to_store(c.bytes_left, measured.bandwidth_bytes_per_s) <= left_s - reserve_s
        for c in sealed
    )
    assert (plan.kind is PlanKind.TAKE) == (has_trainer and (fits or not is_better_known))
    if plan.kind is PlanKind.TAKE:
        assert plan.fits == fits
    else:
        rest = PlanKind.COMMIT if is_committing else PlanKind.NONE
        assert plan.kind is (PlanKind.FLUSH if sealed else rest)


def test_an_outage_gives_no_absurd_numbers() -> None:
    """The store accepts next to nothing: the plan says so, and the request is made anyway."""
    plan = decide(
        left_s=60.0,
        reserve_s=3.0,
        measured=Measurements(bandwidth_bytes_per_s=0.05, save_s=1.0, save_bytes=10**7),
        has_trainer=True,
        candidates=[a_candidate(1, 10**7)],
        is_committing=False,
    )
    assert plan.kind is PlanKind.TAKE
    assert plan.reason.startswith("a new checkpoint needs over an hour, 60.0 s are left")


@given(candidates, st.floats(0, 1e5), bandwidths)
def test_choose_the_newest_that_fits_else_the_nearest(
    sealed: list[Candidate], left_s: float, bandwidth: float | None
) -> None:
    """No newer set than the choice fits; if none fits at all, none has fewer bytes left."""
    chosen = choose(sealed, left_s=left_s, bandwidth_bytes_per_s=bandwidth)
    if not sealed:
        assert chosen is None
        return
    assert chosen is not None
    fitting = [c.id for c in sealed if seconds_to_store(c.bytes_left, bandwidth) <= left_s]
    if fitting:
        assert chosen.id == max(fitting)
    else:
        assert chosen.bytes_left == min(c.bytes_left for c in sealed)


@given(candidates.filter(bool), st.data(), st.floats(0, 1e5), bandwidths)
def test_a_flight_is_replaced_only_by_a_set_that_can_be_completed(
    sealed: list[Candidate], data: st.DataObject, left_s: float, bandwidth: float | None
) -> None:
    """By a newer one, or because it cannot be completed itself; and never the other way round."""
    current = data.draw(st.sampled_from(sealed))
    chosen = choose(sealed, left_s=left_s, bandwidth_bytes_per_s=bandwidth, in_flight=current.id)
    assert chosen is not None
    if chosen != current:
        assert fits(chosen, left_s, bandwidth)
        assert chosen.id > current.id or not fits(current, left_s, bandwidth)
    elif not fits(current, left_s, bandwidth):
        assert not any(fits(other, left_s, bandwidth) for other in sealed)


@settings(max_examples=300)
@given(
    candidates.filter(bool),
    st.floats(1, 200),
    st.floats(1e6, 1e10),
    st.lists(st.floats(0.7, 1.4), min_size=1, max_size=40),
)
def test_a_finished_older_commit_beats_a_half_sent_newer_one(
    sealed: list[Candidate], left_s: float, link_bytes_per_s: float, factors: list[float]
) -> None:
    """A set that fits with room to spare at the lowest bandwidth is whole at the end.

    The bandwidth fluctuates, the planner follows each sample, and the sent bytes of a set stay.
    """
    left_of = {candidate.id: float(candidate.bytes_left) for candidate in sealed}
    hopeful = any(
        c.bytes_left / (link_bytes_per_s * min(*factors, 1.0)) <= 0.45 * left_s for c in sealed
    )
    in_flight = None
    step_s = left_s / 400
    for turn in range(400):
        rate = link_bytes_per_s * factors[turn * len(factors) // 400]
        now_left = [a_candidate(id_.step, int(size)) for id_, size in left_of.items()]
        chosen = choose(
            now_left,
            left_s=left_s - turn * step_s,
            bandwidth_bytes_per_s=rate,
            in_flight=in_flight,
        )
        assert chosen is not None
        in_flight = chosen.id
        left_of[in_flight] -= rate * step_s
        if left_of[in_flight] <= 0:
            return
    assert not hopeful, "there was time for one of them twice, and none is whole"


@given(st.none() | st.floats(1, 1e11), sizes, st.floats(-1, 1e5))
def test_a_new_bandwidth_lies_between_the_old_one_and_the_sample(
    known: float | None, size_bytes: int, duration_s: float
) -> None:
    """No single transfer moves the estimate out of the measured range."""
    updated = updated_bandwidth(known, size_bytes, duration_s)
    if updated is None or updated == known:
        return
    sample = size_bytes / duration_s
    low, high = (sample, sample) if known is None else (min(known, sample), max(known, sample))
    assert low * 0.999 <= updated <= high * 1.001


@given(st.floats(1e6, 1e10), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=50))
def test_the_sampling_interval_does_not_matter(
    link_bytes_per_s: float, looks_s: list[float]
) -> None:
    """The same transfer in many samples leads to the same estimate as in one."""
    known: float | None = 10 * link_bytes_per_s
    for look_s in looks_s:
        known = updated_bandwidth(known, round(link_bytes_per_s * look_s), look_s)
    total_s = sum(looks_s)
    at_once = updated_bandwidth(10 * link_bytes_per_s, round(link_bytes_per_s * total_s), total_s)
    assert known is not None
    assert at_once is not None
    assert abs(known - at_once) <= 0.001 * at_once


@pytest.mark.fault("O03")
@given(st.floats(1e6, 1e10), st.floats(0.05, 0.5))
def test_a_drop_to_a_tenth_shows_within_two_seconds(link_bytes_per_s: float, look_s: float) -> None:
    """By then the estimate is nearer to the new bandwidth than to the old one; a standstill shows as well."""
    for now_bytes_per_s in (link_bytes_per_s / 10, 0.0):
        known: float | None = link_bytes_per_s
        for _ in range(math.ceil(2 / look_s)):
            known = updated_bandwidth(known, round(now_bytes_per_s * look_s), look_s)
        assert known is not None
        assert known <= now_bytes_per_s + 0.15 * link_bytes_per_s


def test_no_progress_measures_nothing_at_first() -> None:
    """Without a byte sent so far, the bandwidth stays unknown; so it does when no time has passed."""
    assert updated_bandwidth(None, 0, 5.0) is None
    assert updated_bandwidth(5e6, 1000, 0.0) == 5e6


@given(st.integers(0, 2**70), st.none() | st.floats(0, 1e300))
def test_no_time_to_store_is_infinite(size_bytes: int, bandwidth: float | None) -> None:
    """After minutes without progress the bandwidth is next to zero; the numbers stay finite."""
    assert 0 <= seconds_to_store(size_bytes, bandwidth) <= SECONDS_MAX
    assert seconds_to_store(2**60, 5e-324) == SECONDS_MAX


@given(measures)
def test_a_forecast_covers_save_and_send_and_is_never_below_its_expectation(
    measured: Measurements,
) -> None:
    """The pessimistic value is finite, and at least the expected one; unknown values count as zero."""
    made = forecast(measured)
    assert 0 <= made.data_s <= made.expected_s <= made.pessimistic_s <= SECONDS_MAX
    assert min(made.save_s, made.data_s) >= (measured.save_s or 0)
    assert forecast(Measurements()).data_s == 0
