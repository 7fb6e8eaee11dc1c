# SPDX-License-Identifier: Apache-2.0
"""The rows of ``swansong status`` about notifications and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swansong_tools.commands.view.rows import BAD, PLAIN, rows
from swansongd.observe.status import (
    HeartbeatStatus,
    MetricsStatus,
    NotificationsStatus,
    SenderStatus,
)

from testkit.status_picture import status


def shown(**fields: Any) -> dict[str, tuple[str, str]]:
    names = ("webhook", "exec", "heartbeat", "metrics")
    found = rows(replace(status(0.0), **fields))
    return {row.label: (row.text, row.style) for row in found if row.label in names}


def test_each_receiver_has_a_row_and_a_failing_one_is_marked() -> None:
    found = shown(
        notifications=NotificationsStatus(
            webhook=SenderStatus(queued=1, sent=3, failed=2, dropped=0, last_error="HTTP 503"),
            heartbeat=HeartbeatStatus(sent=9, failed=0),
        )
    )
    failed = "3 sent, 1 queued, 2 failed; the last attempt failed: HTTP 503"
    assert found == {"webhook": (failed, BAD), "heartbeat": ("9 sent", PLAIN)}


def test_a_silent_heartbeat_has_its_reason() -> None:
    heartbeat = HeartbeatStatus(sent=0, failed=0, silent="no commit for 900 s")
    text, _ = shown(notifications=NotificationsStatus(heartbeat=heartbeat))["heartbeat"]
    assert "no commit for 900 s" in text


def test_metrics_that_are_not_served_are_marked() -> None:
    served = MetricsStatus(address="127.0.0.1:9469")
    assert shown(metrics=served) == {"metrics": ("127.0.0.1:9469", PLAIN)}
    failed = MetricsStatus(address="127.0.0.1:9469", failure="taken")
    assert shown(metrics=failed) == {"metrics": ("not served: taken", BAD)}


def test_without_notifications_and_metrics_there_is_no_row() -> None:
    assert shown() == {}
