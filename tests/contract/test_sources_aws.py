# SPDX-License-Identifier: Apache-2.0
"""The source aws.spot against the emulated metadata service, healthy and failing."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Severity
from swansongd.sources.aws import SPOT_PATH, TOKEN_PATH, AwsSpotSource, Imds
from swansongd.sources.metadata import MetadataClient, MetadataUnavailable
from swansongd.sources.polled import PollOptions
from swansongd.sources.source import Clocks

from testkit.emulators.process import EmulatorProcess
from testkit.forked import forked
from testkit.raw_server import Peer, RawServer
from testkit.source_run import SourceRun, asked, control, polls
from testkit.staged import Clock
from testkit.waiting import until

GET_SPOT = f"GET {SPOT_PATH}"
PUT_TOKEN = f"PUT {TOKEN_PATH}"


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.aws_imds", "--v1") as process:
        yield process


@pytest.fixture
def imds(process: EmulatorProcess) -> str:
    for order in ("clear", "withdraw", "invalidate-tokens"):
        control(process.url, order)
    return process.url


def spot(
    url: str,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    **options: float,
) -> AwsSpotSource:
    options = {"timeout_s": 5.0, "blind_after_s": 30.0, **options}
    clocks = Clocks(monotonic=monotonic, wall=wall)
    return AwsSpotSource(
        PollOptions(
            metadata_url=url,
            poll_interval_s=0.05,
            assumed_grace_s=25.0,
            clocks=clocks,
            **options,
        )
    )


@pytest.mark.fault("N09")
def test_notice_is_raised_once_with_its_stated_deadline(imds: str) -> None:
    """All polls raise one notice; its deadline is the stated time on the local clock."""
    with SourceRun(spot(imds)) as run:
        polls(imds, GET_SPOT, 1)
        stated = control(imds, "notice", action="terminate", in_s=90)["time"]
        notice = run.await_notice()
        end = datetime.fromisoformat(stated).timestamp()
        assert abs(notice.deadline_mono_s - time.monotonic() - (end - time.time())) < 1.5
        assert (notice.kind, notice.severity) == ("reclaim", Severity.IMMINENT)
        assert notice.deadline_quality is DeadlineQuality.STATED
        assert "terminate" in notice.detail
        polls(imds, GET_SPOT, 3)
        assert len(run.notices) == 1
    with SourceRun(spot(imds)) as restarted:
        again = restarted.await_notice()
        assert again.identity == notice.identity


@pytest.mark.fault("N03")
def test_401_is_fixed_within_the_poll(imds: str) -> None:
    """A rejected token is replaced and the request retried in the same poll; health stays ok."""
    with SourceRun(spot(imds)) as run:
        polls(imds, GET_SPOT, 2)
        refused = asked(imds, GET_SPOT, "401")
        tokens = asked(imds, PUT_TOKEN)
        control(imds, "invalidate-tokens")
        until(lambda: asked(imds, GET_SPOT, "401") > refused, what="a refusal")
        polls(imds, GET_SPOT, 2)
        assert asked(imds, GET_SPOT, "401") - refused == 1
        assert asked(imds, PUT_TOKEN) - tokens == 1
        assert [status.health for status in run.statuses] == [Health.OK]


def test_token_is_renewed_before_it_ends(imds: str) -> None:
    """A token that expires soon is replaced between polls; after a failure the old one stays in use."""
    clock = Clock(0.0)
    path = "/latest/meta-data/instance-id"
    tokens, refused = asked(imds, PUT_TOKEN), asked(imds, f"GET {path}", "401")
    with MetadataClient(imds, timeout_s=5) as client:
        session = Imds(client, monotonic=clock)
        session.renew_if_due()
        assert session.get(path).status == 200
        for at_s, expected in ((0, 1), (21000, 1), (21310, 2), (21320, 2)):
            clock.now_s = at_s
            session.renew_if_due()
            assert asked(imds, PUT_TOKEN) - tokens == expected
        control(imds, "fault", path=TOKEN_PATH, kind="status", value=503)
        clock.now_s = 21310 + 21310
        session.renew_if_due()
        session.renew_if_due()
        assert asked(imds, PUT_TOKEN) - tokens == 3
        assert session.get(path).status == 200
    assert asked(imds, f"GET {path}", "401") == refused


@pytest.mark.fault("N04")
def test_hop_limit_is_named_and_never_bypassed(imds: str) -> None:
    """PUT times out and GET works: the reason names the fix, and a response without a token is not used.

    The emulator would respond without a token (IMDSv1), even with a notice.
    """
    control(imds, "fault", path="*", kind="refuse-put")
    control(imds, "notice", action="terminate", in_s=60)
    fix = "aws ec2 modify-instance-metadata-options"
    with SourceRun(spot(imds, timeout_s=0.1)) as run:
        until(lambda: run.statuses and fix in run.statuses[-1].reason, what="the fix")
        assert "--http-put-response-hop-limit 2" in run.statuses[-1].reason
        count = len(run.statuses)
        puts = asked(imds, PUT_TOKEN)
        until(lambda: asked(imds, PUT_TOKEN) > puts + 1, what="further attempts")
        assert run.notices == []
        assert len(run.statuses) == count
        control(imds, "clear")
        run.await_notice()


def test_a_slow_token_is_not_taken_for_the_hop_limit(imds: str) -> None:
    """A PUT that needs twice the timeout gets more time: the source is healthy, and no fix is named."""
    control(imds, "fault", path=TOKEN_PATH, kind="delay", value=0.4)
    with SourceRun(spot(imds, timeout_s=0.2)) as run:
        run.await_health(Health.OK)
        assert not [status for status in run.statuses if "hop" in status.reason]


def test_a_slow_service_is_not_blind(imds: str) -> None:
    """Each response needs twice the timeout: the timeout adapts, notices arrive, and health stays ok."""
    with SourceRun(spot(imds, timeout_s=0.1)) as run:
        polls(imds, GET_SPOT, 2)
        control(imds, "fault", path=SPOT_PATH, kind="delay", value=0.2)
        run.await_health(Health.DEGRADED)
        run.await_health(Health.OK)
        before = len(run.statuses)
        polls(imds, GET_SPOT, 4)
        control(imds, "notice", action="terminate", in_s=60)
        run.await_notice()
        assert len(run.statuses) == before


def test_the_timeout_of_an_exchange_is_bounded(imds: str) -> None:
    """It doubles after each timeout, up to its maximum, and falls while responses are fast."""
    limits = []
    with MetadataClient(imds, timeout_s=0.05, timeout_max_s=0.3) as client:
        control(imds, "fault", kind="hang")
        for _ in range(5):
            with pytest.raises(MetadataUnavailable) as refused:
                client.request("GET", SPOT_PATH)
            limits.append(str(refused.value).split()[-2])
        assert limits == ["0.05", "0.1", "0.2", "0.3", "0.3"]
        assert refused.value.is_final
        control(imds, "clear")

        def falls() -> bool:
            with suppress(MetadataUnavailable):  # of a slow machine
                client.request("GET", SPOT_PATH)
            return client._limit_s < 0.3

        until(falls, what="a lower timeout")


@pytest.mark.fault("N11")
def test_without_date_a_clock_that_is_ahead_does_not_end_the_notice(imds: str) -> None:
    """The time seems to have passed, so the assumed one counts; setting the clock changes nothing."""
    ahead_s = [600.0]
    control(imds, "fault", path=SPOT_PATH, kind="bare")
    control(imds, "notice", action="terminate", in_s=110)
    with SourceRun(spot(imds, wall=lambda: time.time() + ahead_s[0])) as run:
        notice = run.await_notice()
        assert notice.deadline_quality is DeadlineQuality.ASSUMED
        assert run.leaves(25.0)
        for wrong_s in (0.0, 3600.0, -3600.0):
            ahead_s[0] = wrong_s
            polls(imds, GET_SPOT, 3)
        assert len(run.notices) == 1


@pytest.mark.fault("N04")
def test_an_unreachable_service_is_not_taken_for_the_hop_limit(imds: str) -> None:
    """If no request gets a response, the reason does not name the hop limit."""
    control(imds, "fault", kind="hang")
    with SourceRun(spot(imds, timeout_s=0.2)) as run:
        run.await_health(Health.DEGRADED)
        assert "hop" not in run.statuses[-1].reason
        assert "0.2 s" in run.statuses[0].reason


@pytest.mark.parametrize("status", [403, 404])
def test_refused_token_is_unknown(imds: str, status: int) -> None:
    """Without a token the state is unknown: IMDSv1 is not tried, and 404 does not mean "no notice"."""
    gets = asked(imds, GET_SPOT)
    control(imds, "fault", path=TOKEN_PATH, kind="status", value=status)
    with SourceRun(spot(imds)) as run:
        run.await_health(Health.DEGRADED, str(status))
    assert asked(imds, GET_SPOT) == gets


@pytest.mark.fault("N07")
def test_a_stalled_response_delays_no_notice(imds: str) -> None:
    """A response that never ends is cut off at the timeout; the next poll brings the notice.

    It sends one byte at a time, each within the timeout, and would last for a minute.
    """
    with SourceRun(spot(imds, timeout_s=0.5)) as run:
        polls(imds, GET_SPOT, 1)
        control(imds, "fault", path=SPOT_PATH, kind="slow", value=0.2, count=1)
        control(imds, "notice", action="terminate", in_s=60)
        run.await_notice()
        assert "0.5 s" in run.statuses[1].reason
        run.await_health(Health.OK)


@pytest.mark.fault("N11")
@pytest.mark.parametrize("skew_s", [1200, -1200])
def test_wrong_local_clock(imds: str, skew_s: int) -> None:
    """With a clock twenty minutes off the deadline is right, and the health names the difference."""
    with SourceRun(spot(imds, wall=lambda: time.time() + skew_s)) as run:
        stated = control(imds, "notice", action="terminate", in_s=90)["time"]
        notice = run.await_notice()
        end = datetime.fromisoformat(stated).timestamp()
        assert abs(notice.deadline_mono_s - time.monotonic() - (end - time.time())) < 2.5
        run.await_health(Health.OK)
        polls(imds, GET_SPOT, 3)
        (status,) = run.statuses
        shown_s = re.search(
            r"(\d+) s (ahead of|behind) the clock of the metadata service", status.reason
        )
        assert shown_s
        assert abs(int(shown_s[1]) - 1200) <= 2
        assert ("ahead of" if skew_s > 0 else "behind") in status.reason


def test_without_date_the_local_clock_decides(imds: str) -> None:
    """A response without Date is judged by the local clock."""
    local = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
    control(imds, "fault", path=SPOT_PATH, kind="bare")
    control(imds, "notice", action="terminate", time="2020-01-01T00:01:00Z")
    with SourceRun(spot(imds, monotonic=lambda: 500.0, wall=lambda: local)) as run:
        notice = run.await_notice()
    assert notice.deadline_mono_s == 560.0


@pytest.mark.fault("S17")
@pytest.mark.parametrize("path", [SPOT_PATH, TOKEN_PATH])
def test_redirects_are_not_followed(imds: str, path: str) -> None:
    """The source follows a redirect neither for a token nor for a value; the state is unknown."""
    with EmulatorProcess("testkit.emulators.aws_imds") as elsewhere:
        control(imds, "fault", path=path, kind="redirect", value=elsewhere.url + SPOT_PATH)
        with SourceRun(spot(imds)) as run:
            run.await_health(Health.DEGRADED, "302")
        assert asked(elsewhere.url, GET_SPOT) == 0


@pytest.mark.fault("S18")
@pytest.mark.parametrize("token", ["a\nb: c", "x" * 2000, "é"])
def test_an_invalid_token_is_refused(imds: str, token: str) -> None:
    """A token that is not safe in a header is not used."""
    control(imds, "fault", path=TOKEN_PATH, kind="body", value=token)
    with (
        MetadataClient(imds, timeout_s=5) as client,
        pytest.raises(MetadataUnavailable, match="invalid token"),
    ):
        Imds(client, monotonic=time.monotonic).get(SPOT_PATH)


@pytest.mark.fault("N01", "N02")
def test_a_service_that_starts_late(imds: str) -> None:
    """While the service is down the source is degraded; it recovers with the service."""
    with EmulatorProcess("testkit.emulators.aws_imds") as first:
        port = first.url.rpartition(":")[2]
    with SourceRun(spot(first.url, blind_after_s=0.3)) as run:
        run.await_health(Health.BLIND, "refused")
        with EmulatorProcess("testkit.emulators.aws_imds", "--port", port):
            run.await_health(Health.OK)
            seen = [status.health for status in run.statuses]
    assert seen == [Health.DEGRADED, Health.BLIND, Health.OK]


def test_stops_during_a_request(imds: str) -> None:
    """A server that does not respond does not delay the end: another thread shuts the connection down."""
    control(imds, "fault", kind="hang")
    hung = asked(imds, PUT_TOKEN, "hang")
    with SourceRun(spot(imds, timeout_s=60)) as run:
        until(lambda: asked(imds, PUT_TOKEN, "hang") > hung, what="the request to hang")
    assert run.events == []


def test_a_service_that_closes_idle_connections_costs_no_failed_poll() -> None:
    """The next request uses a new connection, without an error."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.answer(200, b"value")
        peer.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    with RawServer(script) as server, MetadataClient(server.url, timeout_s=5) as client:
        for _ in range(3):
            closed.clear()
            assert client.request("GET", SPOT_PATH).body == b"value"
            assert closed.wait(60)


def test_failed_requests_leave_no_descriptor_open(imds: str) -> None:
    """A daemon polls for weeks, also on a network that fails."""

    def left_open() -> int:
        before = len(os.listdir("/proc/self/fd"))
        with MetadataClient(imds, timeout_s=0.2) as client:
            for kind in (*["reset"] * 10, "hang"):
                control(imds, "fault", kind=kind, count=1)
                with pytest.raises(MetadataUnavailable):
                    client.request("GET", SPOT_PATH)
        return len(os.listdir("/proc/self/fd")) - before

    assert forked(left_open) == 0


def test_abort_refuses_further_requests(imds: str) -> None:
    """A client that was stopped between two requests sends no further one."""
    with MetadataClient(imds, timeout_s=60) as client:
        Imds(client, monotonic=time.monotonic).get(SPOT_PATH)
        client.abort()
        gets = asked(imds, GET_SPOT)
        with pytest.raises(MetadataUnavailable):
            client.request("GET", SPOT_PATH)
        assert asked(imds, GET_SPOT) == gets
