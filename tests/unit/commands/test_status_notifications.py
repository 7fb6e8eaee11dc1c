# SPDX-License-Identifier: Apache-2.0
"""The rows of ``swansong status`` about notifications."""

from __future__ import annotations

from typing import Any

from swansong_tools.commands.view.rows import BAD, rows


def shown(report: Any) -> dict[str, tuple[str, str]]:
    names = ("webhook", "exec", "heartbeat")
    found = rows({"notifications": report})
    return {row.label: (row.text, row.style) for row in found if row.label in names}


def test_each_receiver_has_a_row_and_a_failing_one_is_marked() -> None:
    report = {
        "webhook": {"queued": 1, "sent": 3, "failed": 2, "dropped": 0, "last_error": "HTTP 503"},
        "exec": None,
        "heartbeat": {"sent": 9, "failed": 0, "silent": None, "last_error": None},
        "limited": 0,
    }
    found = shown(report)
    assert list(found) == ["webhook", "heartbeat"]
    text, style = found["webhook"]
    assert "3 sent" in text
    assert "HTTP 503" in text
    assert style == BAD
    text, style = found["heartbeat"]
    assert "9 sent" in text
    assert style != BAD


def test_a_silent_heartbeat_has_its_reason() -> None:
    report = {"heartbeat": {"sent": 0, "failed": 0, "silent": "no commit for 900 s"}}
    assert "no commit for 900 s" in shown(report)["heartbeat"][0]


def test_metrics_that_are_not_served_are_marked() -> None:
    """A daemon without ``metrics.listen`` has no row."""
    address = "127.0.0.1:9469"
    (good,) = (r for r in rows({"metrics": {"address": address}}) if r.label == "metrics")
    (bad,) = (r for r in rows({"metrics": {"failure": "taken"}}) if r.label == "metrics")
    assert (good.text, good.style) == (address, "")
    assert (bad.text, bad.style) == ("not served: taken", BAD)
    assert not [row for row in rows({"metrics": None}) if row.label == "metrics"]


def test_without_notifications_there_is_no_row() -> None:
    for report in (None, {}, "hostile", {"webhook": "hostile"}):
        assert shown(report) == {}
