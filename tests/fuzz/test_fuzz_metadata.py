# SPDX-License-Identifier: Apache-2.0
"""Any response of a metadata server gives a notice within bounds, or MetadataUnavailable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.model import DeadlineQuality, Notice, Severity
from swansongd.sources.asg import _Unavailable, parse_identity
from swansongd.sources.aws import AwsSource, AwsSpotSource, Imds, ImdsSession, parse_instance_action
from swansongd.sources.aws_events import (
    REBALANCE_S,
    AwsAsgSource,
    AwsRebalanceSource,
    AwsScheduledSource,
    parse_rebalance,
)
from swansongd.sources.azure import AzureDeletionSource, AzureScheduledSource
from swansongd.sources.gcp import GcpOptions, GcpPreemptedSource, GcpSource, KeyWatch, WatchResult
from swansongd.sources.gcp_events import (
    GcpMaintenanceSource,
    GcpStopSource,
    GcpUpcomingSource,
    _instant,
    _seconds,
)
from swansongd.sources.metadata import MetadataResponse, MetadataUnavailable, shortened
from swansongd.sources.polled import ClockReading, PolledSource, PollOptions
from swansongd.sources.source import Clocks

GRACE_S = 25.0
ASKED = ClockReading(1000.0, 1_700_000_000.0)

RFC_2822 = r"[A-Z][a-z]{2}, \d{1,3} [A-Z][a-z]{2} \d{1,5} [\d:]{1,9} [A-Z+-]{0,4}\d{0,6}"
times = st.one_of(
    st.text(max_size=40),
    st.datetimes().map(lambda when: f"{when:%Y-%m-%dT%H:%M:%SZ}"),
    st.datetimes().map(lambda when: f"{when:%d %b %Y %H:%M:%S} GMT"),
    st.from_regex(r"\d{1,5}-\d\d-\d\dT\d\d:\d\d:\d\d([+-]\d\d:\d\d)?", fullmatch=True),
    st.from_regex(RFC_2822, fullmatch=True),
    st.integers().map(str),
)
words = st.sampled_from([
    "terminate", "stop", "hibernate", "active", "[Canceled] x", "completed", "instance-stop", "TRUE",
    "FALSE", "NONE", "Terminated", "InService", "Warmed:Stopped", "TERMINATE_ON_HOST_MAINTENANCE",
    "PENDING_STOP", "\ud800", "", "x" * 5000, "\x1b[31m\n",
])  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), times, words, st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, of any type."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, st.one_of(scalars, values)))


documents = st.one_of(
    values,
    objects("action", "time", "noticeTime"),
    st.lists(
        objects("NotBefore", "NotAfter", "Code", "EventId", "State", "Description"), max_size=4
    ),
    objects(
        "type", "maintenance-status", "windowStartTime", "window_start_time", "startTime", "error"
    ),
    objects("instanceId", "region"),
    st.fixed_dictionaries(
        {
            "Events": st.lists(
                st.fixed_dictionaries(
                    {"EventId": st.text(max_size=300), "EventType": words | st.just("Preempt")},
                    optional={
                        "NotBefore": times,
                        "Resources": st.lists(words, max_size=2),
                        "Description": words,
                        "EventStatus": st.sampled_from(["Scheduled", "Started", 7]),
                    },
                ),
                max_size=4,
            )
        }
    ),
)
bodies = st.one_of(
    st.binary(max_size=300),
    times.map(str.encode),
    words.map(lambda word: word.encode("utf-8", "replace")),
    documents.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda value, cut: json.dumps(value).encode()[:cut], documents, st.integers(0, 200)
    ),
    st.sampled_from([
        b"[" * 9_000,
        b"9" * 9_000,
        b'{"time":' + b"9" * 5000 + b"}",
        b"[{}" + b",{}" * 5000 + b"]",
        b'[{"EventId": "' + b"x" * 9_000 + b'"}]',
    ]),
)  # fmt: skip
names = st.sampled_from(
    ["date", "etag", "metadata-flavor", "x-aws-ec2-metadata-token-ttl-seconds", "retry-after"]
)
headers = st.dictionaries(
    names, st.one_of(times, st.just("Google"), st.text(max_size=200)), max_size=5
)
answers = st.builds(
    MetadataResponse,
    st.one_of(st.sampled_from([200, 404, 401, 503]), st.integers(100, 599)),
    headers,
    bodies,
)


def learnt(call: Callable[[], Any]) -> Any:
    """The result of ``call``; None if it is unknown, for a reason that fits into a log."""
    try:
        return call()
    except MetadataUnavailable as error:
        reason = str(error)
    assert len(reason) < 400
    assert reason.isprintable()
    return None


def expect_bounded(notice: Notice) -> None:
    """Values for state, status and log are short, printable and finite."""
    assert math.isfinite(notice.deadline_mono_s)
    assert notice.deadline_mono_s >= ASKED.mono_s
    for text, limit in ((notice.identity, 300), (notice.detail, 300), (notice.kind, 40)):
        assert len(text) <= limit
        assert text.isprintable()
        text.encode()


class FakeImds:
    """Answers each request with the next of a few responses, cyclically."""

    def __init__(self, given_answers: list[MetadataResponse]) -> None:
        self._answers = given_answers
        self._asked = 0

    def request(self, method: str, path: str, **_: object) -> MetadataResponse:
        self._asked += 1
        return self._answers[self._asked % len(self._answers)]


@given(bodies)
def test_a_mangled_spot_notice_is_still_a_notice(body: bytes) -> None:
    """At most two minutes from now, or the assumed grace period."""
    notice = parse_instance_action(body, ASKED, GRACE_S)
    expect_bounded(notice)
    assert notice.deadline_mono_s <= ASKED.mono_s + 120
    assert notice.identity == "aws.spot", "it contains no time, which may move with each poll"


@pytest.mark.fault("N08", "N14")
@given(bodies)
def test_a_mangled_recommendation_is_still_an_advisory_notice(body: bytes) -> None:
    """Its deadline is far, and its identity is always the same."""
    notice = parse_rebalance(body, ASKED)
    expect_bounded(notice)
    assert (notice.severity, notice.kind) == (Severity.ADVISORY, "rebalance")
    assert notice.deadline_mono_s == ASKED.mono_s + REBALANCE_S
    assert notice.deadline_quality is DeadlineQuality.ASSUMED
    assert notice.identity == "aws.rebalance"


CLOCKS = Clocks(monotonic=lambda: 1000.0, wall=lambda: 1.7e9)
POLLED: list[type[PolledSource]] = [
    *(AwsSpotSource, AwsRebalanceSource, AwsAsgSource, AwsScheduledSource),
    *(AzureDeletionSource, AzureScheduledSource),
]


def polled(kind: type[PolledSource]) -> PolledSource:
    options = PollOptions(assumed_grace_s=GRACE_S, clocks=CLOCKS)
    if issubclass(kind, AwsSource):
        session = ImdsSession()
        session.store_token("token", math.inf)
        return kind(options, session)
    return kind(options)


@given(st.sampled_from(POLLED), st.lists(answers, min_size=1, max_size=5))
def test_every_poll_is_a_result_or_unknown(
    kind: type[PolledSource], given_answers: list[MetadataResponse]
) -> None:
    """Tokens, redirects, refusals and bodies of all kinds, several times in a row."""
    client: Any = FakeImds(given_answers)
    poll = polled(kind).poller(client)
    for _ in range(3):
        seen = learnt(lambda: poll(ASKED))
        if seen is not None:
            assert len(seen.withdrawn_because) < 100
            if seen.notice is not None:
                expect_bounded(seen.notice)


@given(st.lists(answers, min_size=1, max_size=3))
def test_a_token_fits_into_a_header(given_answers: list[MetadataResponse]) -> None:
    """An accepted token is one printable line."""
    sent: list[str] = []
    client: Any = FakeImds(given_answers)
    asked: Callable[..., MetadataResponse] = client.request

    def request(method: str, path: str, **options: Any) -> MetadataResponse:
        sent.extend((options.get("headers") or {}).values())
        return asked(method, path)

    client.request = request
    imds = Imds(client, monotonic=lambda: 1000.0)
    for _ in range(2):
        learnt(lambda: imds.get("/latest/meta-data/"))
    for value in sent:
        assert value.isascii()
        assert value.isprintable()
        assert 0 < len(value) <= 1024


GCP: list[Callable[[], GcpSource]] = [
    lambda kind=kind: kind(GcpOptions(assumed_grace_s=GRACE_S, clocks=CLOCKS, boot_id="b"))
    for kind in (GcpPreemptedSource, GcpMaintenanceSource, GcpUpcomingSource, GcpStopSource)
]


class NoDetails:
    """Replaces the additional requests of a stop."""

    def __init__(self, texts: tuple[str, str]) -> None:
        self._texts = texts

    def __call__(self) -> tuple[object, object]:
        return _seconds(self._texts[0]), _instant(self._texts[1])


@given(st.sampled_from(GCP), st.lists(answers, min_size=1, max_size=3), st.tuples(times, times))
def test_every_value_of_gcp_is_a_notice_or_unknown(
    make: Callable[[], GcpSource], given_answers: list[MetadataResponse], details: tuple[str, str]
) -> None:
    """Each key, each value, after a change or not."""
    source: Any = make()
    source._details = NoDetails(details)
    for number, answer in enumerate(given_answers):
        result = WatchResult(answer, is_change=bool(number % 2))
        notice = learnt(lambda s=result: None if source.is_idle(s) else source.read(s))
        if notice is not None:
            expect_bounded(notice)


@given(st.lists(answers, min_size=1, max_size=4))
def test_the_next_request_to_gcp_is_short(given_answers: list[MetadataResponse]) -> None:
    """It contains the ETag of the last response, if that is short."""
    asked: list[dict[str, str]] = []
    client: Any = FakeImds(given_answers)
    answering: Callable[..., MetadataResponse] = client.request

    def request(method: str, path: str, **options: Any) -> MetadataResponse:
        asked.append(options["params"])
        return answering(method, path)

    client.request = request
    watch = KeyWatch(client, "instance/preempted", hang_s=10)
    for _ in range(3):
        learnt(watch.next)
    for parameters in asked:
        assert len(parameters["last_etag"]) <= 128
        assert parameters["last_etag"].isprintable()


@given(bodies)
def test_an_identity_document_names_the_vm_or_nothing(body: bytes) -> None:
    """The lifecycle hook gets an instance and a region, or retries later."""

    try:
        instance, region = parse_identity(body)
    except _Unavailable:
        return
    assert 0 < len(instance) <= 64
    assert 0 < len(region) <= 64
    assert (instance + region).isascii()


@given(st.text(), st.integers(1, 300))
def test_logged_text_is_one_line(text: str, limit: int) -> None:
    line = shortened(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
