# SPDX-License-Identifier: Apache-2.0
"""The timeline of an evacuation records each moment, within a bound."""

from __future__ import annotations

import pytest
from swansong_bucket.model import DeadlineQuality
from swansongd.core.events import Mark
from swansongd.observe.timeline import ENTRIES_MAX, Timeline, recorded

from testkit.story import joined


def test_an_entry_has_its_instant_and_its_facts() -> None:
    """Instants are seconds since the notice.  The entry is also what the log line contains."""
    timeline = Timeline("e1", 500.0)
    timeline.add(Mark("e1", "notice", (("source", "aws.spot"), ("seconds_left", 120.0))), 500.0)
    entry = timeline.add(Mark("e1", "flush", (("step", 7),)), 502.34567)
    assert entry == {"phase": "flush", "at_s": 2.346, "step": 7}
    assert timeline.entries == [
        {"phase": "notice", "at_s": 0.0, "source": "aws.spot", "seconds_left": 120.0},
        entry,
    ]


def test_a_timeline_is_bounded_and_has_both_ends() -> None:
    """Of 2000 entries the first ones, the last ones and the number of the others remain."""
    timeline = Timeline("e1", 0.0)
    for number in range(2000):
        timeline.add(Mark("e1", "accepted", (("rank", number),)), float(number))
    assert len(timeline.entries) == ENTRIES_MAX
    assert (timeline.entries[0]["rank"], timeline.entries[-1]["rank"]) == (0, 1999)
    assert timeline.left_out == 2000 - ENTRIES_MAX


@pytest.mark.parametrize("quality", DeadlineQuality)
def test_the_record_says_whether_the_deadline_was_assumed(quality: DeadlineQuality) -> None:
    """Only while the evacuation is open: a withdrawn notice leaves no deadline."""
    story = joined()
    story.notice(quality=quality)
    timeline = Timeline(story.evacuation.id, story.now)
    made = recorded(timeline, story.state, (), node=0, offset_s=0.0)
    assert made.is_assumed == (quality is DeadlineQuality.ASSUMED)
    story.withdraw()
    after = recorded(timeline, story.state, (), node=0, offset_s=0.0)
    assert (after.is_assumed, after.deadline_s) == (False, None)


def test_a_vm_has_ended_once_it_can_commit_nothing_more() -> None:
    """The next VM of a handover claims then: a set that is being sent would be refused."""

    def has_ended(*, is_over: bool = True) -> bool:
        timeline = Timeline(story.evacuation.id, story.now)
        return recorded(timeline, story.state, (), node=0, offset_s=0.0, is_over=is_over).is_ended

    story = joined(start_id="a")
    story.starts(0)
    story.notice()
    assert not has_ended()
    story.accept(6)
    story.answer(7)
    story.leave()
    assert not has_ended()
    story.flushed()
    assert not has_ended()
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 7"]
    assert has_ended()
    assert not has_ended(is_over=False)
    story.seal(9, "later", start_id="a")
    assert not has_ended()
    story.flushed()
    assert story.state.commits.stored
    assert not has_ended()
