# SPDX-License-Identifier: Apache-2.0
"""The picture of an evacuation: its lanes, and positions that hold for any recorded evacuation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.runs.history import RunHistory
from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import Interruption
from swansong_tools.report.lanes import Bar, Course, Lane, course
from swansong_tools.report.positions import Picture, picture
from swansong_tools.report.run_report import stories

from testkit.hostile_farewells import evacuations, interruptions


def course_of(past: RunHistory, place: int) -> Course:
    loss = losses.loss(past.lives.lives)
    story = stories(past, loss)[place]
    return course(story.recorded, story.interruption, story.resumption)


def lane(of: Course, name: str) -> Lane:
    (found,) = (each for each in of.lanes if each.name == name)
    return found


def test_the_lanes_of_a_preemption(past: RunHistory) -> None:
    """From the notice to the first new step; the follow-up does not move the verdict."""
    made = course_of(past, 0)
    assert [each.name for each in made.old_vm] == [
        "Training", "Notice", "Forecast", "Request", "Save", "Upload", "Commit", "Follow-ups",
    ]  # fmt: skip
    assert [each.name for each in made.next_vm] == [
        "No VM", "Boot", "Start", "Fetch", "Load", "First step",
    ]  # fmt: skip
    assert [(each.kind, each.at_s) for each in made.moments] == [
        ("notice", 0.0),
        ("verdict", 51.9),
        ("deadline", 118.9),
    ]
    (bar,) = lane(made, "Save").bars
    assert (bar.kind, bar.from_s, bar.to_s) == ("work", 1.4, 15.2)
    (follow_up,) = lane(made, "Follow-ups").bars
    assert (follow_up.kind, follow_up.from_s, follow_up.to_s) == ("work", 52.5, 95.2)
    assert lane(made, "Follow-ups").note == "1 of 1 committed, step 5119"


def test_a_rank_that_accepts_again_counts_once(past: RunHistory) -> None:
    """After a failed save the daemon asks the same ranks again."""
    recorded = stories(past, losses.loss(past.lives.lives))[0].recorded
    again = [entry for entry in recorded.timeline if entry.phase == "accepted"]
    twice = replace(recorded, timeline=(*recorded.timeline, *again))
    assert f"{len(again)} ranks" in lane(course(twice, None, None), "Request").note


def test_the_parts_of_the_resumption_are_those_of_the_loss(past: RunHistory) -> None:
    """They follow each other from the last step to the first new one, and their lengths are the figures."""
    made = course_of(past, 0)
    loss = losses.loss(past.lives.lives)
    assert loss is not None
    bars = [each.bars[0] for each in made.next_vm]
    lengths = [(bar.to_s or 0.0) - (bar.from_s or 0.0) for bar in bars]
    assert lengths == pytest.approx(list(loss.interruptions[0].parts_s.values()))
    assert all(before.to_s == after.from_s for before, after in pairwise(bars))


def test_an_upload_that_did_not_finish_is_marked(past: RunHistory) -> None:
    """The store failed: there is no commit, and the bar has the colour of a failure."""
    made = course_of(past, 1)
    (bar,) = lane(made, "Upload").bars
    assert bar.kind == "failed"
    assert "not finished" in lane(made, "Upload").note
    assert "Commit" not in [each.name for each in made.lanes]


def test_the_bandwidth_adds_up_to_the_bytes_sent(past: RunHistory) -> None:
    """Also after narrow columns were joined."""
    for place in (0, 1):
        recorded = past.evacuations.evacuations[place]
        made = course_of(past, place)
        sent = sum(rate.bytes_per_s * (rate.to_s - rate.from_s) for rate in made.rates)
        assert sent == pytest.approx(recorded.bytes_sent)
        placed = picture(made)
        assert max(rate.height for rate in placed.rates) == 1.0
        assert len(placed.rates) < 120


def test_hours_without_a_vm_are_left_out(past: RunHistory) -> None:
    """The evacuation keeps a quarter of the width although the cloud had no VM for hours."""
    placed = picture(course_of(past, 1))
    (only,) = placed.breaks
    assert only.name == "3 h 36 min left out"
    notice, *_ = placed.bars(lane(placed.course, "Notice"))
    assert notice.width > 0.25
    labels = [tick.label for tick in placed.on.ticks()]
    assert labels == ["0 s", "30 s", "3 h 36 min", "3 h 37 min"]


def test_the_longest_part_of_a_resumption_looks_longest(past: RunHistory) -> None:
    """Also if most of it is left out: 3 h 36 min without a VM are no shorter than a boot of 21 s."""
    for place in (0, 1):
        made = course_of(past, place)
        lengths = [
            (each.bars[0].to_s or 0.0) - (each.bars[0].from_s or 0.0) for each in made.next_vm
        ]
        placed = picture(made)
        widths = [next(placed.bars(each)).width for each in made.next_vm]
        assert widths[lengths.index(max(lengths))] == max(widths)


def check(placed: Picture) -> None:
    """Everything lies inside, bars do not overlap, and labels of one row do not touch."""
    for each in placed.course.lanes:
        bars = list(placed.bars(each))
        assert all(0.0 <= bar.left < bar.right <= 1.0 for bar in bars)
        assert all(before.right <= after.left for before, after in pairwise(bars))
        assert len(bars) <= 40
    assert all(0.0 <= moment.at <= 1.0 for moment in placed.moments)
    assert all(0.0 <= rate.left <= rate.right <= 1.0 for rate in placed.rates)
    assert all(0.0 <= rate.height <= 1.0 for rate in placed.rates)
    ticks = placed.on.ticks()
    assert all(0.0 <= tick.at <= 1.0 for tick in ticks)
    assert all(tick.time_s < after.time_s for tick, after in pairwise(ticks))
    rows = [(moment.row, moment.at) for moment in placed.moments if not moment.is_left]
    assert len(rows) == len(set(rows))


def test_short_bars_stay_visible_side_by_side() -> None:
    """Forty follow-ups within a second of two minutes: each is visible, or omitted at the end."""
    bars = tuple(Bar("work", 119.0 + each / 40, 119.0 + (each + 1) / 40) for each in range(40))
    grace = Lane("Notice", "", (Bar("grace", 0.0, 60.0), Bar("grace", 60.0, 120.0)))
    lanes = (grace, Lane("Follow-ups", "", bars))
    placed = picture(Course(old_vm=lanes, next_vm=(), moments=(), rates=()))
    check(placed)
    assert all(bar.width > 0.002 for bar in placed.bars(lanes[1]))


@pytest.mark.fault("O41")
@settings(max_examples=40)
@given(evacuations, st.none() | interruptions())
def test_every_recorded_evacuation_has_a_picture(
    recorded: RecordedEvacuation, interruption: Interruption | None
) -> None:
    """Any phases in any order, clocks that contradict each other, deadlines in the past."""
    made = course(recorded, interruption)
    for each in made.lanes:
        bars = [(bar.from_s, bar.to_s) for bar in each.bars]
        assert all(start is None or end is None or start <= end for start, end in bars), each
    check(picture(made))
