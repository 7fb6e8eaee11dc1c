# SPDX-License-Identifier: Apache-2.0
"""The sources without a network: parsed notices, health, backoff, and the detected cloud."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path

import pytest
from swansong_bucket.model import DeadlineQuality, Health, SourceStatus
from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.core.events import SourceChanged
from swansongd.observe.health import HealthTracker
from swansongd.sources.aws import AwsSpotSource, parse_instance_action
from swansongd.sources.aws_events import AwsAsgSource, AwsRebalanceSource, AwsScheduledSource
from swansongd.sources.azure import AzureDeletionSource, AzureScheduledSource
from swansongd.sources.detect import detect_cloud
from swansongd.sources.gcp import GcpPreemptedSource
from swansongd.sources.gcp_events import GcpMaintenanceSource, GcpStopSource, GcpUpcomingSource
from swansongd.sources.metadata import Backoff, MetadataClient, MetadataResponse, shortened, watch
from swansongd.sources.polled import ClockReading
from swansongd.sources.selection import open_sources, unknown_firmware
from swansongd.sources.source import must_post

from testkit.staged import Clock
from testkit.story import a_notice

NOON = datetime(2026, 1, 5, 12, 0, tzinfo=UTC).timestamp()
ASKED = ClockReading(mono_s=1000.0, wall_s=NOON)


def body(action: str = "terminate", time: str = "2026-01-05T12:01:40Z") -> bytes:
    return f'{{"action": "{action}", "time": "{time}"}}'.encode()


@pytest.mark.fault("N08", "N10")
@pytest.mark.parametrize(
    ("action", "time", "kind", "grace_s", "quality"),
    [
        ("terminate", "12:01:40Z", "reclaim", 100, DeadlineQuality.STATED),
        ("stop", "12:01:40Z", "stop", 100, DeadlineQuality.STATED),
        ("hibernate", "12:01:40Z", "hibernate", 0, DeadlineQuality.DERIVED),
        ("explode", "12:01:40Z", "reclaim", 25, DeadlineQuality.ASSUMED),
        ("explode", "12:00:10Z", "reclaim", 10, DeadlineQuality.ASSUMED),
        ("terminate", "12:02:00Z", "reclaim", 120, DeadlineQuality.STATED),
        ("terminate", "11:00:00Z", "reclaim", 0, DeadlineQuality.DERIVED),
        ("terminate", "23:00:00Z", "reclaim", 120, DeadlineQuality.DERIVED),
        ("terminate", "14:00:30+02:00", "reclaim", 30, DeadlineQuality.STATED),
        ("terminate", "12:00:30", "reclaim", 30, DeadlineQuality.STATED),
    ],
)
def test_each_action_and_time_has_its_grace_period(
    action: str, time: str, kind: str, grace_s: float, quality: DeadlineQuality
) -> None:
    """Terminate and stop have the stated time, hibernate has none, an unknown action at most the assumed one.

    A time in the past means now, a far one two minutes; zones count, and UTC is the default.
    """
    notice = parse_instance_action(body(action, f"2026-01-05T{time}"), ASKED, 25.0)
    assert (notice.kind, notice.deadline_quality) == (kind, quality)
    assert notice.deadline_mono_s - ASKED.mono_s == grace_s


@pytest.mark.fault("N08")
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "reclaim"),
        (b'{"action": "termin', "reclaim"),
        (b"[" * 60000, "reclaim"),
        (b"null", "reclaim"),
        (b'{"action": 7, "time": 7}', "reclaim"),
        (b'{"action": "stop"}', "stop"),
        (b'{"action": "stop", "time": "soon"}', "stop"),
        (b"\xff\x00 nonsense", "reclaim"),
    ],
)
def test_an_invalid_body_is_a_notice(content: bytes, kind: str) -> None:
    """Any body gives a notice with an assumed deadline, the same identity and a short detail."""
    notice = parse_instance_action(content, ASKED, 25.0)
    assert (notice.kind, notice.deadline_quality) == (kind, DeadlineQuality.ASSUMED)
    assert notice.deadline_mono_s == ASKED.mono_s + 25
    assert len(notice.detail) <= 200
    assert notice.detail.isprintable()
    later = parse_instance_action(content, ClockReading(2000.0, NOON + 1000), 25.0)
    assert later.identity == notice.identity


@pytest.mark.parametrize(
    ("later_s", "quality", "expected"),
    [
        (0.0, DeadlineQuality.STATED, False),
        (1.5, DeadlineQuality.STATED, False),
        (-30.0, DeadlineQuality.STATED, True),
        (-30.0, DeadlineQuality.ASSUMED, True),
        (30.0, DeadlineQuality.STATED, True),
        (30.0, DeadlineQuality.ASSUMED, False),
        (30.0, DeadlineQuality.DERIVED, False),
    ],
)
def test_which_notices_are_posted(later_s: float, quality: DeadlineQuality, expected: bool) -> None:
    """A nearer deadline is posted, and a later one if it is stated; an assumed one that moves is not."""
    before = a_notice(deadline_mono_s=100.0)
    moved = replace(before, deadline_mono_s=100.0 + later_s, deadline_quality=quality)
    assert must_post(before, moved, 10.0) is expected
    assert not must_post(before, replace(moved, deadline_mono_s=105.0), 106.0), "has passed"
    assert must_post(None, moved, 10.0)
    assert must_post(replace(before, kind="stop"), moved, 10.0)


def test_unknown_firmware_is_reported(tmp_path: Path) -> None:
    """With sources.cloud = auto and unknown firmware, the status names the sources that are missing."""

    def status(cloud: str = "auto", directory: Path = tmp_path) -> SourceStatus | None:
        return unknown_firmware(cloud, now_mono_s=1.0, dmi_directory=str(directory))

    (tmp_path / "sys_vendor").write_text("Microsoft Corporation\n")
    unknown = status()
    assert unknown is not None
    assert unknown.health is Health.DEGRADED
    assert "Microsoft Corporation" in unknown.reason
    assert "sources.cloud" in unknown.reason
    assert status(directory=tmp_path / "absent") is not None
    assert status("none") is None
    (tmp_path / "sys_vendor").write_text("Amazon EC2")
    assert status() is None


@pytest.mark.fault("N11")
@pytest.mark.parametrize(
    ("local_ahead_s", "fixed_s"),
    [(0.0, 0.0), (0.4, 0.4), (1200.0, 1.0), (-1200.0, 0.0)],
)
def test_the_date_of_the_response_beats_the_local_clock(
    local_ahead_s: float, fixed_s: float
) -> None:
    """The local clock counts only within the second of the server's Date."""
    answer = MetadataResponse(200, {"date": formatdate(NOON, usegmt=True)}, b"")
    fixed = ClockReading(1000.0, NOON + local_ahead_s).by_server_clock(answer)
    assert fixed == ClockReading(1000.0, NOON + fixed_s)


