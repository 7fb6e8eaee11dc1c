# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic, for all numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong.bounds import SECONDS_MAX
from swansongd.core.planner import (
    Candidate,
    Measurements,
    PlanKind,
    choose,
    decide,
    fits,
    seconds_to_store,
    take_s,
    updated_bandwidth,
)
from swansongd.model import CheckpointId

seconds = st.floats(0, 1e5)
sizes = st.integers(0, 2**43)
bandwidths = st.none() | st.floats(1, 1e11)
measures = st.builds(
    Measurements,
    bandwidth_bytes_per_s=bandwidths,
    save_s=st.none() | seconds,
    save_bytes=st.none() | sizes,
)
candidates = st.lists(
    st.builds(
        Candidate, id=st.builds(CheckpointId, st.integers(0, 99), st.just("n")), bytes_left=sizes
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.id,
)


@given(st.floats(-1e3, 1e5), seconds, measures, st.booleans(), candidates, st.booleans())
def test_take_what_fits_or_what_is_the_only_chance(  # noqa: PLR0917 - hypothesis gives them by position
    left_s: float,
    reserve_s: float,
    measured: Measurements,
    has_trainer: bool,
    sealed: list[Candidate],
    is_committing: bool,
) -> None:
    """TAKE when save + send + reserve fit, or nothing else does; else the best of the rest."""
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
    """A store that takes next to nothing: the plan says so, and the trainer is asked all the same."""
    plan = decide(
        left_s=60.0,
        reserve_s=3.0,
        measured=Measurements(bandwidth_bytes_per_s=0.05, save_s=1.0, save_bytes=10**7),
        has_trainer=True,
        candidates=[Candidate(id=CheckpointId(1, "n"), bytes_left=10**7)],
        is_committing=False,
    )
    assert plan.kind is PlanKind.TAKE
    assert plan.reason.startswith("a new checkpoint needs over an hour, 60.0 s are left")


@given(candidates, st.floats(0, 1e5), bandwidths)
def test_choose_the_newest_that_fits_else_the_nearest(
    sealed: list[Candidate], left_s: float, bandwidth: float | None
) -> None:
    """Nothing newer than the choice fits; if nothing fits at all, nothing is nearer."""
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
def test_a_flight_is_left_only_for_a_set_that_can_be_completed(
    sealed: list[Candidate], data: st.DataObject, left_s: float, bandwidth: float | None
) -> None:
    """For a newer one, or because it can not be completed itself; and never the other way round."""
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
    sealed: list[Candidate], left_s: float, wire: float, breaths: list[float]
) -> None:
    """Whatever fits with room to spare at the worst the wire ever does: at the end a set is whole.

    The wire breathes, the planner believes each breath, and what was sent of a set is kept.
    """
    left_of = {candidate.id: float(candidate.bytes_left) for candidate in sealed}
    hopeful = any(c.bytes_left / (wire * min(*breaths, 1.0)) <= 0.45 * left_s for c in sealed)
    in_flight = None
    step_s = left_s / 400
    for turn in range(400):
        rate = wire * breaths[turn * len(breaths) // 400]
        now_left = [Candidate(id=id_, bytes_left=int(size)) for id_, size in left_of.items()]
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
    assert not hopeful, "there was time for one of them twice over, and none is whole"


@given(st.none() | st.floats(1, 1e11), sizes, st.floats(-1, 1e5))
def test_a_new_bandwidth_lies_between_the_old_one_and_the_sample(
    known: float | None, size_bytes: int, duration_s: float
) -> None:
    """No single transfer makes the estimate leave what was ever measured."""
    updated = updated_bandwidth(known, size_bytes, duration_s)
    if updated is None or updated == known:
        return
    sample = size_bytes / duration_s
    low, high = (sample, sample) if known is None else (min(known, sample), max(known, sample))
    assert low * 0.999 <= updated <= high * 1.001


@given(st.floats(1e6, 1e10), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=50))
def test_it_does_not_matter_how_often_one_looks(wire: float, looks_s: list[float]) -> None:
    """The same transfer in many pieces leads to the same estimate as in one."""
    known: float | None = 10 * wire
    for look_s in looks_s:
        known = updated_bandwidth(known, round(wire * look_s), look_s)
    total_s = sum(looks_s)
    at_once = updated_bandwidth(10 * wire, round(wire * total_s), total_s)
    assert known is not None
    assert at_once is not None
    assert abs(known - at_once) <= 0.001 * at_once


@pytest.mark.fault("O03")
@given(st.floats(1e6, 1e10), st.floats(0.05, 0.5))
def test_a_drop_to_a_tenth_shows_within_two_seconds(wire: float, look_s: float) -> None:
    """By then the estimate is nearer to what is than to what was; standing still shows as well."""
    for now_bytes_per_s in (wire / 10, 0.0):
        known: float | None = wire
        for _ in range(math.ceil(2 / look_s)):
            known = updated_bandwidth(known, round(now_bytes_per_s * look_s), look_s)
        assert known is not None
        assert known <= now_bytes_per_s + 0.15 * wire


def test_nothing_moved_says_nothing_at_first() -> None:
    """A bandwidth of 0 is learned by nobody who never saw a byte move; no time teaches nothing."""
    assert updated_bandwidth(None, 0, 5.0) is None
    assert updated_bandwidth(5e6, 1000, 0.0) == 5e6


@given(measures)
def test_more_bandwidth_never_takes_longer(measured: Measurements) -> None:
    """The formula is monotonic, and what is not measured counts as nothing."""
    assert take_s(measured) >= (measured.save_s or 0)
    assert take_s(Measurements()) == 0


@given(st.integers(0, 2**70), st.none() | st.floats(0, 1e300))
def test_no_time_to_store_is_infinite(size_bytes: int, bandwidth: float | None) -> None:
    """A wire that has stood still for minutes has next to no bandwidth; the numbers stay numbers."""
    assert 0 <= seconds_to_store(size_bytes, bandwidth) <= SECONDS_MAX
    assert seconds_to_store(2**60, 5e-324) == SECONDS_MAX
