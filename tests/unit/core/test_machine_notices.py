# SPDX-License-Identifier: Apache-2.0
"""Stories of notices that repeat, flip, move later, lie in the past, or are given by hand."""

from __future__ import annotations

import pytest
from swansong.protocol import Request
from swansong_bucket.model import Severity
from swansongd.core import machine, notices
from swansongd.core.events import (
    Log,
    Mark,
    NoticeRaised,
    TrainerSealed,
)
from swansongd.observe.phase import Phase, phase_of

from testkit.story import Story, a_notice, joined


def lines(story: Story, event: str) -> int:
    return [line.event for line in story.all(Log)].count(event)


def opened(story: Story) -> int:
    """Number of evacuations."""
    return [mark.phase for mark in story.all(Mark)].count("notice")


# ---------------------------------------------------------------------------- ids and answers


def test_a_notice_that_is_evacuated_again_has_another_id_after_a_restart() -> None:
    """Its first evacuation has ended, and hooks must not repeat the answer to that."""
    story = joined(step=4)
    story.notice(in_s=30)
    story.notice(in_s=100)
    story.wait(40.1)
    assert story.state.evacuation is None
    restarted = joined(step=30)
    restarted.now = story.now
    for kept in story.state.notices.live.values():
        restarted.tell(NoticeRaised(kept))
    assert restarted.request_id != story.request_id


@pytest.mark.fault("N09")
def test_an_open_evacuation_is_resumed_under_the_same_id() -> None:
    """A restarted daemon with the notice repeats the request, and the hooks repeat their answer."""
    story = joined(step=4)
    story.notice()
    restarted = joined(step=30)
    for kept in story.state.notices.live.values():
        restarted.tell(NoticeRaised(kept))
    assert restarted.request_id == story.request_id
    restarted.answer(5)
    restarted.store_all()
    assert restarted.verdicts == ["SAFE generation 2 step 5"]


def test_a_restart_that_forgets_the_notice_asks_under_a_new_id() -> None:
    """The same text may be a new notice, which the answer to an old request must not answer."""
    ids = set()
    for moment_s in (0.0, 7.0):
        story = Story()
        story.now += moment_s
        story.join()
        story.notice(identity="gcp.preempted:boot")
        ids.add(story.request_id)
    assert len(ids) == 2


def test_no_request_id_returns_however_often_a_notice_flips() -> None:
    """A notice that is withdrawn and raised 200 times: every evacuation has another id."""
    story = joined(step=3)
    for _ in range(200):
        story.notice(source="gcp.preempted", in_s=25)
        story.withdraw("gcp.preempted")
        story.wait(notices.EVERY_S)
    ids = [order.id for order in story.all(Request)]
    assert len(ids) == 200
    assert len(set(ids)) == 200


def test_the_answer_to_an_earlier_request_does_not_count() -> None:
    """A rank that repeats an old answer under the new id causes no SAFE."""
    story = joined(step=4)
    story.commit(10)
    story.progress(2410)
    story.notice(source="gcp.preempted")
    story.tell(TrainerSealed(1, story.request_id, 10, 1.0, 1))
    assert story.conclude() == ["PARTIAL generation 2 step 10"]
    request = next(mark for mark in story.all(Mark) if mark.phase == "request_failed")
    assert "step 2410" in str(request.facts)


def test_a_set_of_the_current_step_answers() -> None:
    """It was sealed just before the request, for another one or none, and no step was trained since."""
    story = joined(step=10)
    sealed = story.seal(10)
    story.notice()
    story.tell(TrainerSealed(1, story.request_id, 10, 1.0, 1))
    story.scan()
    assert story.evacuation.request is not None
    assert story.evacuation.request.answer == sealed.id
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 10"]


# ---------------------------------------------------------------------------- too late, too near


def test_a_time_in_the_past_still_causes_a_request() -> None:
    """The VM runs: the notice gets the assumed time, once, however often the source repeats it."""
    story = joined(step=3)
    raised = story.notice(in_s=-1)
    story.serve(3)
    assert story.verdicts == ["SAFE generation 2 step 4"]
    for _ in range(100):
        story.tell(NoticeRaised(raised))
        story.wait(1)
    assert phase_of(story.state) is Phase.IDLE
    assert len(story.all(Request)) == 1


