# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a trainer resumes from, and which queries get the same answer again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong.protocol import RestoreQuery
from swansong_bucket.model import CommitRef
from swansongd.core import resume
from swansongd.core.events import StartBegun

from testkit.story import Story, a_set, joined

GOOD = {"loss_is_finite": 1.0}


def test_the_newer_of_set_and_commit_wins_and_a_tie_stays_on_this_vm() -> None:
    """Both are ordered by generation and step; a set has the generation of its start."""
    story = Story(generation=2)
    story.seal(50)
    newest = story.seal(60)
    for commit in (None, CommitRef(1, 900), CommitRef(2, 60)):
        assert resume.newest_local(story.state, commit) == newest
    assert resume.newest_local(story.state, CommitRef(2, 61)) is None
    assert resume.newest_local(story.state, CommitRef(3, 1)) is None


def test_an_unusable_set_is_not_a_candidate() -> None:
    story = Story()
    older, torn = story.seal(50), story.seal(60)
    state = replace(
        story.state, staging=replace(story.state.staging, unusable=frozenset({torn.id}))
    )
    assert resume.newest_local(state, None) == older


def test_a_set_of_a_greater_step_of_an_earlier_start_is_older() -> None:
    """The training has gone back since."""
    story = Story()
    story.seal(60, "left", start_id="a")
    story.join(start_id="b")
    newest = story.seal(50, "own", start_id="b")
    assert resume.newest_local(story.state, None) == newest
    assert resume.newest_local(story.state, CommitRef(2, 60)) == newest


def test_a_set_without_a_generation_is_not_a_candidate() -> None:
    """It has no place among the commits: it is of an earlier boot, or of an unknown process."""
    story = Story(staged=[a_set(50)], booted_wall_ns=2)
    assert resume.newest_local(story.state, None) is None


def test_over_several_vms_a_set_in_staging_is_only_a_part() -> None:
    story = Story()
    story.staging = [a_set(50, nodes=2)]
    story.scan()
    assert resume.newest_local(story.state, None) is None


def test_a_rollback_takes_the_newest_healthy_set_of_an_earlier_step() -> None:
    story = Story()
    healthy = replace(a_set(20), health=GOOD)
    story.staging = [healthy, a_set(25)]
    story.scan()
    assert story.state.ref_of(healthy.id) == CommitRef(2, 20)
    assert resume.newest_local(story.state, None, before_step=30) == healthy
    assert resume.newest_local(story.state, CommitRef(2, 21), before_step=30) is None
    assert resume.newest_local(story.state, None, before_step=20) is None


# ---------------------------------------------------------------- when a query may be answered


def test_a_choice_needs_the_generation_of_its_start() -> None:
    """Until then an earlier start could still commit something newer; an operator need not wait."""
    story = Story()
    story.grants = False
    query = RestoreQuery("q", start_id="a")
    rollback = RestoreQuery("q", start_id="a~1", rollback=1, before_step=9)
    assert resume.may_answer(story.state, RestoreQuery("q"))
    assert not resume.may_answer(story.state, query), "its rank has not connected"
    story.join(start_id="a")
    assert not resume.may_answer(story.state, query)
    story.grant("a")
    assert resume.may_answer(story.state, query)
    story.tell(StartBegun(1, "a~1"))
    assert not resume.may_answer(story.state, rollback)
    story.grant("a~1")
    assert resume.may_answer(story.state, rollback)


def test_a_query_that_names_a_commit_needs_only_its_start() -> None:
    """Over several VMs another VM has chosen.  A commit that was refused is chosen again."""
    story = Story()
    story.grants = False
    named = RestoreQuery("q", generation=1, step=20)
    of_start = replace(named, start_id="a")
    assert resume.may_answer(story.state, named)
    assert not resume.may_answer(story.state, of_start)
    story.join(start_id="a")
    assert resume.may_answer(story.state, of_start)
    assert not resume.may_answer(story.state, replace(of_start, refused="damaged"))


# ---------------------------------------------------------------- downloads and the link


@pytest.mark.fault("G21")
def test_an_evacuation_has_the_link_for_itself() -> None:
    """A prefetch stops while it is open; a trainer's download stops while it sends."""
    story = joined(save_s=1.0)
    story.progress(10)
    assert resume.may_download(story.state, is_asked=False)
    story.notice()
    assert resume.may_download(story.state, is_asked=True), (
        "the rank that is asked may still restore"
    )
    assert not resume.may_download(story.state, is_asked=False)
    story.accept(10)
    story.answer(11)
    assert not resume.may_download(story.state, is_asked=True), "the set is sent"
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 11"]
    assert resume.may_download(story.state, is_asked=True)
    assert not resume.may_download(story.state, is_asked=False)
    story.withdraw()
    assert resume.may_download(story.state, is_asked=False)


def test_our_own_newer_commit_ends_the_prefetch() -> None:
    """The directory of the older one only takes space."""
    story = Story(newest=CommitRef(1, 100))
    assert resume.why_no_prefetch(story.state, CommitRef(1, 100)) == ""
    story.seal(110)
    assert "step 110" in resume.why_no_prefetch(story.state, CommitRef(1, 100))
    story.store_all()
    story.lose(story.staging[0])
    assert "committed a newer" in resume.why_no_prefetch(story.state, CommitRef(1, 100))
    assert resume.newest_known(story.state, CommitRef(1, 100)) == CommitRef(1, 100)
