# SPDX-License-Identifier: Apache-2.0
"""The samples of an evacuation are bounded, ascend, and count the bytes since its opening."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from swansongd.core.events import Tick
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import Evacuation, Settings, State
from swansongd.observe.observer import Observation
from swansongd.observe.samples import INTERVAL_S, SAMPLES_MAX, FlushSamples

OPENED_S = 1000.0
QUIET = State(settings=Settings(reserve_s=5.0, signals_trainer=False))


def sent(state: State, sent_bytes: int) -> State:
    """The state after flushes have sent this number of bytes since the daemon's start."""
    return replace(state, flush=replace(state.flush, sent_bytes=sent_bytes))


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


def test_another_evacuation_begins_again() -> None:
    """The samples of the earlier evacuation are dropped."""
    samples = FlushSamples()
    first = sent(opened(QUIET), 50)
    samples.observe(Observation(opened(QUIET), first, Tick(), (), OPENED_S + 1))
    second = opened(first, "e2", OPENED_S + 10)
    samples.observe(Observation(first, second, Tick(), (), OPENED_S + 10))
    assert samples.taken("e1", OPENED_S + 11) == ()
    further = sent(second, 60)
    samples.observe(Observation(second, further, Tick(), (), OPENED_S + 11))
    assert samples.taken("e2", OPENED_S + 11) == ((0.0, 0), (1.0, 10))


@pytest.mark.parametrize("seconds", [1, 59, 60, 61, 1000, 7200])
def test_samples_are_bounded(seconds: int) -> None:
    """Their number is limited for any duration, and their times are spread evenly over it."""
    samples = FlushSamples()
    state, at_s, step_s = opened(QUIET), 0.0, 0.05 if seconds < 100 else 0.5
    while at_s < seconds:
        at_s += step_s
        further = sent(state, int(1000 * at_s))
        samples.observe(Observation(state, further, Tick(), (), OPENED_S + at_s))
        state = further
    taken = samples.taken("e1", OPENED_S + at_s)
    times = [sample[0] for sample in taken]
    assert taken[0] == (0.0, 0)
    assert taken[-1] == (pytest.approx(at_s, abs=0.001), int(1000 * at_s))
    assert min(SAMPLES_MAX / 3, seconds / INTERVAL_S / 2) < len(taken) <= SAMPLES_MAX
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps[:-1]) >= INTERVAL_S - 1e-6
    assert max(gaps) <= 2.5 * max(INTERVAL_S, seconds / SAMPLES_MAX) + 0.5
