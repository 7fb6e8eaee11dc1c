# SPDX-License-Identifier: Apache-2.0
"""The planner's forecasts, learned from the checkpoints of a run in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import SECONDS_MAX
from swansongd.core import machine, pace, planner
from swansongd.core.events import Conclude, Flushed, FlushProgress, Mark, PaceRead
from swansongd.core.planner import Measurements, PlanKind

from testkit.paced import PacedVm, Physics
from testkit.story import MIB, Story, a_set, joined, shards_of

SMALL = Physics(size_bytes=32 * MIB, files=2, save_s=0.5, link_bytes_per_s=40 * MIB)
LARGE = Physics(size_bytes=4096 * MIB, files=8, save_s=20.0, link_bytes_per_s=250 * MIB)
SLOW = Physics(size_bytes=1024 * MIB, files=4, save_s=2.0, link_bytes_per_s=50 * MIB)
ONE_FILE = Physics(size_bytes=512 * MIB, files=1, save_s=4.0, link_bytes_per_s=100 * MIB)


@pytest.mark.parametrize("physics", [SMALL, LARGE, ONE_FILE])
def test_forecasts_are_within_15_percent_in_nine_of_ten_evacuations(physics: Physics) -> None:
    """Over 8 VMs of one run: one periodic checkpoint on each, then an evacuation.  Nearly all of them end
    within the pessimistic time."""
    errors, late, figures = [], 0, None
    for generation in range(1, 9):
        vm = PacedVm(physics, 7, generation=generation, pace=figures)
        vm.periodic()
        expected_s, took_s = vm.evacuate()
        assert expected_s is not None
        figures = vm.pace
        if generation > 1:
            errors.append(abs(took_s / expected_s - 1))
            late += took_s > vm.evacuation.request.pessimistic_s  # type: ignore[operator,union-attr]
    assert sorted(errors)[int(0.9 * len(errors))] <= 0.15, errors
    assert late <= 2


@pytest.mark.parametrize("physics", [LARGE, SLOW])
def test_a_fresh_vm_plans_with_the_figures_of_the_last_one(physics: Physics) -> None:
    """Without any checkpoint of its own, its first forecast is that of the run, overlap included."""
    first = PacedVm(physics, 3)
    first.periodic()
    first.evacuate()
    second = PacedVm(physics, 3, generation=2, pace=first.pace)
    expected_s, took_s = second.evacuate()
    assert expected_s == pytest.approx(took_s, rel=0.2)
    in_sum = physics.save_s + physics.size_bytes / physics.link_bytes_per_s
    if physics is LARGE:
        assert took_s < 0.8 * in_sum, "saving and sending do not overlap"


def test_a_checkpoint_that_fits_only_with_the_overlap_is_taken() -> None:
    """An older sealed set would fit, and the sum of saving and sending would not."""
    vm = PacedVm(LARGE, 5)
    vm.periodic()
    _, took_s = vm.evacuate()
    vm.withdraw()
    in_sum = LARGE.save_s + LARGE.size_bytes / LARGE.link_bytes_per_s
    left_s = took_s + 3.0 + 2.0
    assert left_s < in_sum
    last = vm.staging[-1].id
    sealed = planner.Candidate(id=last, order=vm.state.order(last), bytes_left=0)
    for seconds, kind in ((left_s, PlanKind.TAKE), (took_s - 2.0, PlanKind.FLUSH)):
        plan = planner.decide(
            left_s=seconds,
            reserve_s=3.0,
            measured=vm.state.measured,
            has_trainer=True,
            candidates=[sealed],
            is_committing=False,
        )
        assert plan.kind is kind
        assert plan.fits


def test_the_forecast_and_the_outcome_are_reported_together() -> None:
    """In the timeline, the verdict and the request."""
    vm = PacedVm(SLOW, 9)
    vm.periodic()
    expected_s, took_s = vm.evacuate()
    notice = next(dict(m.facts) for m in vm.all(Mark) if m.phase == "notice")
    assert notice["expected_s"] == pytest.approx(expected_s, abs=0.01)
    told = vm.last(Conclude)
    assert told.expected_s == pytest.approx(expected_s, abs=0.01)
    assert told.took_s == pytest.approx(took_s, abs=0.01)


def test_early_shards_in_the_buffers_of_the_kernel_do_not_make_the_link_appear_slow() -> None:
    """A link of 10 MiB/s, and buffers of 24 MiB: most early shards are delivered after the seal.

    The sealed set sends the other 70 MiB in 9 s.  That is not the pace of the link: 100 MiB take 10 s.
    """
    story = joined(step=40, save_s=1.0, save_bytes=100 * MIB)
    story.notice()
    story.accept(41)
    growing = replace(a_set(42, "emg", request_id=story.request_id), directory="42.partial")
    file = growing.files[0]
    story.scan(growing=(replace(growing, files=(file._replace(size_bytes=30 * MIB),)),))
    early = story.flight
    story.now += 1.0
    story.tell(FlushProgress(early.flush_id, 0, 30 * MIB))
    story.answer(42)
    sealed = story.flight
    assert sealed.is_sealed
    story.now += 9.0
    story.tell(FlushProgress(sealed.flush_id, 100 * MIB, 70 * MIB))
    story.tell(Flushed(sealed.flush_id, shards_of(sealed.staged), bytes_sent=70 * MIB))
    figure = story.state.learned.pace.send_s_per_byte
    assert figure is not None
    assert figure.mean * 100 * MIB == pytest.approx(10.0)


def test_bytes_that_an_earlier_commit_has_are_not_planned() -> None:
    """A run with frozen weights: nine of ten bytes are referenced, not sent."""
    story = joined(step=1)
    for step in (1, 2):
        story.seal(step, f"n{step}")
        flight = story.flight
        story.now += 1.0
        story.tell(
            Flushed(
                flight.flush_id, shards_of(flight.staged), bytes_referenced=90 * MIB * (step - 1)
            )
        )
        story.committed()
    assert story.state.measured.send_bytes == pytest.approx(55 * MIB, rel=0.01)


hostile = st.dictionaries(
    st.sampled_from([*pace._RANGES, "wait_s", "new_share", "unknown"]),
    st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**30), 10**30),
)


@given(hostile, st.none() | st.floats(0, SECONDS_MAX), st.none() | st.integers(0, 2**60))
def test_no_figures_of_a_manifest_break_a_forecast(
    figures: dict[str, float], save_s: float | None, save_bytes: int | None
) -> None:
    """Every figure is limited to its range, and what remains gives finite times."""
    known = pace.inherited(pace.UNKNOWN, figures)
    assert known.wait_s is known.new_share is None
    made = planner.forecast(
        Measurements(save_s=save_s, save_bytes=save_bytes, bandwidth_bytes_per_s=1e6, pace=known)
    )
    assert 0 <= made.data_s <= made.expected_s <= made.pessimistic_s <= SECONDS_MAX
    assert pace.published(known).keys() <= figures.keys()


def test_the_first_own_sample_replaces_a_forged_figure() -> None:
    """A bucket writer cannot shift the mean of the measurements of this VM."""
    story = Story()
    story.tell(PaceRead({"save_s": 86400.0, "send_s_per_byte": 1e-3, "commit_s": 60.0}))
    assert story.state.measured.save_s == 86400.0
    story.join(step=1, save_s=2.0)
    story.commit(1, after_s=4.0)
    made = story.state.forecast
    assert story.state.measured.save_s == 2.0
    assert made.expected_s == pytest.approx(6.0, abs=0.5)


def test_a_figure_follows_a_change_and_measures_the_spread() -> None:
    """After five samples of a new level, the mean is near it; equal samples have no variance."""
    figure = None
    for _ in range(8):
        figure = pace.updated(figure, 10.0)
    assert figure is not None
    assert (figure.mean, figure.variance) == (10.0, 0.0)
    for _ in range(5):
        figure = pace.updated(figure, 20.0)
    assert 17.0 < figure.mean < 20.0
    assert figure.variance > 1.0


def test_a_rebuilt_state_forgets_the_pace() -> None:
    """The figures come from reports of trainers, which may have caused the fault."""
    vm = PacedVm(SMALL, 1)
    vm.periodic()
    assert vm.state.learned.pace != pace.UNKNOWN
    assert machine.rebuilt(vm.state).learned.pace == pace.UNKNOWN


def test_the_last_responses_do_not_lower_the_bandwidth() -> None:
    """Otherwise the next request would be given up: by the figures its set could not be sent in time."""
    story = joined(step=1)
    staged = story.seal(1)
    flight = story.flight
    size_bytes = staged.size_bytes
    for second in range(1, 11):
        story.wait(1.0)
        sent = size_bytes * second // 10
        story.tell(FlushProgress(flight.flush_id, sent, sent))
    before = story.state.learned.bandwidth_bytes_per_s
    assert before == pytest.approx(10 * MIB, rel=0.1)
    for _ in range(8):
        story.wait(1.0)
    story.flushed()
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(before, rel=0.01)
    assert story.state.learned.pace.send_s_per_byte is not None
    assert story.state.learned.pace.send_s_per_byte.mean * size_bytes == pytest.approx(18.0)
