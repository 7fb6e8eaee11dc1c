# SPDX-License-Identifier: Apache-2.0
"""The sources of Compute Engine against the emulated metadata server: what all of them do, and the events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Notice, Severity
from swansongd.sources.gcp import GcpOptions, GcpPreemptedSource, GcpSource
from swansongd.sources.gcp_events import GcpMaintenanceSource, GcpStopSource, GcpUpcomingSource
from swansongd.sources.source import Clocks

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import SourceRun, asked, control, set_proxies, woken
from testkit.waiting import until

BASE = "/computeMetadata/v1/"
MAINTENANCE = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance"
STOP = "instance/shutdown-details/"
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
KINDS = [GcpPreemptedSource, GcpMaintenanceSource, GcpUpcomingSource, GcpStopSource]
EVENTS: dict[type, tuple[str, str, str | None]] = {
    GcpPreemptedSource: ("instance/preempted", "TRUE", "FALSE"),
    GcpMaintenanceSource: (MAINTENANCE, TERMINATE, "NONE"),
    GcpUpcomingSource: (
        UPCOMING, '{"type": "SCHEDULED", "startTime": "2035-01-01T00:00:00Z"}', "NONE"
    ),
    GcpStopSource: (STOP + "stop-state", "PENDING_STOP", None),
}  # fmt: skip
"""By source: its key, the value of an event, and the idle value."""


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.gcp_metadata") as process:
        yield process


@pytest.fixture
def server(process: EmulatorProcess) -> str:
    control(process.url, "dead", after_s=None)
    control(process.url, "clear")
    for key, _, idle in EVENTS.values():
        control(process.url, "set", key=key, value=idle)
    for name in ("max-duration", "request-timestamp"):
        control(process.url, "set", key=STOP + name, value=None)
    return process.url


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the interval of keys whose requests the server does not hold."""
    for kind in KINDS:
        monkeypatch.setattr(kind, "pace_s", 0.05)


def opened(
    kind: Callable[..., GcpSource], url: str, *, wall_off_s: float = 0.0, **options: Any
) -> SourceRun:
    settings: dict[str, Any] = {
        "assumed_grace_s": 3600.0,
        "boot_id": "boot-1",
        "hang_s": 10,
        "timeout_s": 12.0,
        "poll_interval_s": 0.05,
    }
    clocks = Clocks(wall=lambda: time.time() + wall_off_s)
    return SourceRun(kind(GcpOptions(metadata_url=url, clocks=clocks, **{**settings, **options})))


def left_s(notice: Notice) -> float:
    return notice.deadline_mono_s - time.monotonic()


def utc(in_s: float) -> str:
    return f"{datetime.now(UTC) + timedelta(seconds=in_s):%Y-%m-%dT%H:%M:%SZ}"


# ---------------------------------------------------------------- all of them


@pytest.mark.fault("N09")
@pytest.mark.parametrize("kind", KINDS)
def test_raised_once_and_withdrawn(server: str, kind: type) -> None:
    """An idle value is ok; an event raises the notice once, in all polls; an idle value withdraws it.

    Its identity is the same after a restart of the daemon in this boot.
    """
    key, value, idle = EVENTS[kind]
    with opened(kind, server, hang_s=1) as run:
        run.await_health(Health.OK)
        assert run.notices == []
        control(server, "set", key=key, value=value)
        notice = run.await_notice()
        assert notice.source == kind.name == run.statuses[-1].source
        known = "SCHEDULED" if kind is GcpUpcomingSource else "boot-1"
        assert notice.identity == f"{kind.name}:{known}"
        woken(server, key)
        assert len(run.notices) == 1
        control(server, "set", key=key, value=idle)
        withdrawn = run.await_withdrawal()
        assert withdrawn.source == kind.name


@pytest.mark.fault("N06", "N07", "N16")
@pytest.mark.parametrize(
    ("kind", "fault", "value", "word"),
    [
        (GcpPreemptedSource, "status", 500, "500"),
        (GcpPreemptedSource, "truncate", None, "ended early"),
        (GcpPreemptedSource, "hang", None, "0.5 s"),
        (GcpUpcomingSource, "reset", None, "reset"),
        (GcpStopSource, "stall", None, "0.5 s"),
    ],
)
def test_failures_are_unknown_and_pass(
    server: str, kind: type, fault: str, value: object, word: str
) -> None:
    """No failure raises or withdraws a notice; the health shows it, and recovers.

    The value changes during the failure, so only a request without an ETag finds it.
    """
    key, event, idle = EVENTS[kind]
    control(server, "set", key=key, value=event)
    with opened(kind, server, hang_s=1, timeout_s=0.5) as run:
        run.await_notice()
        control(server, "fault", path=BASE + key, kind=fault, value=value)
        until(lambda: word in "".join(s.reason for s in run.statuses), what="the reason")
        control(server, "set", key=key, value=idle)
        assert run.withdrawals == []
        control(server, "clear")
        run.await_withdrawal()
        run.await_health(Health.OK)


