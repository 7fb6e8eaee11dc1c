# SPDX-License-Identifier: Apache-2.0
"""Actions for trainers become messages with their connections, their urgency and the time that is left."""

from __future__ import annotations

import pytest
from swansong import protocol
from swansong_bucket.model import UNKNOWN_PARENT, CommitRef, Parent
from swansongd.core.events import (
    AskTrainers,
    SendTarget,
    StartBegun,
    TellCommitted,
    TellFenced,
    TellFinished,
    TellStart,
    TrainerProgress,
    WithdrawRequest,
)
from swansongd.trainers.translate import ToTrainers, event_of, message_of, view_of


@pytest.mark.parametrize(("is_urgent", "urgency"), [(True, "emergency"), (False, "drain")])
def test_a_request_states_its_urgency_and_the_seconds_left(is_urgent: bool, urgency: str) -> None:
    """A deadline is an instant of this VM's clock.  The message has the time left, which needs no clock."""
    action = AskTrainers("r1", "notice", 130.5, (1, 2), is_urgent=is_urgent)
    assert message_of(action, 100.0) == (
        (1, 2),
        protocol.Request("r1", "notice", 30.5, urgency=urgency),
    )


@pytest.mark.parametrize(
    ("action", "connections", "message"),
    [
        (SendTarget("r1", 7, (3,)), (3,), protocol.Target("r1", 7)),
        (WithdrawRequest("r1", "too late"), None, protocol.Withdrawn("r1", "too late")),
        (TellCommitted(CommitRef(2, 7)), None, protocol.Committed(2, 7)),
        (TellCommitted(CommitRef(2, 7), (4,)), (4,), protocol.Committed(2, 7)),
        (TellFenced(3), None, protocol.Fenced(3)),
        (TellFinished("start-1"), None, protocol.Finished("start-1")),
        (
            TellFinished("start-2", earlier="start-1", first_rank=4, nodes=3, waits=True),
            None,
            protocol.Finished("start-2", earlier="start-1", first_rank=4, nodes=3, waits=True),
        ),
        (TellStart("start-1", (2, 3)), (2, 3), protocol.StartDrawn("start-1")),
    ],
)
def test_each_other_action_is_its_message(
    action: ToTrainers, connections: tuple[int, ...] | None, message: protocol.Message
) -> None:
    """None stands for all connections."""
    assert message_of(action, 100.0) == (connections, message)


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


def test_a_rank_that_begins_a_start_names_it() -> None:
    assert event_of(3, protocol.Begin("a~1")) == StartBegun(3, "a~1")
