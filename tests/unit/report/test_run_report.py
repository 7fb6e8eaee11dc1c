# SPDX-License-Identifier: Apache-2.0
"""Which evacuation comes with the interruption that ended its VM, and what the report says first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from swansong_bucket.format.farewell import RecordedEvacuation, TimelineEntry
from swansong_bucket.loss_records import NoticeRecord
from swansong_bucket.model import PEER_SOURCE, Verdict, merged_health
from swansong_bucket.runs.history import RunHistory
from swansong_tools.economics import loss as losses
from swansong_tools.report import run_report
from swansong_tools.report.run_report import Story, comparisons, sentences, stories

from testkit import past_run


def told(past: RunHistory, *evacuations: RecordedEvacuation) -> list[Story]:
    recorded = replace(past.evacuations, evacuations=evacuations)
    return stories(replace(past, evacuations=recorded), losses.loss(past.lives.lives))


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
    both = replace(past.evacuations, evacuations=(earlier(recorded, 600.0), recorded))
    first, last = stories(replace(past, evacuations=both), None)
    assert (first.was_outlived, last.was_outlived) == (True, False)
    assert last.interruption is None


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        (0.0, "The repeated steps are as before, up to step 60950."),
        (
            0.5,
            (
                "The repeated steps differ from the interrupted run, at step 60950 or later:"
                " see docs/trainers/checks.md#redone-steps."
            ),
        ),
    ],
)
def test_the_comparison_of_repeated_steps_is_told(
    past: RunHistory, differs: float, sentence: str
) -> None:
    """The commits of the next VM have the result; the rank that compared the fewest steps decides."""
    ranks = [{"redone_to": step, "redone_differs": differs} for step in (61000.0, 60950.0)]
    health = merged_health(ranks)
    compared = tuple(
        replace(commit, health=health) if commit.ref.generation == 3 else commit
        for commit in past.commits.commits
    )
    told = run_report.report(
        replace(past, commits=replace(past.commits, commits=compared)),
        run="r",
        store_url="",
        written_wall_s=0.0,
    )
    said = [list(sentences(story)) for story in told.stories]
    assert [sentence in each for each in said] == [True, False]


@pytest.mark.parametrize("step", [-1.0, 1e300, math.inf, math.nan])
def test_a_step_that_no_run_has_is_not_told(past: RunHistory, step: float) -> None:
    """Another role may have written the commit, and without a key its numbers are not signed."""
    health = {"redone_to": step, "redone_differs": 1.0}
    forged = tuple(replace(commit, health=health) for commit in past.commits.commits)
    commits = replace(past.commits, commits=forged)
    told = stories(replace(past, commits=commits), losses.loss(past.lives.lives))
    assert not any("repeated" in sentence for story in told for sentence in sentences(story))


def test_the_report_begins_with_what_happened_its_cost_and_what_to_do(past: RunHistory) -> None:
    """The largest part of the loss decides what to do, and without a whole commit the cause comes first."""
    fields: Any = {
        "run": "my-run",
        "store_url": "s3://b",
        "written_wall_s": past_run.BEGUN_S + 50000,
    }
    assert run_report.summary(
        run_report.report(past, amounts={run_report.LOST: "7.10 USD"}, **fields)
    ) == (
        "2 evacuations: 1 PARTIAL, 1 SAFE. 2 interruptions cost 31 h 33 min of GPU time (7.10 USD). "
        "The largest part is time without a VM, 28 h 57 min: "
        "order the next VM at the notice, or in more zones."
    )
    first, last = past.evacuations.evacuations
    lost = replace(past.evacuations, evacuations=(first, replace(last, verdict=Verdict.LOST)))
    assert "First find out why the run has no whole commit" in run_report.summary(
        run_report.report(replace(past, evacuations=lost), **fields)
    )
    unhurt = replace(past, lives=replace(past.lives, lives=()))
    assert "nothing to do" in run_report.summary(run_report.report(unhurt, **fields))


def test_a_verdict_has_the_time_at_which_it_was_reached(past: RunHistory) -> None:
    """A follow-up confirms SAFE at 95 s; the verdict was there after 52 s."""
    story = told(past, *past.evacuations.evacuations)[0]
    assert [each.outcome for each in comparisons(story) if each.name == "Verdict"] == ["after 52 s"]


def test_a_verdict_after_the_deadline_is_not_told_as_one_in_time(past: RunHistory) -> None:
    """The VM outlived its deadline, and the exit code of a drill was that of the earlier verdict."""
    newest = past.evacuations.evacuations[-1]
    verdicts = (("PARTIAL", 6.0), ("SAFE", 9.0), ("SAFE", 10.0))
    timeline = tuple(TimelineEntry("verdict", at_s, {"verdict": each}) for each, at_s in verdicts)
    late = replace(newest, verdict=Verdict.SAFE, deadline_s=8.0, timeline=timeline)
    assert "It came 1 s after the deadline, at which it was PARTIAL." in list(
        sentences(told(past, late)[0])
    )
    timely = replace(late, deadline_s=9.5)
    assert not any("after the deadline" in each for each in sentences(told(past, timely)[0]))


def test_equal_notices_are_named_once(past: RunHistory) -> None:
    notices = (NoticeRecord("drill", "drill"),) * 3
    newest = replace(past.evacuations.evacuations[-1], notices=notices)
    assert "notice (drill from drill)," in next(sentences(told(past, newest)[0]))


def test_the_vms_of_a_job_are_told_apart(past: RunHistory) -> None:
    """Each has its node, and the one with the notice is not the one that it asked."""
    own = past.evacuations.evacuations[1]
    peer = replace(own, node=1, notices=(NoticeRecord(PEER_SOURCE, "checkpoint"),))
    both = replace(past.evacuations, evacuations=(own, peer))
    made = run_report.report(
        replace(past, evacuations=both), run="r", store_url="", written_wall_s=0.0
    )
    assert {made.vm_of(story) for story in made.stories} == {"node 0", "node 1"}
    said = {story.recorded.node: next(sentences(story)) for story in made.stories}
    assert "another VM of the job has it" in said[1]
    assert "gcp.preempted" in said[0]
    assert {story.recorded.node: story.picture.course.is_of_peer for story in made.stories} == {
        0: False,
        1: True,
    }
