# SPDX-License-Identifier: Apache-2.0
"""aws.rebalance and aws.scheduled without a network: the notices in a body."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from swansong_bucket.model import DeadlineQuality, Severity
from swansongd.sources.aws_events import (
    AwsScheduledSource,
    parse_event,
)
from swansongd.sources.polled import ClockReading

NOON = datetime(2019, 1, 21, 9, 0, tzinfo=UTC).timestamp()
ASKED = ClockReading(mono_s=1000.0, wall_s=NOON)


def event(**fields: Any) -> dict[str, Any]:
    return {
        "NotBefore": "21 Jan 2019 09:00:43 GMT",
        "Code": "instance-stop",
        "EventId": "e-1",
        "State": "active",
    } | fields


@pytest.mark.parametrize(
    ("date", "left_s"),
    [
        ("21 Jan 2019 09:00:43 GMT", 43),
        ("1 Feb 2019 9:00:00 GMT", 11 * 86400),
        ("01 Feb 2019 09:00:00 GMT", 11 * 86400),
        ("2019-01-21T09:01:00Z", 60),
        ("9 Jan 2019 09:00:43 GMT", 0),
    ],
)
def test_dates_of_events(date: str, left_s: float) -> None:
    """The day may be padded or not, ISO 8601 is accepted as well, and a past date leaves no time."""
    notice = parse_event(event(NotBefore=date), ASKED, 25)
    assert notice.deadline_mono_s - ASKED.mono_s == left_s
    assert notice.deadline_quality is (
        DeadlineQuality.STATED if left_s else DeadlineQuality.DERIVED
    )
    assert notice.severity is Severity.SCHEDULED


@pytest.mark.fault("N08")
@pytest.mark.parametrize("date", ["", "soon", "99 Foo 2019 09:00:43 GMT", 7, None])
def test_event_without_a_date_is_near(date: object) -> None:
    """An event with an invalid date is a notice with the assumed grace period."""
    notice = parse_event(event(NotBefore=date), ASKED, 25)
    assert notice.deadline_mono_s == ASKED.mono_s + 25
    assert notice.deadline_quality is DeadlineQuality.ASSUMED


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("instance-stop", "stop"),
        ("instance-retirement", "retirement"),
        ("instance-reboot", "reboot"),
        ("system-reboot", "reboot"),
        ("system-maintenance", "maintenance"),
        ("something-new", "maintenance"),
        (None, "maintenance"),
    ],
)
def test_kinds_of_events(code: str | None, kind: str) -> None:
    """Each code has its kind; an unknown code is a notice as well."""
    assert parse_event(event(Code=code), ASKED, 25).kind == kind


@pytest.mark.fault("N09")
def test_identity_of_an_event() -> None:
    """The identity is the event, with any date and at any time of the poll."""
    identity = parse_event(event(), ASKED, 25).identity
    later = ClockReading(5000.0, NOON + 20)
    same = event(NotBefore="2019-01-21T09:00:43Z", Description="other words")
    assert parse_event(same, later, 99).identity == identity
    assert identity == f"{AwsScheduledSource.name}:e-1"
    moved = event(NotBefore="22 Jan 2019 09:00:43 GMT")
    assert parse_event(moved, ASKED, 25).identity == identity
    assert parse_event(event(EventId="e-2"), ASKED, 25).identity != identity
