# SPDX-License-Identifier: Apache-2.0
"""Limits of flush and commit: urgency, bandwidth, and the instants after which nothing is retried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.model import Severity
from swansongd.core.events import FenceFound, FinishAsked
from swansongd.core.state import Finishing
from swansongd.flush import limits

from testkit.story import Story

LIMIT = 1000.0


def a_story() -> Story:
    story = Story(reserve_s=5.0)
    settings = replace(story.state.settings, background_limit_bytes_per_s=LIMIT)
    story.state = replace(story.state, settings=settings)
    return story


def test_without_a_notice_a_flush_is_limited_and_retried_without_end() -> None:
    story = a_story()
    assert not limits.is_urgent(story.state)
    assert limits.rate_bytes_per_s(story.state) == LIMIT
    assert limits.mirror_rate_bytes_per_s(story.state, LIMIT) == LIMIT
    assert limits.data_give_up_mono_s(story.state, story.now) is None
    assert limits.commit_give_up_mono_s(story.state, story.now) is None


def test_before_a_deadline_the_reserve_belongs_to_the_commit() -> None:
    story = a_story()
    story.notice(in_s=120.0)
    assert limits.is_urgent(story.state)
    assert limits.rate_bytes_per_s(story.state) is None
    assert limits.mirror_rate_bytes_per_s(story.state, LIMIT) is None
    deadline_mono_s = story.now + 120.0
    assert limits.data_give_up_mono_s(story.state, story.now) == deadline_mono_s - 5.0
    assert limits.data_give_up_mono_s(story.state, deadline_mono_s - 1) == deadline_mono_s - 5.0
    assert limits.commit_give_up_mono_s(story.state, story.now) == deadline_mono_s


def test_a_vm_that_outlives_its_deadline_retries_again() -> None:
    """Everything that still arrives counts, and the flush keeps the whole link."""
    story = a_story()
    story.notice(in_s=10.0)
    after_s = story.now + 10.0
    assert limits.data_give_up_mono_s(story.state, after_s) is None
    assert limits.commit_give_up_mono_s(story.state, after_s) is None
    assert limits.rate_bytes_per_s(story.state) is None


def test_a_precaution_lifts_the_limit() -> None:
    story = a_story()
    story.join()
    story.notice(in_s=300.0, source="aws.rebalance", severity=Severity.ADVISORY)
    assert limits.rate_bytes_per_s(story.state) is None


@pytest.mark.parametrize(("is_done", "rate"), [(False, None), (True, LIMIT)])
def test_ranks_that_wait_for_the_flush_lift_the_limit(is_done: bool, rate: float | None) -> None:
    """While another start of the job is held until the flush is done, no training needs the link."""
    story = a_story()
    now, ranks = story.now, frozenset[int]()
    finishing = Finishing("next", ranks, asked_mono_s=now, by_mono_s=now, waits=not is_done)
    story.state = replace(story.state, starts=replace(story.state.starts, finishing=finishing))
    assert limits.rate_bytes_per_s(story.state) == rate


def test_a_start_that_has_nothing_to_wait_for_lifts_no_limit() -> None:
    story = a_story()
    story.tell(FinishAsked("first"))
    story.scan()
    assert limits.rate_bytes_per_s(story.state) == LIMIT


def test_a_fenced_vm_prunes_nothing() -> None:
    """A newer claim, also a planted one, ends the retention of this daemon."""
    story = a_story()
    story.join()
    assert limits.may_prune(story.state)
    story.tell(FenceFound(9))
    assert not limits.may_prune(story.state)
