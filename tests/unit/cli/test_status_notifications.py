# SPDX-License-Identifier: Apache-2.0
"""The rows of ``swansong status`` about notifications."""

from __future__ import annotations

from typing import Any

from swansongd.cli.view.rows import rows

RECEIVERS = ("webhook", "exec", "heartbeat")


def notifications(report: Any) -> list[tuple[str, str, bool]]:
    """The rows of receivers: label, text, and whether the row is marked."""
    found = rows({"notifications": report})
    return [(row.label, row.text, bool(row.style)) for row in found if row.label in RECEIVERS]


def test_each_receiver_has_a_row_and_a_failing_one_is_marked() -> None:
    report = {
        "webhook": {"queued": 1, "sent": 3, "failed": 2, "dropped": 0, "last_error": "HTTP 503"},
        "exec": None,
        "heartbeat": {"sent": 9, "failed": 0, "silent": None, "last_error": None},
        "limited": 0,
    }
    webhook, heartbeat = notifications(report)
    assert webhook == (
        "webhook",
        "3 sent, 1 queued, 2 failed; the last attempt failed: HTTP 503",
        True,
    )
    assert heartbeat == ("heartbeat", "9 sent", False)


def test_a_silent_heartbeat_is_marked_with_its_reason() -> None:
    report = {"heartbeat": {"sent": 0, "failed": 0, "silent": "no commit for 900 s"}}
    assert notifications(report) == [("heartbeat", "0 sent; silent: no commit for 900 s", True)]


def test_without_notifications_there_is_no_row() -> None:
    for report in (None, {}, "hostile", {"webhook": "hostile"}):
        assert notifications(report) == []