def test_a_time_in_the_past_changes_no_verdict() -> None:
    """After SAFE an overdue event causes no request, moves no deadline and worsens no verdict."""
    story = joined(step=3)
    story.notice(in_s=100)
    story.serve(3)
    deadline_mono_s = story.evacuation.deadline_mono_s
    story.progress(50)
    story.notice(in_s=-3600, source="aws.scheduled", severity=Severity.SCHEDULED)
    story.wait(1)
    assert story.verdicts == ["SAFE generation 2 step 4"]
    assert story.evacuation.deadline_mono_s == deadline_mono_s
    story.wait(100 + notices.OUTLIVED_S)
    assert phase_of(story.state) is Phase.IDLE


# ---------------------------------------------------------------------------- times that move


def test_a_time_that_recedes_costs_one_evacuation_each_time_it_is_outlived() -> None:
    """A source that names another time at each poll is one notice, and no later time is forgotten."""
    story = joined(step=3)
    for _ in range(600):
        story.notice(in_s=120)
        story.wait(1)
    assert 3 <= opened(story) <= 600 / 120
    assert lines(story, "notice") == 1


def test_a_notice_after_a_deadline_that_has_passed_gets_its_own_time() -> None:
    """The VM was not taken at the first deadline: that one does not end the next evacuation at once."""
    story = joined(step=3)
    story.notice(source="aws.spot", in_s=30)
    story.serve(3)
    story.wait(32)
    verdicts = len(story.verdicts)
    story.notice(source="gcp.preempted", in_s=60)
    assert story.evacuation.deadline_mono_s == story.now + 60
    assert story.verdicts[verdicts:] == []


def test_near_notices_are_limited_by_the_rate() -> None:
    """However near each new notice is: a few evacuations in a row, then a few each minute."""
    story = joined(step=3)
    for number in range(60):
        story.notice(in_s=3, identity=f"another each time: {number}")
        evacuation = story.state.evacuation
        if evacuation is not None and evacuation.verdict is None:
            story.serve(3 + number, f"n{number}")
        story.wait(1)
    assert 3 <= opened(story) <= notices.AT_ONCE + 60 / notices.EVERY_S
    assert lines(story, "evacuation_held") <= lines(story, "notice")


def test_a_held_notice_is_evacuated_when_the_rate_permits() -> None:
    """The rate delays an evacuation, and never drops it."""
    story = joined(step=3)
    for _ in range(notices.AT_ONCE):
        story.notice(source="gcp.preempted", in_s=25)
        story.withdraw("gcp.preempted")
    story.notice(source="gcp.preempted", in_s=25)
    assert story.state.evacuation is None
    story.wait(notices.EVERY_S + 0.1)
    assert story.state.evacuation is not None


def test_an_evacuation_that_was_open_before_a_fault_is_not_held() -> None:
    """The state is rebuilt after four evacuations: the open one is resumed immediately."""
    story = joined(step=3)
    for _ in range(notices.AT_ONCE):
        story.notice(source="gcp.preempted", in_s=25)
        story.withdraw("gcp.preempted")
    story.wait(notices.EVERY_S)
    story.notice(source="gcp.preempted", in_s=25)
    request_id = story.request_id
    story.state = machine.rebuilt(story.state)
    story.wait(0.1)
    assert story.state.evacuation is not None
    assert story.request_id == request_id


def test_a_shutdown_of_this_host_is_never_held() -> None:
    """The host itself reports it, once."""
    story = joined(step=3)
    for _ in range(10):
        story.notice(source="logind", in_s=24, severity=Severity.SHUTTING_DOWN)
        assert story.state.evacuation is not None
        story.withdraw("logind")


def test_an_event_that_is_put_off_before_its_evacuation_moves() -> None:
    """Its later time counts, and so does an earlier one after that."""
    story = joined(step=3)
    for in_s in (3600, 7200, 1800):
        story.notice(in_s=in_s, source="aws.scheduled", severity=Severity.SCHEDULED)
        (notice,) = story.state.notices.live.values()
        assert notice.deadline_mono_s == story.now + in_s
    assert lines(story, "notice") == 1


