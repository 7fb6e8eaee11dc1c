# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a trainer resumes from, and which queries get the same answer again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong.protocol import RestoreQuery
from swansongd.core import resume
from swansongd.core.resume import ONE_START_S
from swansongd.core.state import Finishing, State
from swansongd.model import CommitRef

from testkit.story import Story, a_set

GOOD = {"loss_is_finite": 1.0}


def several_vms(state: State, job_start_id: str = "start-1") -> State:
    settings = replace(state.settings, several_vms=True)
    return replace(state, settings=settings, job_start_id=job_start_id)


def test_the_newer_of_set_and_commit_wins_and_a_tie_stays_on_this_vm() -> None:
    """Both are ordered by generation and step; a set is of the generation of this VM."""
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
    state = replace(story.state, unusable=frozenset({torn.id}))
    assert resume.newest_local(state, None) == older


def test_over_several_vms_a_set_in_staging_is_only_a_part() -> None:
    """Unless the trainers say that this VM is alone in the job."""
    story = Story()
    staged = story.seal(50)
    assert resume.newest_local(several_vms(story.state), None) is None
    assert resume.newest_local(several_vms(story.state, "alone:vm:2"), None) == staged


def test_a_rollback_takes_the_newest_healthy_set_of_an_earlier_step() -> None:
    story = Story()
    healthy = replace(a_set(20), health=GOOD)
    story.staging = [healthy, a_set(25)]
    story.scan()
    assert resume.newest_healthy_local(story.state, 30, None) == healthy
    assert resume.newest_healthy_local(story.state, 30, CommitRef(2, 21)) is None
    assert resume.newest_healthy_local(story.state, 20, None) is None


def test_an_answer_stands_until_a_set_is_sealed_or_the_job_starts_again() -> None:
    story = Story()
    story.seal(50)
    given = resume.basis(story.state, CommitRef(1, 10), story.now)
    assert resume.still_holds(given, story.state)
    assert not resume.still_holds(given, replace(story.state, job_start_id="another"))
    story.seal(60)
    assert not resume.still_holds(given, story.state)


def test_over_several_vms_every_choice_reads_the_store() -> None:
    state = several_vms(Story().state)
    assert not resume.still_holds(resume.basis(state, None, 1000.0), state)


def test_ranks_of_one_start_ask_within_a_minute() -> None:
    given = resume.basis(Story().state, None, 1000.0)
    assert given.is_recent(1000.0 + ONE_START_S - 1)
    assert not given.is_recent(1000.0 + ONE_START_S)


# ---------------------------------------------------------------- when a query may be answered


def test_on_one_vm_every_query_is_answered_at_once() -> None:
    state = State(settings=Story().state.settings)
    assert resume.may_answer(state, RestoreQuery("q"))
    assert resume.may_answer(state, RestoreQuery("q", rollback=1, before_step=9))


@pytest.mark.parametrize(
    ("change", "may_answer"),
    [
        ({}, True),
        ({"job_start_id": "start-0"}, False),
        ({"generation": None}, False),
        ({"finishing": Finishing("start-2", asked_mono_s=0.0, by_mono_s=1.0)}, False),
    ],
)
def test_over_several_vms_a_choice_needs_the_generation_of_its_start(
    change: dict[str, object], may_answer: bool
) -> None:
    state = replace(several_vms(Story().state), **change)  # type: ignore[arg-type]
    query = RestoreQuery("q", job_start_id="start-1")
    assert resume.may_answer(state, query) is may_answer


def test_a_query_that_names_a_commit_needs_only_its_start() -> None:
    state = replace(several_vms(Story().state), generation=None)
    named = RestoreQuery("q", generation=1, step=20)
    assert resume.may_answer(state, named)
    assert resume.may_answer(state, replace(named, job_start_id="start-1"))
    assert not resume.may_answer(state, replace(named, job_start_id="start-2"))


# ---------------------------------------------------------------- downloads and the link


@pytest.mark.fault("G21")
def test_an_evacuation_has_the_link_for_itself() -> None:
    """A prefetch stops while it is open; a trainer's download stops while it sends."""
    story = Story()
    story.join(save_s=1.0)
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


def test_an_idle_vm_with_a_notice_serves_a_trainer_that_asks() -> None:
    """Nothing is to be sent: the notice may be withdrawn, and a follow-up may commit the training."""
    story = Story(newest=CommitRef(1, 100))
    story.notice()
    assert resume.may_download(story.state, is_asked=True)
    assert not resume.may_download(story.state, is_asked=False)


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