@pytest.mark.fault("N08", "S18")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        *((kind, "BANANA") for kind in KINDS),
        *((GcpUpcomingSource, body) for body in ("[1, 2]", '{"type": "SCHED', "[" * 60000)),
    ],
)
def test_an_unknown_value_is_unknown(server: str, kind: type, body: str) -> None:
    """It neither raises nor withdraws a notice, and its reason is short."""
    control(server, "fault", path=BASE + EVENTS[kind][0], kind="body", value=body)
    with opened(kind, server) as run:
        run.await_health(Health.DEGRADED)
        assert run.notices == []
        assert len(run.statuses[-1].reason) < 300


@pytest.mark.fault("S18")
def test_a_response_of_another_server_is_not_used(server: str) -> None:
    """Without the flavor header a response neither raises nor, with 404, withdraws a notice."""
    key, value, _ = EVENTS[GcpStopSource]
    control(server, "set", key=key, value=value)
    with opened(GcpStopSource, server, hang_s=1) as run:
        run.await_notice()
        control(server, "fault", path=BASE + key, kind="bare")
        run.await_health(Health.DEGRADED, "Metadata-Flavor")
        control(server, "set", key=key, value=None)
        goal = asked(server, f"GET {BASE}{key}", "404") + 2
        until(lambda: asked(server, f"GET {BASE}{key}", "404") >= goal, what="more responses")
        assert run.withdrawals == []


