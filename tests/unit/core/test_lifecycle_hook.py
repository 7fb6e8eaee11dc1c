# SPDX-License-Identifier: Apache-2.0
"""When the lifecycle hook of an Auto Scaling group gets heartbeats, and when it is completed."""

from __future__ import annotations

import pytest
from swansong_bucket.model import CommitRef, Verdict
from swansongd.core import lifecycle_hook
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.lifecycle_hook import ASG_SOURCE

from testkit.story import Story


def test_heartbeats_last_from_the_notice_to_the_verdict() -> None:
    story = Story()
    assert not lifecycle_hook.needs_heartbeat(story.state)
    story.wait(RECONNECT_S)
    story.notice(source=ASG_SOURCE)
    assert lifecycle_hook.needs_heartbeat(story.state)
    story.scan()
    assert story.verdicts
    assert not lifecycle_hook.needs_heartbeat(story.state)


def test_the_notice_of_another_source_concerns_no_hook() -> None:
    story = Story(newest=CommitRef(1, 5))
    story.notice(source="aws.spot")
    assert not lifecycle_hook.needs_heartbeat(story.state)
    assert not lifecycle_hook.is_complete(story.state, Verdict.SAFE)


@pytest.mark.parametrize(
    ("verdict", "newest", "is_complete"),
    [
        (Verdict.SAFE, CommitRef(1, 5), True),
        (Verdict.PARTIAL, CommitRef(1, 5), True),
        (Verdict.PARTIAL, None, False),
        (Verdict.LOST, None, False),
        (Verdict.NO_TRAINING, None, True),
    ],
)
def test_a_verdict_completes_the_hook_unless_nothing_is_committed(
    verdict: Verdict, newest: CommitRef | None, is_complete: bool
) -> None:
    """Without a commit the remaining time may still bring one, if there is training."""
    story = Story(newest=newest)
    story.notice(source=ASG_SOURCE)
    assert lifecycle_hook.is_complete(story.state, verdict) is is_complete
