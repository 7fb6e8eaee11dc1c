# SPDX-License-Identifier: Apache-2.0
"""Actions for trainers become messages with their connections, their urgency and the time that is left."""

from __future__ import annotations

import pytest
from swansong import protocol
from swansongd.core.events import (
    AskTrainers,
    SendTarget,
    TellCommitted,
    TellFenced,
    TellFinished,
    WithdrawRequest,
)
from swansongd.model import CommitRef
from swansongd.trainers.translate import ToTrainers, message_of


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
    ],
)
def test_each_other_action_is_its_message(
    action: ToTrainers, connections: tuple[int, ...] | None, message: protocol.Message
) -> None:
    """None stands for all connections."""
    assert message_of(action, 100.0) == (connections, message)
