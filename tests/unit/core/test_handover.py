# SPDX-License-Identifier: Apache-2.0
"""A VM that replaces another one claims nothing while that one may still commit (``run.handover``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from swansong_bucket.model import CommitRef, Severity, Verdict
from swansongd.core import resume
from swansongd.core.events import (
    ClaimGeneration,
    Conclude,
    PredecessorDenied,
    PredecessorFound,
    RestoreAsked,
)
from swansongd.core.starts import PREDECESSOR_SILENCE_S
from swansongd.core.state import Predecessor
from swansongd.observe.phase import Phase, phase_of

from testkit.story import Story, joined

pytestmark = pytest.mark.fault("OE04")


def next_vm(**options: Any) -> Story:
    """A daemon that has just started."""
    story = Story(handover=True, **options)
    starts = replace(story.state.starts, predecessor=Predecessor())
    story.state = replace(story.state, starts=starts)
    return story


def finds(story: Story, left_s: float = 0.0, **facts: Any) -> None:
    """A look at the bucket finds the VM of generation 1, for this time at most; 0: it finds none."""
    if left_s:
        facts |= {"generation": 1, "left_s": left_s, "newest": CommitRef(1, 40)}
    story.tell(PredecessorFound(story.now, **facts))


def claims(story: Story) -> int:
    return len(story.all(ClaimGeneration))


@pytest.mark.parametrize("ends", ["its end", "its deadline", "the operator"])
def test_the_claim_waits_for_the_end_of_the_other_vm(ends: str) -> None:
    """A claim would fence that VM, and the checkpoint that it was asked for would be refused."""
    story = next_vm(newest=CommitRef(1, 9))
    story.join()
    assert claims(story) == 0, "the bucket was not read yet"
    finds(story, 100.0)
    story.wait(99)
    assert claims(story) == 0
    assert phase_of(story.state) is Phase.AWAITING_HANDOVER
    assert "for at most 1 s" in resume.why_waiting(story.state, story.now)
    if ends == "its end":
        finds(story)
    elif ends == "the operator":
        story.tell(PredecessorDenied("swansong takeover"))
    else:
        story.wait(2)
    assert claims(story) == 1
    assert phase_of(story.state) is Phase.IDLE


def test_a_vm_that_was_there_before_the_notice_waits_as_well() -> None:
    """A spare has looked long ago, and found nothing to wait for: the claim needs another look."""
    story = next_vm()
    finds(story)
    story.wait(3)
    story.join()
    assert claims(story) == 0
    finds(story, 100.0)
    assert claims(story) == 0
    story.wait(50)
    finds(story)
    assert claims(story) == 1


def test_a_bucket_that_cannot_be_read_does_not_block_the_run() -> None:
    """A right to list farewells may be missing."""
    story = next_vm()
    story.join()
    story.wait(PREDECESSOR_SILENCE_S - 1)
    assert claims(story) == 0
    story.wait(2)
    assert claims(story) == 1


def test_a_vm_whose_notice_was_withdrawn_is_awaited_while_it_writes() -> None:
    """This VM stands by.  Without a record of the other one for a long time, it takes over."""
    story = next_vm()
    story.join()
    for _ in range(2):
        finds(story, 1e9, is_leaving=False)
        story.wait(PREDECESSOR_SILENCE_S - 1)
        assert phase_of(story.state) is Phase.STANDING_BY
        assert claims(story) == 0
    story.wait(2)
    assert claims(story) == 1


def test_the_status_shows_the_newest_commit_of_the_other_vm() -> None:
    """Its age is the replication lag: an alert on the lag stays silent while that VM commits."""
    story = next_vm(newest=CommitRef(1, 9))
    finds(story, 100.0)
    story.wait(3)
    finds(story, 100.0)
    shown = story.status
    assert shown.last_commit is not None
    assert (shown.last_commit.step, shown.last_commit.age_s) == (40, 3.0)
    assert shown.replication_lag.seconds == 3.0


@pytest.mark.parametrize(
    ("newest", "stands"), [(CommitRef(1, 40), "step 40 stands"), (None, "may commit")]
)
def test_a_vm_that_still_waits_has_lost_nothing(newest: CommitRef | None, stands: str) -> None:
    """Its own notice gets PARTIAL: it has read the run before the other VM committed."""
    story = next_vm()
    story.join()
    story.tell(PredecessorFound(story.now, generation=1, left_s=100.0, newest=newest))
    story.notice(25)
    story.wait(26)
    assert story.verdicts[-1].startswith("PARTIAL")
    assert stands in story.last(Conclude).reason


def test_a_job_over_several_vms_waits_for_nothing() -> None:
    """Its rendezvous decides which VMs begin a start."""
    story = next_vm()
    story.join(nodes=2)
    assert claims(story) == 1


def test_the_first_claim_ends_the_watch() -> None:
    """Later starts on this VM wait for nothing, also after a look that began before."""
    story = next_vm()
    story.join()
    finds(story)
    assert story.state.starts.predecessor is None
    finds(story, 100.0)
    story.leave()
    story.join(2, pid=200, start_id="b")
    assert claims(story) == 2


# ---------------------------------------------------------------- the VM with the notice


def farewells(story: Story) -> list[Conclude]:
    return [each for each in story.all(Conclude) if not each.is_final]


@pytest.mark.parametrize("handover", [True, False])
def test_the_farewell_of_an_open_evacuation_comes_before_its_verdict(*, handover: bool) -> None:
    """The next VM must know of the notice before it claims.  Without a handover nothing reads it."""
    story = joined()
    story.configure(handover=handover)
    story.starts(0)
    story.progress(7)
    story.notice()
    assert [each.verdict for each in farewells(story)] == [Verdict.LOST] * handover
    story.wait(1)
    story.wait(1)
    assert len(farewells(story)) == handover


def test_a_start_that_claims_during_the_notice_tells_it_afterwards() -> None:
    """A farewell belongs to a generation."""
    story = Story(handover=True)
    story.grants = False
    story.join(start_id="a")
    story.starts(0)
    story.notice()
    assert not farewells(story)
    story.grant("a")
    assert len(farewells(story)) == 1


@pytest.mark.parametrize("handover", [True, False])
def test_a_withdrawn_notice_is_told(*, handover: bool) -> None:
    """After the evacuation: its record then has no deadline."""
    story = joined()
    story.configure(handover=handover)
    story.starts(0)
    story.notice()
    before = len(farewells(story))
    story.withdraw()
    assert story.state.evacuation is None
    assert len(farewells(story)) == before + handover


def test_a_precaution_is_not_told() -> None:
    """No VM is replaced because of an advisory notice."""
    story = joined()
    story.configure(handover=True)
    story.starts(0)
    story.notice(source="aws.rebalance", severity=Severity.ADVISORY)
    assert story.evacuation.is_precaution
    story.withdraw("aws.rebalance")
    assert story.state.evacuation is None
    assert not farewells(story)


def test_a_vm_that_still_waits_does_not_promise_an_earlier_commit() -> None:
    """The other VM may commit since this one has read the run: the next VM would resume from that."""
    story = next_vm(newest=CommitRef(1, 9))
    story.join()
    finds(story, 100.0)
    story.tell(RestoreAsked("a"))
    story.notice(25)
    story.accept(-1)
    assert story.verdicts == []
    story.wait(26)
    assert story.verdicts[-1].startswith("PARTIAL")
    assert "taken the run over" in story.last(Conclude).reason
