# SPDX-License-Identifier: Apache-2.0
"""The source gcp.preempted against the emulated metadata server, healthy and failing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Severity
from swansongd.sources.gcp import GcpOptions, GcpPreemptedSource

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import SourceRun, asked, control, polls, woken
from testkit.waiting import until

PATH = "/computeMetadata/v1/instance/preempted"
GET = f"GET {PATH}"
KEY = "instance/preempted"


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.gcp_metadata") as process:
        yield process


@pytest.fixture
def server(process: EmulatorProcess) -> str:
    control(process.url, "dead", after_s=None)
    control(process.url, "clear")
    control(process.url, "set", key=KEY, value="FALSE")
    return process.url


def preempted(
    url: str, *, notice_s: float | None = None, learn_after_s: float = 15.0, **options: Any
) -> GcpPreemptedSource:
    options = {"hang_s": 30, "timeout_s": 40.0, **options}
    made = GcpOptions(
        metadata_url=url, assumed_grace_s=25.0, boot_id="boot-1", poll_interval_s=0.05, **options
    )
    return GcpPreemptedSource(made, notice_s=notice_s, learn_after_s=learn_after_s)


def test_a_change_ends_the_held_request(server: str) -> None:
    """The first request returns immediately; the second is held and returns when the value changes."""
    before = asked(server, GET)
    with SourceRun(preempted(server)) as run:
        run.await_health(Health.OK)
        polls(server, GET, 0)
        until(lambda: asked(server, GET) == before + 2, what="the hanging request")
        control(server, "set", key=KEY, value="TRUE")
        notice = run.await_notice()
        assert asked(server, GET, "200") - before <= 3
        assert (notice.source, notice.kind) == ("gcp.preempted", "reclaim")
        assert notice.identity == "gcp.preempted:boot-1"
        assert notice.severity is Severity.IMMINENT
        assert notice.deadline_quality is DeadlineQuality.ASSUMED
        assert run.leaves(25.0)
        assert [status.health for status in run.statuses] == [Health.OK]


def test_wakeups_without_a_change_are_normal(server: str) -> None:
    """Timeouts and spurious responses change nothing, before the notice and after it."""
    with SourceRun(preempted(server, hang_s=1)) as run:
        polls(server, GET, 2)
        control(server, "touch", key=KEY)
        assert run.notices == []
        control(server, "set", key=KEY, value="TRUE")
        run.await_notice()
        woken(server, KEY)
    assert len(run.notices) == 1
    assert [status.health for status in run.statuses] == [Health.OK]


def test_server_that_does_not_hold_requests_is_not_hammered(server: str) -> None:
    """Immediate responses without a change are requested at an interval."""
    control(server, "fault", path=PATH, kind="body", value="FALSE")
    with SourceRun(preempted(server)) as run:
        run.await_health(Health.OK)
        started, before = time.monotonic(), asked(server, GET)
        polls(server, GET, 5)
        asked_more = asked(server, GET) - before
        assert asked_more <= (time.monotonic() - started) / 0.1 + 2


@pytest.mark.parametrize(
    ("notice_s", "left_s", "quality"),
    [(0.0, 25, DeadlineQuality.ASSUMED), (120.0, 115, DeadlineQuality.DERIVED)],
)
def test_configured_notice(
    server: str, notice_s: float, left_s: float, quality: DeadlineQuality
) -> None:
    """With 120 s configured the deadline is that, less a margin; with 0 s the assumed grace period."""
    before = asked(server, GET)
    with SourceRun(preempted(server, notice_s=notice_s, learn_after_s=0.0, hang_s=1)) as run:
        until(lambda: asked(server, GET) >= before + 2, what="the hanging request")
        control(server, "set", key=KEY, value="TRUE")
        notice = run.await_notice()
        assert run.leaves(left_s)
        assert notice.deadline_quality is quality
        woken(server, KEY)
        assert len(run.notices) == 1, "what is configured is not learned"


def test_long_notice_is_learned(server: str) -> None:
    """A VM that still runs has 120 s: the same notice is posted again, with a later derived deadline."""
    before = asked(server, GET)
    with SourceRun(preempted(server, learn_after_s=0.3)) as run:
        until(lambda: asked(server, GET) == before + 2, what="the hanging request")
        control(server, "set", key=KEY, value="TRUE")
        control(server, "dead", after_s=0.2)  # learning does not need the metadata server
        first, second = until(
            lambda: len(run.notices) == 2 and run.notices, what="the learned notice"
        )
        assert first.identity == second.identity
        assert first.deadline_quality is DeadlineQuality.ASSUMED
        assert second.deadline_quality is DeadlineQuality.DERIVED
        assert 85 < second.deadline_mono_s - first.deadline_mono_s <= 90


def test_nothing_is_learned_of_a_withdrawn_notice(server: str) -> None:
    """The later deadline is not posted if the notice was withdrawn before."""
    with SourceRun(preempted(server, learn_after_s=0.5)) as run:
        run.await_health(Health.OK)
        control(server, "set", key=KEY, value="TRUE")
        run.await_notice()
        control(server, "set", key=KEY, value="FALSE")
        run.await_withdrawal()
        posted_mono_s = time.monotonic()
        until(lambda: time.monotonic() > posted_mono_s + 0.8, what="the time to learn")
        assert len(run.notices) == 1


@pytest.mark.fault("N09")
@pytest.mark.parametrize("notice_s", [None, 120.0])
def test_long_notice_is_not_counted_on_after_a_late_start(
    server: str, notice_s: float | None
) -> None:
    """After the change the rest of the 120 s is unknown, so the short grace period is assumed."""
    control(server, "set", key=KEY, value="TRUE")
    with SourceRun(preempted(server, notice_s=notice_s, learn_after_s=0.0, hang_s=1)) as run:
        notice = run.await_notice()
        assert run.leaves(25.0)
        assert notice.deadline_quality is DeadlineQuality.ASSUMED
        woken(server, KEY)
        assert len(run.notices) == 1


def test_a_change_during_an_outage_is_as_old_as_the_last_false(server: str) -> None:
    """The time since the last FALSE is subtracted from the 120 s."""
    with SourceRun(preempted(server, notice_s=120.0, hang_s=1, timeout_s=2)) as run:
        run.await_health(Health.OK)
        control(server, "fault", path=PATH, kind="status", value=503)
        run.await_health(Health.DEGRADED)
        began_mono_s = time.monotonic()
        control(server, "set", key=KEY, value="TRUE")
        until(lambda: time.monotonic() > began_mono_s + 1, what="a second of outage")
        control(server, "clear")
        notice = run.await_notice()
        assert notice.deadline_mono_s <= began_mono_s + 115


def test_a_key_that_was_never_there(server: str) -> None:
    """404 from the start: unsupported, and requested rarely."""
    control(server, "set", key=KEY, value=None)
    before = asked(server, GET)
    with SourceRun(preempted(server)) as run:
        run.await_health(Health.UNSUPPORTED)
        assert asked(server, GET) == before + 1


def test_a_key_that_vanishes_is_unknown(server: str) -> None:
    """404 after a value withdraws nothing: the source is degraded, and the notice stays in force."""
    control(server, "set", key=KEY, value="TRUE")
    with SourceRun(preempted(server)) as run:
        run.await_notice()
        control(server, "set", key=KEY, value=None)
        run.await_health(Health.DEGRADED)
        assert run.withdrawals == []