@pytest.mark.parametrize("in_s", [30, -1])
def test_an_event_that_is_put_off_after_it_was_outlived_counts_again(in_s: float) -> None:
    """It was concluded for its first time only, or for the assumed one if that was in the past."""
    story = joined(step=3)
    story.notice(in_s=in_s, source="aws.scheduled", severity=Severity.SCHEDULED)
    story.wait(30 + notices.OUTLIVED_S + 1)
    assert phase_of(story.state) is Phase.IDLE
    story.notice(in_s=3600, source="aws.scheduled", severity=Severity.SCHEDULED)
    story.withdraw("no.such.source")
    story.wait(3500)
    evacuation = story.evacuation
    assert not evacuation.is_precaution


def test_maintenance_that_returns_costs_a_checkpoint_or_a_line() -> None:
    """The second notice is a new one, although the key has the same value."""
    story = joined(step=3)

    def announce() -> None:
        story.notice(in_s=3600, source="gcp.maintenance", severity=Severity.SCHEDULED)
        story.wait(1)
        story.withdraw("gcp.maintenance")
        story.wait(300)

    announce()
    announce()
    assert lines(story, "precaution_skipped") == 1
    announce()
    assert len(story.all(Request)) == 2


# ---------------------------------------------------------------------------- by hand


def test_notices_by_hand_with_the_same_end_are_one() -> None:
    """Ten simultaneous calls: one evacuation, whose verdict answers each of them."""
    story = joined(step=3)
    for number in range(10):
        story.now += 0.03
        raised = a_notice("manual", deadline_mono_s=story.now + 60, identity=f"manual:{number}")
        story.tell(NoticeRaised(raised))
        if number == 4:
            story.serve(3)
    assert len(story.all(Request)) == 1
    assert story.verdicts == ["SAFE generation 2 step 4"]
    last = story.state.course.last_verdict
    assert last is not None
    assert last.notices == {f"manual:{number}" for number in range(10)}


def test_a_later_call_by_hand_is_a_new_request() -> None:
    """Its deadline is another one: it gets another checkpoint and verdict, however soon it arrives."""
    story = joined(step=3)
    for number in range(60):
        raised = story.notice(source="manual", in_s=60, identity=f"manual:{number}")
        story.serve(3 + number, f"n{number}")
        last = story.state.course.last_verdict
        assert last is not None
        assert raised.identity in last.notices
        assert last.commit is not None
        assert last.commit.step == 4 + number
        story.progress(4 + number)
        story.wait(0.5)
    assert len(story.state.notices.live) <= notices.BY_HAND_MAX


def test_of_notices_by_hand_the_earliest_end_counts_and_none_is_forgotten() -> None:
    """A call with a later deadline withdraws nothing, and gets its evacuation when its time is near."""
    story = joined(step=3)
    story.notice(source="manual", in_s=30, identity="manual:near")
    story.notice(source="manual", in_s=100, identity="manual:far")
    assert story.evacuation.deadline_mono_s < story.now + 31
    story.wait(30 + notices.OUTLIVED_S + 1)
    story.wait(1)
    assert story.evacuation.deadline_mono_s > story.now + 50
    assert list(story.state.notices.live) == ["manual:far"]
    story.withdraw("manual")
    assert not story.state.notices.live


def test_notices_by_hand_are_limited_in_number() -> None:
    """The ones in force stay; a notice that is ignored is logged."""
    story = Story()
    for number in range(100):
        story.notice(source="manual", in_s=60 + 10 * number, identity=f"manual:{number}")
    assert len(story.state.notices.live) == notices.BY_HAND_MAX
    assert "manual:0" in story.state.notices.live
    assert lines(story, "notice_ignored") == 100 - notices.BY_HAND_MAX


def test_periodic_checkpoints_continue_during_a_long_notice() -> None:
    """After the verdict of an evacuation with a far deadline, each interval has its checkpoint."""
    story = joined(step=9, takes_periodic=True)
    story.notice(source="aws.asg", in_s=3600)
    story.serve(9)
    assert story.verdicts == ["SAFE generation 2 step 10"]
    for _ in range(1800):
        story.wait(1)
        if story.state.requests.periodic is not None:
            break
    assert story.request_id.startswith("periodic-")
    story.commit(500)
    assert story.verdicts[-1] == "SAFE generation 2 step 500"
