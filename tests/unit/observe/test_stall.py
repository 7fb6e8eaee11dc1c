# SPDX-License-Identifier: Apache-2.0
"""Stories of stalled trainers, and what the log and the timeline show of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.core.events import Log, Mark, TrainerProgress
from swansongd.core.ranks import usual_step_s
from swansongd.observe.build_status import status_line
from swansongd.observe.decision_log import DecisionLog
from swansongd.observe.observer import Observation
from swansongd.observe.stall import StallWatch

from testkit.story import Story


class Lines(DecisionLog):
    """Collects the lines and the marks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Log] = []
        self.marks: list[Mark] = []

    def write(self, line: Log, now_mono_s: float) -> None:
        del now_mono_s
        self.lines.append(line)

    def mark(self, mark: Mark, now_mono_s: float) -> bool:
        del now_mono_s
        self.marks.append(mark)
        return False


class Watched(Story):
    """A story whose stalls are reported."""

    def __init__(self) -> None:
        self.log = Lines()
        self.watch = StallWatch(self.log)
        super().__init__()

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.watch.observe(observation)


def stalls(story: Watched) -> list[dict[str, object]]:
    return [dict(line.facts) for line in story.log.lines if line.event == "stall"]


def a_slow_trainer(step_s: float) -> Watched:
    """A trainer with this step time that has just reported step 40."""
    story = Watched()
    story.join(step=1)
    for step in range(30, 41):
        story.now += 1
        story.tell(TrainerProgress(1, step, step_s=step_s))
    return story


@pytest.mark.fault("T04")
@pytest.mark.parametrize(("step_s", "limit_s"), [(0.1, 60), (10.0, 200)])
def test_no_progress_for_long_is_a_stall_and_reported_once(step_s: float, limit_s: float) -> None:
    """Twenty usual steps, and at least a minute; the next report ends the stall."""
    story = a_slow_trainer(step_s)
    story.wait(limit_s - 1)
    assert not stalls(story)
    story.wait(2)
    story.wait(100)
    assert stalls(story) == [{"ranks": [0], "step": 40, "silent_s": limit_s + 1}]
    assert story.status.trainers[0].stalled_s == limit_s + 101
    assert "stalled" in status_line(story.state, story.now)
    story.progress(41)
    assert story.log.lines[-1] == Log("info", "stall_over", (("ranks", [0]),))
    assert story.status.trainers[0].stalled_s is None
    assert "stalled" not in status_line(story.state, story.now)


def test_a_report_without_a_step_prevents_a_stall() -> None:
    """A report without a new step, as from an evaluation, is enough."""
    story = a_slow_trainer(0.1)
    for _ in range(10):
        story.wait(50)
        story.tell(TrainerProgress(1, 40))
    assert not stalls(story)


def test_before_the_first_measured_step_no_rank_is_stalled() -> None:
    """Compilation and warm-up may take any time."""
    story = Watched()
    story.join(step=0)
    story.wait(100_000)
    assert not stalls(story)


def test_the_farewell_shows_a_stall_before_and_during_the_evacuation() -> None:
    """The timeline has it in both cases, with the step and the time since the last report."""
    story = a_slow_trainer(0.1)
    story.wait(100)
    story.notice(in_s=120)
    (mark,) = story.log.marks
    assert (mark.phase, dict(mark.facts)["step"]) == ("stall", 40)

    story = a_slow_trainer(0.1)
    story.notice(in_s=1000)
    story.wait(61)
    assert [mark.phase for mark in story.log.marks] == ["stall"]


@given(st.lists(st.floats(0.5, 2.0), min_size=1))
def test_the_usual_step_is_between_the_extremes(reports: list[float]) -> None:
    """One odd report moves it little, and it never leaves the range of the reports."""
    usual = None
    for reported in reports:
        usual = usual_step_s(usual, reported)
    assert usual is not None
    assert min(reports) <= usual * 1.000001
    assert usual <= max(reports) * 1.000001
    assert usual_step_s(usual, None) == usual
