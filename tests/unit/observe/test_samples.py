# SPDX-License-Identifier: Apache-2.0
"""The samples of an evacuation are bounded, ascend, and count each byte that was sent once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from swansongd.core.events import Flushed, FlushProgress, Tick
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import Evacuation, Flight, Settings, State
from swansongd.observe.observer import Observation
from swansongd.observe.samples import INTERVAL_S, SAMPLES_MAX, FlushSamples

from testkit.story import a_set

OPENED_S = 1000.0
QUIET = State(settings=Settings(reserve_s=5.0, signals_trainer=False))


def flying(state: State, flush_id: str, bytes_sent: int) -> State:
    """The state with a flush in flight."""
    flight = Flight(
        flush_id=flush_id,
        staged=a_set(7),
        started_mono_s=OPENED_S,
        first_started_mono_s=OPENED_S,
        sampled_mono_s=OPENED_S,
        bytes_sent=bytes_sent,
    )
    return replace(state, flush=replace(state.flush, flight=flight))


def opened(state: State, evacuation_id: str = "e1", at_s: float = OPENED_S) -> State:
    """The state with an evacuation."""
    evacuation = Evacuation(
        id=evacuation_id,
        reason="aws.spot: reclaim",
        opened_mono_s=at_s,
        deadline_mono_s=at_s + 120,
        plan=Plan(PlanKind.TAKE, "why"),
    )
    return replace(state, evacuation=evacuation)


def sent(flush_id: str, bytes_sent: int) -> FlushProgress:
    return FlushProgress(flush_id, bytes_sent, bytes_sent)


def test_bytes_count_from_the_opening_over_all_flushes() -> None:
    """A flush from before the notice counts only with its later bytes; the next flush adds to them."""
    samples = FlushSamples()
    before = flying(QUIET, "f1", 100)
    after = opened(before)
    samples.observe(Observation(before, after, Tick(), (), OPENED_S))
    assert samples.taken("e1", OPENED_S) == ()
    further = flying(after, "f1", 150)
    samples.observe(Observation(after, further, sent("f1", 150), (), OPENED_S + 1))
    done = replace(further, flush=replace(further.flush, flight=None))
    samples.observe(Observation(further, done, Flushed("f1", (), bytes_sent=170), (), OPENED_S + 2))
    second = flying(done, "f2", 30)
    samples.observe(Observation(done, second, sent("f2", 30), (), OPENED_S + 3))
    assert samples.taken("e1", OPENED_S + 4) == (
        (0.0, 0), (1.0, 50), (2.0, 70), (3.0, 100), (4.0, 100),
    )  # fmt: skip


def test_another_evacuation_begins_again() -> None:
    """The samples of the earlier evacuation are dropped."""
    samples = FlushSamples()
    first = flying(opened(QUIET), "f1", 50)
    samples.observe(Observation(opened(QUIET), first, sent("f1", 50), (), OPENED_S + 1))
    second = opened(first, "e2", OPENED_S + 10)
    samples.observe(Observation(first, second, Tick(), (), OPENED_S + 10))
    assert samples.taken("e1", OPENED_S + 11) == ()
    further = flying(second, "f1", 60)
    samples.observe(Observation(second, further, sent("f1", 60), (), OPENED_S + 11))
    assert samples.taken("e2", OPENED_S + 11) == ((0.0, 0), (1.0, 10))


@pytest.mark.parametrize("seconds", [1, 59, 60, 61, 1000, 7200])
def test_samples_are_bounded(seconds: int) -> None:
    """Their number is limited for any duration, and their times are spread evenly over it."""
    samples = FlushSamples()
    state, at_s, step_s = opened(QUIET), 0.0, 0.05 if seconds < 100 else 0.5
    while at_s < seconds:
        at_s += step_s
        further = flying(state, "f1", int(1000 * at_s))
        samples.observe(
            Observation(state, further, sent("f1", int(1000 * at_s)), (), OPENED_S + at_s)
        )
        state = further
    taken = samples.taken("e1", OPENED_S + at_s)
    times = [sample[0] for sample in taken]
    assert taken[0] == (0.0, 0)
    assert taken[-1] == (pytest.approx(at_s, abs=0.001), int(1000 * at_s))
    assert min(SAMPLES_MAX / 3, seconds / INTERVAL_S / 2) < len(taken) <= SAMPLES_MAX
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps[:-1]) >= INTERVAL_S - 1e-6
    assert max(gaps) <= 2.5 * max(INTERVAL_S, seconds / SAMPLES_MAX) + 0.5
