# SPDX-License-Identifier: Apache-2.0
"""Stories of periodic checkpoints: the daemon asks when one is due, and steps back when the end is near."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from swansong.protocol import VERSION, Hello
from swansongd.core import cadence, periodic
from swansongd.core.events import (
    AskTrainers,
    HistoryRead,
    Log,
    SendTarget,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerProgress,
    TrainerSealed,
    WithdrawRequest,
)
from swansongd.model import CommitRef
from swansongd.trainers.translate import view_of

from testkit.story import Story

INTERVAL_S = 30.0


def a_story(interval_s: float | None = INTERVAL_S, **options: Any) -> Story:
    story = Story(**options)
    settings = replace(story.state.settings, checkpoint_interval_s=interval_s)
    story.state = replace(story.state, settings=settings)
    return story


def join(
    story: Story, rank: int = 0, ranks: int = 1, *, step: int = 7, periodic: bool = True
) -> None:
    hello = Hello(
        run="r",
        rank=rank,
        world_size=ranks,
        local_world_size=ranks,
        step=step,
        capabilities=["periodic"] if periodic else [],
        version=VERSION,
    )
    story.tell(TrainerJoined(view_of(1 + rank, 100 + rank, hello, greeted_mono_s=0.0)))


def asks(story: Story) -> list[AskTrainers]:
    return [ask for ask in story.all(AskTrainers) if ask.request_id.startswith("periodic-")]


def accept(story: Story, step: int, rank: int = 0) -> None:
    story.tell(TrainerAccepted(1 + rank, asks(story)[-1].request_id, step))


def test_when_it_is_due_the_trainer_is_asked_without_urgency() -> None:
    """Not before the interval is over; then once, with a target, and what is sealed is committed."""
    story = a_story()
    join(story)
    story.wait(INTERVAL_S - 1)
    assert not asks(story)
    story.wait(2)
    story.wait(1)
    (ask,) = asks(story)
    assert not ask.is_urgent
    accept(story, 20)
    assert story.last(SendTarget) == SendTarget(ask.request_id, 21, (1,))
    story.seal(21, request_id=ask.request_id)
    story.store_all()
    assert story.state.last_commit == CommitRef(2, 21)
    assert story.state.evacuation is None
    assert not story.all(WithdrawRequest)
    story.wait(INTERVAL_S - 1)
    assert len(asks(story)) == 1
    story.wait(2)
    assert len(asks(story)) == 2
    assert asks(story)[1].request_id != ask.request_id


def test_all_ranks_agree_on_the_step() -> None:
    """Nobody is asked before all are here; the target is one beyond the furthest, and told to all."""
    story = a_story()
    join(story, 0, 2)
    story.wait(2 * INTERVAL_S)
    assert not asks(story)
    join(story, 1, 2)
    story.wait(1)
    accept(story, 20, 0)
    assert not story.all(SendTarget)
    accept(story, 22, 1)
    assert (story.last(SendTarget).step, story.last(SendTarget).connections) == (23, (1, 2))
    join(story, 1, 2)
    assert asks(story)[-1].connections == (2,), "who reconnects is asked again"
    accept(story, 22, 1)
    assert story.last(SendTarget) == SendTarget(asks(story)[0].request_id, 23, (2,))


def test_a_trainer_with_a_schedule_of_its_own_is_left_alone() -> None:
    """Neither is one that has not made a step yet, nor the part of a job whose rank 0 is elsewhere."""
    story = a_story()
    join(story, periodic=False)
    story.wait(10 * INTERVAL_S)
    join(story, step=0)
    story.wait(10 * INTERVAL_S)
    assert not asks(story)
    story.progress(1)
    assert len(asks(story)) == 1


def test_a_checkpoint_for_another_reason_counts() -> None:
    """The interval begins anew with whatever is sealed; a request that is out then is taken back."""
    story = a_story()
    join(story)
    story.wait(INTERVAL_S - 5)
    story.seal(15)
    story.store_all()
    story.wait(INTERVAL_S - 1)
    assert not asks(story)
    story.wait(2)
    story.now += 0.5
    story.seal(30, "other")
    (withdrawn,) = story.all(WithdrawRequest)
    assert withdrawn.request_id == asks(story)[0].request_id


def test_a_notice_comes_first() -> None:
    """What was asked for periodically is withdrawn, and nothing periodic is asked while it stands."""
    story = a_story()
    join(story)
    story.wait(INTERVAL_S + 1)
    story.notice(in_s=1000)
    assert story.last(WithdrawRequest).request_id == asks(story)[0].request_id
    assert story.last(AskTrainers).is_urgent
    story.wait(500)
    assert len(asks(story)) == 1


def test_sets_that_the_store_does_not_take_do_not_pile_up() -> None:
    """With two sets that wait for the store, no third is asked for."""
    story = a_story()
    join(story)
    story.seal(10)
    story.seal(20)
    story.wait(10 * INTERVAL_S)
    assert not asks(story)
    story.store_all()
    story.wait(1)
    assert len(asks(story)) == 1


@pytest.mark.fault("T04")
def test_whoever_fails_or_is_silent_gets_another_chance() -> None:
    """A failed save, and one that nobody answers, are logged; the next interval asks again."""
    story = a_story()
    join(story)
    story.wait(INTERVAL_S + 1)
    story.tell(TrainerFailed(1, asks(story)[0].request_id, "disk full"))
    assert story.last(Log).event == "periodic_checkpoint_missed"
    story.wait(INTERVAL_S + 1)
    assert len(asks(story)) == 2
    story.wait(periodic.PATIENCE_S + 1)
    assert story.all(WithdrawRequest)[-1].request_id == asks(story)[1].request_id
    story.wait(INTERVAL_S)
    assert len(asks(story)) == 3


def test_the_interval_is_that_of_the_measured_cost() -> None:
    """For how long a save holds up the loop decides, all of it where that is not known; and the past."""
    story = a_story(None)
    join(story)
    assert periodic.interval_s(story.state) == cadence.INTERVAL_MIN_S
    story.tell(TrainerProgress(1, 9, save_s=3.0))
    mtbf_s = story.state.settings.mtbf_s
    assert periodic.interval_s(story.state) == cadence.optimum_interval_s(3.0, mtbf_s)
    story.tell(TrainerProgress(1, 10, save_s=3.0, snapshot_s=0.7))
    story.tell(TrainerSealed(1, "", 10, 3.0, 1))
    assert periodic.interval_s(story.state) == cadence.optimum_interval_s(0.7, mtbf_s)
    story.tell(HistoryRead(mtbf_s, 19))
    assert periodic.interval_s(story.state) == cadence.INTERVAL_MIN_S
