# SPDX-License-Identifier: Apache-2.0
"""Stories of periodic checkpoints: the daemon requests one that is due, and yields to evacuations."""

from __future__ import annotations

import pytest
from swansong.protocol import (
    SIGTERM_LIMIT_S,
    NotRequested,
    Request,
    Target,
    Withdrawn,
)
from swansong_bucket.model import CommitRef, GpuHealth, Parent
from swansongd.core import cadence, periodic
from swansongd.core.events import (
    HistoryRead,
    Log,
    RequestAsked,
    Send,
    TrainerAccepted,
    TrainerFailed,
    TrainerProgress,
    TrainerSealed,
)

from testkit.story import Story

INTERVAL_S = 30.0


def join(
    story: Story,
    rank: int = 0,
    ranks: int = 1,
    *,
    step: int = 7,
    nodes: int = 1,
    takes_periodic: bool = True,
) -> None:
    story.join(
        1 + rank, rank=rank, ranks=ranks, step=step, nodes=nodes, takes_periodic=takes_periodic
    )


def asks(story: Story) -> list[Request]:
    return [ask for ask in story.all(Request) if ask.id.startswith(("periodic-", "sigterm-"))]


def accept(story: Story, step: int, rank: int = 0) -> None:
    story.tell(TrainerAccepted(1 + rank, asks(story)[-1].id, step))


def test_a_checkpoint_that_is_due_is_requested_without_urgency() -> None:
    """Not before the interval is over; then once, with a target, and its set is committed."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story)
    story.wait(INTERVAL_S - 1)
    assert not asks(story)
    story.wait(2)
    story.wait(1)
    (ask,) = asks(story)
    assert ask.urgency == "drain"
    accept(story, 20)
    assert story.last(Send) == Send(Target(ask.id, 21), (1,))
    story.commit(21, request_id=ask.id)
    assert story.state.commits.last == CommitRef(2, 21)
    assert story.state.evacuation is None
    assert not story.all(Withdrawn)
    story.wait(INTERVAL_S - 1)
    assert len(asks(story)) == 1
    story.wait(2)
    assert len(asks(story)) == 2
    assert asks(story)[1].id != ask.id


def test_all_ranks_agree_on_the_step() -> None:
    """No request before all ranks are connected; the target is one beyond the furthest of them."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story, 0, 2)
    story.wait(2 * INTERVAL_S)
    assert not asks(story)
    join(story, 1, 2)
    story.wait(1)
    accept(story, 20, 0)
    accept(story, 22, 1)
    assert story.sent(Target) == [Send(Target(asks(story)[0].id, 23), (1, 2))]


def test_a_trainer_with_another_schedule_gets_no_request() -> None:
    """Neither does one without a step so far, nor the part of a job whose rank 0 is elsewhere."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story, takes_periodic=False)
    story.wait(10 * INTERVAL_S)
    join(story, step=0)
    story.wait(10 * INTERVAL_S)
    assert not asks(story)
    story.progress(1)
    assert len(asks(story)) == 1


def test_a_checkpoint_for_another_reason_counts() -> None:
    """The interval begins again with any sealed set; a request in progress is withdrawn."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story)
    story.wait(INTERVAL_S - 5)
    story.commit(15)
    story.wait(INTERVAL_S - 1)
    assert not asks(story)
    story.wait(2)
    story.now += 0.5
    story.seal(30, "other")
    (withdrawn,) = story.all(Withdrawn)
    assert withdrawn.request_id == asks(story)[0].id


def test_a_notice_comes_first() -> None:
    """A periodic request is withdrawn, and no other one is made while the notice is in force."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story)
    story.wait(INTERVAL_S + 1)
    story.notice(in_s=1000)
    assert story.last(Withdrawn).request_id == asks(story)[0].id
    assert story.last(Request).urgency == "emergency"
    story.wait(500)
    assert len(asks(story)) == len(story.all(Withdrawn)) == 1


def test_unsent_sets_do_not_pile_up() -> None:
    """While two sets wait for the store, no third one is requested."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story)
    story.seal(10)
    story.seal(20)
    story.wait(10 * INTERVAL_S)
    assert not asks(story)
    story.store_all()
    story.wait(1)
    assert len(asks(story)) == 1


@pytest.mark.fault("OE11")
def test_sigterm_of_a_rank_requests_a_checkpoint() -> None:
    """At once, of all ranks, also of those with their own schedule; its set is committed.

    The ranks have not reported their first steps yet.
    """
    story = Story()
    for rank in range(2):
        join(story, rank, 2, step=0, takes_periodic=False)
    story.tell(RequestAsked(2, 7))
    (sent,) = story.sent(Request)
    assert (sent.message.urgency, sent.connections) == ("emergency", (1, 2))
    assert sent.message.seconds_left == SIGTERM_LIMIT_S
    accept(story, 7, 0)
    accept(story, 8, 1)
    assert story.last(Send) == Send(Target(sent.message.id, 9), (1, 2))
    story.leave(2, is_goodbye=True)
    story.commit(9, request_id=sent.message.id)
    assert story.state.commits.last == CommitRef(2, 9)
    assert not story.all(NotRequested)
    assert not story.all(Withdrawn)


@pytest.mark.parametrize("reason", ["no step", "a lost rank", "a failed GPU"])
def test_after_sigterm_without_a_state_to_save_a_rank_ends_at_once(reason: str) -> None:
    """The daemon answers that no checkpoint will come, in the same step of its loop."""
    story = Story()
    loaded = Parent("earlier", 7 if reason == "no step" else 5)
    story.join(ranks=2 if reason == "a lost rank" else 1, step=7, parent=loaded)
    if reason == "a failed GPU":
        story.read_gpus(GpuHealth.DYING)
    story.tell(RequestAsked(1, 7))
    assert story.sent(NotRequested) == [Send(NotRequested(), (1,))]
    assert not asks(story)


def test_the_end_of_a_process_frees_the_ranks_that_would_wait_for_it() -> None:
    """The request fails, and the next query of a rank that got SIGTERM brings no other one."""
    story = Story()
    join(story, 0, 2)
    join(story, 1, 2)
    story.tell(RequestAsked(1, 7))
    story.leave(2)
    assert story.last(Withdrawn).request_id == asks(story)[0].id
    story.tell(RequestAsked(1, 7))
    assert story.sent(NotRequested) == [Send(NotRequested(), (1,))]


@pytest.mark.fault("T04")
def test_after_a_failure_or_without_an_answer_the_next_interval_requests_again() -> None:
    """A failed save and a request without an answer are logged."""
    story = Story(checkpoint_interval_s=INTERVAL_S)
    join(story)
    story.wait(INTERVAL_S + 1)
    story.tell(TrainerFailed(1, asks(story)[0].id, "disk full"))
    assert story.last(Log).event == "periodic_checkpoint_missed"
    story.wait(INTERVAL_S + 1)
    assert len(asks(story)) == 2
    story.wait(periodic.PATIENCE_S + 1)
    assert story.all(Withdrawn)[-1].request_id == asks(story)[1].id
    story.wait(INTERVAL_S)
    assert len(asks(story)) == 3


def test_the_interval_follows_the_measured_cost() -> None:
    """The time of the snapshot counts, or that of the whole save where it is unknown; so do interruptions."""
    story = Story()
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
