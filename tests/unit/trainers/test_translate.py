# SPDX-License-Identifier: Apache-2.0
"""Messages of trainers become events that name the start and what it has loaded."""

from __future__ import annotations

import pytest
from swansong import protocol
from swansong_bucket.model import UNKNOWN_PARENT, Parent
from swansongd.core.events import FinishAsked, TrainerProgress
from swansongd.trainers.translate import event_of, view_of


@pytest.mark.parametrize(
    ("fields", "parent"),
    [
        ({}, UNKNOWN_PARENT),
        ({"parent": protocol.PARENT_UNKNOWN, "parent_step": 7}, UNKNOWN_PARENT),
        ({"parent": "", "parent_step": 7}, UNKNOWN_PARENT),
        ({"parent": protocol.PARENT_NONE}, Parent("", 0)),
        ({"parent": "b", "parent_step": 7}, Parent("b", 7)),
    ],
)
def test_a_start_names_what_it_has_loaded(fields: dict[str, object], parent: Parent) -> None:
    """A fresh run has loaded step 0 of no start.  A directory that names no start is unknown."""
    hello = protocol.Hello("r", start_id="a", **fields)  # type: ignore[arg-type]
    assert view_of(1, 100, hello, greeted_mono_s=0.0).parent == parent
    report = protocol.Progress(7, start_id="a", **fields)  # type: ignore[arg-type]
    event = event_of(1, report)
    assert isinstance(event, TrainerProgress)
    assert (event.start_id, event.parent) == ("a", parent)


def test_a_question_of_a_start_names_the_rank_that_asks() -> None:
    """When the process of this rank began decides which launch is the newest."""
    assert event_of(7, protocol.Finish("a")) == FinishAsked("a", 7)
