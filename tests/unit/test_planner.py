# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic, for all numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swansongd.core.planner import (
    Candidate,
    Measured,
    PlanKind,
    choose,
    decide,
    seconds_to_store,
    take_s,
    updated_bandwidth,
)
from swansongd.model import CheckpointId

seconds = st.floats(0, 1e5)
sizes = st.integers(0, 2**43)
bandwidths = st.none() | st.floats(1, 1e11)
measures = st.builds(
    Measured,
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
def test_take_only_what_fits(  # noqa: PLR0917 - hypothesis gives them by position
    left_s: float,
    reserve_s: float,
    measured: Measured,
    has_trainer: bool,
    sealed: list[Candidate],
    is_committing: bool,
) -> None:
    """TAKE exactly when there is a trainer and save + send + reserve fit; else the best of the rest."""
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
    assert (plan.kind is PlanKind.TAKE) == (has_trainer and fits)
    if plan.kind is not PlanKind.TAKE:
        rest = PlanKind.COMMIT if is_committing else PlanKind.NONE
        assert plan.kind is (PlanKind.FLUSH if sealed else rest)


@given(candidates, st.floats(0, 1e5), bandwidths)
def test_choose_the_newest_that_fits_else_the_nearest(
    sealed: list[Candidate], left_s: float, bandwidth: float | None
) -> None:
    """Nothing newer than the choice fits; if nothing fits at all, nothing is nearer."""
    chosen = choose(sealed, left_s=left_s, bandwidth_bytes_per_s=bandwidth)
    if not sealed:
        assert chosen is None
        return
    fitting = [c.id for c in sealed if seconds_to_store(c.bytes_left, bandwidth) <= left_s]
    if fitting:
        assert chosen == max(fitting)
    else:
        (left,) = (c.bytes_left for c in sealed if c.id == chosen)
        assert left == min(c.bytes_left for c in sealed)


@given(bandwidths, sizes, st.floats(-1, 1e5))
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


def test_small_transfers_say_nothing() -> None:
    """A few kilobytes measure round trips."""
    assert updated_bandwidth(5e6, 1000, 1.0) == 5e6
    assert updated_bandwidth(None, 1000, 1.0) is None


@given(measures)
def test_more_bandwidth_never_takes_longer(measured: Measured) -> None:
    """The formula is monotonic, and what is not measured counts as nothing."""
    assert take_s(measured) >= (measured.save_s or 0)
    assert take_s(Measured()) == 0