def test_health_has_the_time_of_its_last_change() -> None:
    """Health changes are posted once; a new reason is posted with the old ``since_mono_s``."""
    clock, statuses = Clock(), list[SourceStatus]()

    def post(event: object) -> None:
        assert isinstance(event, SourceChanged)
        statuses.append(event.status)

    health = HealthTracker("aws.spot", blind_after_s=10, monotonic=clock, post=post)
    for at_s, happens in (
        (101, health.ok),
        (102, health.ok),
        (103, lambda: health.failed("one")),
        (104, lambda: health.failed("two")),
        (113, lambda: health.failed("two")),
        (114, lambda: health.failed("one")),
        (115, health.ok),
    ):
        clock.now_s = at_s
        happens()
    assert [(s.health, s.reason, s.since_mono_s) for s in statuses] == [
        (Health.OK, "answers", 101),
        (Health.DEGRADED, "one", 103),
        (Health.DEGRADED, "two", 103),
        (Health.BLIND, "two", 113),
        (Health.BLIND, "one", 113),
        (Health.OK, "answers", 115),
    ]


@pytest.mark.fault("N06")
def test_backoff_doubles_to_its_cap_with_jitter() -> None:
    """Delays double up to the cap, jitter takes at most half, and a success resets them."""
    longest = Backoff(0.25, 1.5, lambda _low, high: high)
    assert [longest.next_s() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    longest.reset()
    assert longest.next_s() == 0.25
    assert Backoff(0.25, 1.5, lambda low, _high: low).next_s() == 0.125
    assert Backoff(5.0, 1.0, lambda _low, high: high).next_s() == 1.0


def test_watch_survives_any_exception() -> None:
    """An unexpected exception degrades the source and does not end it."""
    stop, events, looks = threading.Event(), list[object](), iter((ValueError("odd"), None))

    def look() -> float:
        error = next(looks)
        if error is not None:
            raise error
        stop.set()
        return 0.0

    health = HealthTracker("x", blind_after_s=9, monotonic=lambda: 0.0, post=events.append)
    client = MetadataClient("http://127.0.0.1:1", timeout_s=1)
    watch(look, client=client, health=health, backoff=Backoff(0, 0), stop=stop)
    (event,) = events
    assert isinstance(event, SourceChanged)
    assert event.status.health is Health.DEGRADED
    assert "odd" in event.status.reason


def test_details_fit_one_line() -> None:
    """Control characters and line breaks are removed, and the length is bounded."""
    assert shortened(' {\n\t"a":\x1b[31m 1}\r\n') == '{ "a": [31m 1}'
    assert len(shortened("x" * 1000)) == 200


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "p4d.24xlarge\n"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine\n"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Google"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, "none"),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC"}, "none"),
        ({}, "none"),
    ],
)
def test_firmware_names_the_cloud(tmp_path: Path, files: dict[str, str], cloud: str) -> None:
    """DMI alone names the cloud."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert detect_cloud(str(tmp_path)) == cloud


@pytest.mark.parametrize(
    ("cloud", "kinds"),
    [
        ("aws", [AwsSpotSource, AwsRebalanceSource, AwsAsgSource, AwsScheduledSource]),
        ("gcp", [GcpPreemptedSource, GcpMaintenanceSource, GcpUpcomingSource, GcpStopSource]),
        ("azure", [AzureDeletionSource, AzureScheduledSource]),
        ("none", []),
    ],
)
def test_sources_of_each_cloud(cloud: str, kinds: list[type]) -> None:
    """Each cloud has its sources."""
    sources = open_sources(SourcesConfig(cloud=cloud), DeadlineConfig(), boot_id="b")
    assert [type(source) for source in sources] == kinds