@pytest.mark.fault("S15", "S16", "S17")
def test_no_request_goes_elsewhere(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor a redirect sends a request to the decoy; this source has two clients."""
    key, value, _ = EVENTS[GcpStopSource]
    with EmulatorProcess("testkit.emulators.gcp_metadata") as decoy:
        set_proxies(monkeypatch, decoy.url, "AWS_EC2_METADATA_SERVICE_ENDPOINT")
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, decoy.url.removeprefix("http://"))
        control(server, "set", key=key, value=value)
        with opened(GcpStopSource, server, hang_s=1) as run:
            run.await_notice()
            elsewhere = decoy.url + BASE + key
            control(server, "fault", path=BASE + key, kind="redirect", value=elsewhere)
            until(lambda: "302" in run.statuses[-1].reason, what="the refusal")
        assert asked(decoy.url, f"GET {BASE}{key}") == 0
        assert asked(decoy.url, "connections") == 0


# ---------------------------------------------------------------- gcp.maintenance


@pytest.mark.fault("N18")
@pytest.mark.parametrize("value", [TERMINATE, "SHUTDOWN_ON_HOST_MAINTENANCE"])
def test_host_maintenance_leaves_an_hour(server: str, value: str) -> None:
    """It is scheduled, not imminent: an hour from the change of the key."""
    key = f"GET {BASE}{MAINTENANCE}"
    before = asked(server, key)
    with opened(GcpMaintenanceSource, server) as run:
        until(lambda: asked(server, key) == before + 2, what="the hanging request")
        control(server, "set", key=MAINTENANCE, value=value)
        notice = run.await_notice()
        assert (notice.kind, notice.severity) == ("host-maintenance", Severity.SCHEDULED)
        assert notice.deadline_quality is DeadlineQuality.DERIVED
        assert 3590 < left_s(notice) <= 3600


@pytest.mark.fault("N18")
def test_live_migration_raises_no_notice(server: str) -> None:
    """The VM keeps running; an announced end that becomes a migration is withdrawn."""
    with opened(GcpMaintenanceSource, server) as run:
        control(server, "set", key=MAINTENANCE, value="MIGRATE_ON_HOST_MAINTENANCE")
        run.await_health(Health.OK)
        control(server, "set", key=MAINTENANCE, value=TERMINATE)
        run.await_notice()
        control(server, "set", key=MAINTENANCE, value="MIGRATE_ON_HOST_MAINTENANCE")
        run.await_withdrawal()
    assert len(run.notices) == 1


# ---------------------------------------------------------------- gcp.upcoming


@pytest.mark.parametrize("value", ["NONE", '"NONE"', "{}", '{"error": "no notifications yet"}'])
def test_idle_values(server: str, value: str) -> None:
    """Each idle value is ok, and withdraws an earlier notice."""
    with opened(GcpUpcomingSource, server) as run:
        control(server, "upcoming", in_s=7200)
        run.await_notice()
        control(server, "set", key=UPCOMING, value=value)
        run.await_withdrawal()
        run.await_health(Health.OK)


def test_idle_value_with_status_503(server: str) -> None:
    """An error object with 503 is idle without a notice, and does not withdraw one."""
    answer = {"path": BASE + UPCOMING, "kind": "status", "value": 503}
    control(server, "fault", **answer, body='{"error": "no notifications have been received yet"}')
    with opened(GcpUpcomingSource, server, hang_s=1) as run:
        run.await_health(Health.OK)
        control(server, "clear")
        control(server, "upcoming", in_s=7200)
        run.await_notice()
        control(server, "fault", **answer, body='{"error": "no notifications yet"}')
        run.await_health(Health.DEGRADED)
        assert run.withdrawals == []


@pytest.mark.fault("N11")
@pytest.mark.parametrize(
    ("fields", "wall_off_s"),
    [
        (("type", "maintenance_status", "window_start_time"), 0.0),
        (("type", "maintenanceStatus", "windowStartTime"), 1200.0),
        (("type", "maintenance-status", "window-start-time"), -1200.0),
        (("type", "maintenanceStatus", "startTime"), 0.0),
    ],
)
def test_window_in_every_spelling(server: str, fields: tuple[str, ...], wall_off_s: float) -> None:
    """The deadline is the start of the window by the server's clock, with any local clock."""
    body = dict(zip(fields, ("SCHEDULED", "PENDING", utc(7200)), strict=True))
    control(server, "set", key=UPCOMING, value=json.dumps(body))
    with opened(GcpUpcomingSource, server, wall_off_s=wall_off_s) as run:
        notice = run.await_notice()
        assert (notice.kind, notice.severity) == ("host-maintenance", Severity.SCHEDULED)
        assert notice.deadline_quality is DeadlineQuality.STATED
        assert 7190 < left_s(notice) <= 7201


@pytest.mark.fault("N08", "N10")
@pytest.mark.parametrize(
    ("begin", "most_s", "quality"),
    [
        ("2001-01-01T00:00:00Z", 0, DeadlineQuality.DERIVED),
        ("soon", 3600, DeadlineQuality.ASSUMED),
        (None, 3600, DeadlineQuality.ASSUMED),
        (10**400, 3600, DeadlineQuality.ASSUMED),
    ],
)
def test_a_window_with_an_invalid_start(
    server: str, begin: object, most_s: float, quality: DeadlineQuality
) -> None:
    """A start in the past means now, an invalid one is assumed; both raise a notice."""
    body = json.dumps({"type": "UNSCHEDULED", "windowStartTime": begin})
    control(server, "set", key=UPCOMING, value=body)
    with opened(GcpUpcomingSource, server) as run:
        notice = run.await_notice()
        assert most_s - 10 < left_s(notice) <= most_s
        assert notice.deadline_quality is quality


def test_moved_window_is_the_same_notice(server: str) -> None:
    """A moved window is posted again, with its later deadline and the same identity."""
    with opened(GcpUpcomingSource, server) as run:
        control(server, "upcoming", in_s=7200)
        run.await_notice()
        control(server, "upcoming", in_s=14400)
        first, second = until(lambda: len(run.notices) == 2 and run.notices, what="the second")
        assert first.identity == second.identity
        assert second.deadline_mono_s > first.deadline_mono_s + 7000
        assert run.withdrawals == []


# ---------------------------------------------------------------- gcp.stop


@pytest.mark.parametrize("value", ["", "STOP_STATE_UNSPECIFIED", "UNKNOWN"])
def test_no_stop_is_pending(server: str, value: str) -> None:
    """An unspecified state is idle, as an absent key is."""
    control(server, "set", key=STOP + "stop-state", value=value)
    with opened(GcpStopSource, server) as run:
        run.await_health(Health.OK)
        assert run.notices == []


@pytest.mark.fault("N11")
@pytest.mark.parametrize(
    ("length", "requested", "most_s", "quality"),
    [
        ("600", "rfc3339", 600, DeadlineQuality.STATED),
        ("600s", "epoch", 600, DeadlineQuality.STATED),
        ("600", None, 25, DeadlineQuality.ASSUMED),
        (None, "rfc3339", 25, DeadlineQuality.ASSUMED),
        ("ages", "rfc3339", 25, DeadlineQuality.ASSUMED),
    ],
)
def test_a_requested_stop(
    server: str, length: str | None, requested: str | None, most_s: float, quality: DeadlineQuality
) -> None:
    """The deadline is the time of the request plus the duration if both are known, else assumed."""
    when = {"rfc3339": utc(0), "epoch": str(int(time.time())), None: None}[requested]
    control(server, "set", key=STOP + "max-duration", value=length)
    control(server, "set", key=STOP + "request-timestamp", value=when)
    control(server, "set", key=STOP + "stop-state", value="PENDING_STOP")
    with opened(GcpStopSource, server, assumed_grace_s=25.0, wall_off_s=1200.0) as run:
        notice = run.await_notice()
        assert (notice.kind, notice.severity) == ("stop", Severity.IMMINENT)
        assert most_s - 10 < left_s(notice) <= most_s + 1
        assert notice.deadline_quality is quality


@pytest.mark.fault("N07")
def test_details_that_hang_do_not_delay_the_notice(server: str) -> None:
    """The notice arrives within about a second, with the assumed deadline."""
    control(server, "fault", path=BASE + STOP + "max-duration", kind="hang")
    with opened(GcpStopSource, server, assumed_grace_s=25.0) as run:
        control(server, "stop", in_s=600)
        notice = run.await_notice()
        assert notice.deadline_quality is DeadlineQuality.ASSUMED
        assert left_s(notice) <= 25
