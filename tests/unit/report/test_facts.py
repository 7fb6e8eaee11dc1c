# SPDX-License-Identifier: Apache-2.0
"""Which evacuation comes with the interruption that ended its VM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import history
from swansong_bucket.runs.history import RunHistory
from swansong_bucket.runs.run import Run
from swansong_tools.economics import loss as losses
from swansong_tools.report.facts import Story, sentences, stories

from testkit import past_run
from testkit.memory_store import MemoryStore


@pytest.fixture(scope="module")
def past() -> RunHistory:
    """The second evacuation ends with the VM, 29 s after its notice of 30 s."""
    store = MemoryStore()
    past_run.write(store)
    return history.read(Run.listed(store, RunKeys(past_run.RUN)))


def told(past: RunHistory, *evacuations: RecordedEvacuation) -> list[Story]:
    return stories(evacuations, past.lives, losses.loss(past.lives.lives))


def earlier(recorded: RecordedEvacuation, by_s: float) -> RecordedEvacuation:
    return replace(
        recorded,
        evacuation_id=f"{by_s:.0f}",
        opened_wall_s=recorded.opened_wall_s - by_s,
        written_wall_s=recorded.written_wall_s - by_s,
    )


@pytest.mark.parametrize("deadline_s", [30.0, None])
def test_a_drill_is_not_to_blame_for_a_later_power_cut(
    past: RunHistory, deadline_s: float | None
) -> None:
    """The VM lived an hour longer, and then ended without a notice."""
    drill = replace(earlier(past.evacuations.evacuations[1], 3600.0), deadline_s=deadline_s)
    (story,) = told(past, drill)
    assert (story.was_outlived, story.interruption, story.resumption) == (True, None, None)
    assert list(sentences(story))[-1] == "The VM outlived this deadline, and training continued."


@pytest.mark.parametrize("deadline_s", [30.0, None])
def test_a_vm_may_end_somewhat_after_its_deadline(
    past: RunHistory, deadline_s: float | None
) -> None:
    """The interruption belongs to the evacuation, also if the farewell records no deadline."""
    recorded = replace(earlier(past.evacuations.evacuations[1], 100.0), deadline_s=deadline_s)
    (story,) = told(past, recorded)
    assert story.interruption is not None
    assert (story.was_outlived, story.interruption.generation) == (False, 3)


def test_a_drill_does_not_hide_the_end_that_was_announced_before_it(past: RunHistory) -> None:
    """The VM ended at the later deadline of the earlier evacuation."""
    recorded = past.evacuations.evacuations[1]
    announced = replace(earlier(recorded, 3600.0), deadline_s=3630.0)
    first, drill = told(past, announced, earlier(recorded, 600.0))
    assert (first.was_outlived, drill.was_outlived) == (False, True)
    assert first.interruption is not None
    assert drill.interruption is None


def test_without_an_interruption_the_last_evacuation_stands(past: RunHistory) -> None:
    """No later VM has resumed the run, and an earlier evacuation was outlived."""
    recorded = past.evacuations.evacuations[1]
    first, last = stories((earlier(recorded, 600.0), recorded), past.lives, None)
    assert (first.was_outlived, last.was_outlived) == (True, False)
    assert last.interruption is None
