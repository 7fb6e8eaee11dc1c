# SPDX-License-Identifier: Apache-2.0
"""The rows of ``swansong status`` about notifications."""

from __future__ import annotations

from swansongd.cli.view.rows import BAD, PLAIN, notifications


def test_each_receiver_has_a_row_and_a_failing_one_is_marked() -> None:
    report = {
        "webhook": {"queued": 1, "sent": 3, "failed": 2, "dropped": 0, "last_error": "HTTP 503"},
        "exec": None,
        "heartbeat": {"sent": 9, "failed": 0, "silent": None, "last_error": None},
        "limited": 0,
    }
    webhook, heartbeat = notifications(report)
    assert (webhook.label, webhook.text, webhook.style) == (
        "webhook",
        "3 sent, 1 queued, 2 failed; the last attempt failed: HTTP 503",
        BAD,
    )
    assert (heartbeat.label, heartbeat.text, heartbeat.style) == ("heartbeat", "9 sent", PLAIN)


def test_a_silent_heartbeat_is_marked_with_its_reason() -> None:
    report = {"heartbeat": {"sent": 0, "failed": 0, "silent": "no commit for 900 s"}}
    (row,) = notifications(report)
    assert (row.text, row.style) == ("0 sent; silent: no commit for 900 s", BAD)


def test_without_notifications_there_is_no_row() -> None:
    for report in (None, {}, "hostile", {"webhook": "hostile"}):
        assert not list(notifications(report))
