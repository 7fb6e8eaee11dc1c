# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than their peers."""

from __future__ import annotations

import pytest
from swansongd.core.events import TrainerLeft, TrainerProgress
from swansongd.observe.slow import slow_ranks

from testkit.story import Story


def story_of(*own_s: float | None, step_s: float = 1.0) -> Story:
    """A rank for each of these times, on the connections 1, 2, ..."""
    story = Story()
    for rank, each in enumerate(own_s):
        story.join(connection=rank + 1, rank=rank, ranks=len(own_s))
        story.tell(TrainerProgress(rank + 1, 5, step_s=step_s, own_s=each))
    return story


@pytest.mark.parametrize(
    ("own_s", "slow"),
    [
        ((0.3, 0.3, 0.3, 0.42), {4: 1.4}),
        ((0.3, 0.3, 0.3, 0.38), {}),
        ((0.3, 0.6), {2: 2.0}),
        ((0.3,), {}),
        ((None, 0.6), {}),
        ((0.3, 0.3, 0.9, 0.9), {3: 3.0, 4: 3.0}),
        ((0.01, 0.01, 0.05), {}),
        ((0.0, 0.0, 0.1), {3: 1e5}),
        ((1e-9, 1e9), {2: 1e15}),
    ],
    ids=["40 %", "27 %", "two", "one", "unknown", "half", "negligible", "zero", "any"],
)
def test_a_slow_rank_takes_longer_than_its_peers(
    own_s: tuple[float | None, ...], slow: dict[int, float]
) -> None:
    """By 30 % for its own part of the step, and by 5 % of the step."""
    assert slow_ranks(story_of(*own_s).state) == pytest.approx(slow)


def test_a_time_stays_until_the_next_and_leaves_with_its_rank() -> None:
    """A report without it, such as of a tensor's loss, changes nothing."""
    story = story_of(0.3, 0.3, 0.9)
    story.tell(TrainerProgress(3, 6, step_s=1.0))
    assert set(slow_ranks(story.state)) == {3}
    story.tell(TrainerLeft(3, False, "eof"))
    assert not slow_ranks(story.state)
