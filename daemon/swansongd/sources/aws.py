# SPDX-License-Identifier: Apache-2.0
"""Amazon's metadata service (IMDSv2 only): the session token, the base of its sources, and ``aws.spot``.

On ``spot/instance-action`` status 404 means that no interruption is planned, and 200 that one is.  Any other
status means unknown.  The service cannot hold a request until a change, so it is polled.  Each source polls
its path over a separate connection, so that a path that hangs delays no other.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from swansong_bucket.model import DeadlineQuality, Notice, Severity

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.observe.health import HealthTracker
from swansongd.sources.base import Clock, Clocks, Post, must_post
from swansongd.sources.metadata import (
    DEFAULT_URL,
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    Backoff,
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
    fallback_url,
    shortened,
    watch,
)

TOKEN_PATH = "/latest/api/token"  # noqa: S105
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
TOKEN_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"  # noqa: S105
TOKEN_TTL_S = 21600
SPOT_PATH = "/latest/meta-data/spot/instance-action"

NOTICE_S = 120.0
"""Longest time between a spot interruption notice and the end."""
CLOCK_SKEW_SHOWN_S = 5.0

ON_DEMAND = "on-demand"

_RENEW_BEFORE_S = 300.0
_RENEW_RETRY_S = 30.0
_KINDS = {"terminate": "reclaim", "stop": "stop", "hibernate": "hibernate"}
_FIX = "aws ec2 modify-instance-metadata-options --instance-id ID"


class ImdsSession:
    """State that the sources of one VM share: the token, and the life cycle of the VM once it is known."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.life_cycle = ""
        """The value of ``instance-life-cycle``, such as ``spot`` or ``on-demand``; empty if unknown."""
        self._renew_mono_s = math.inf
        self._lock = threading.Lock()

    def store_token(self, token: str, renew_mono_s: float) -> None:
        """Use this token from now on, and renew it at that instant."""
        with self._lock:
            self.token, self._renew_mono_s = token, renew_mono_s

    def claim_renewal(self, now_mono_s: float) -> bool:
        """Whether the caller must renew the token now; the next claim succeeds after the retry delay."""
        with self._lock:
            if now_mono_s < self._renew_mono_s:
                return False
            self._renew_mono_s = now_mono_s + _RENEW_RETRY_S
            return True


class Imds:
    """GET requests with the session's token, and the renewal of that token.

    Args:
        client: the connection.
        monotonic: the clock.
        session: shared with the other sources of this VM.
        token_ttl_s: requested lifetime of a token, 1 to 21600 seconds.
    """

    def __init__(
        self,
        client: MetadataClient,
        *,
        monotonic: Clock,
        session: ImdsSession | None = None,
        token_ttl_s: int = TOKEN_TTL_S,
    ) -> None:
        self._client = client
        self._monotonic = monotonic
        self._session = session or ImdsSession()
        self._token_ttl_s = token_ttl_s
        self._hop_limited = False

    def get(self, path: str) -> MetadataResponse:
        """GET; if the token is rejected, retry once with a new one.  Returns 401 if that one is rejected too.

        Raises:
            MetadataUnavailable: no valid response, or no token.
        """
        token = self._session.token
        if token is not None:
            answer = self._ask(path, token)
            if answer.status != 401:
                return answer
        newer = self._session.token  # another source may have renewed it already
        if newer is None or newer == token:
            newer = self._fetch_token()
        return self._ask(path, newer)

    def read(self, path: str) -> MetadataResponse:
        """GET a path whose status is either 200, or 404 for "no value".

        Raises:
            MetadataUnavailable: no valid response, no token, or any other status: the value is *unknown*.
        """
        answer = self.get(path)
        if answer.status not in (200, 404):
            raise MetadataUnavailable(_refusal(answer.status))
        return answer

    def renew_if_due(self) -> None:
        """Replace a token that expires soon.  Call it between polls; a failure is retried later."""
        if self._session.claim_renewal(self._monotonic()):
            with contextlib.suppress(MetadataUnavailable):
                self._fetch_token()

    def _ask(self, path: str, token: str) -> MetadataResponse:
        return self._client.request("GET", path, headers={TOKEN_HEADER: token})

    def _fetch_token(self) -> str:
        asked_mono_s = self._monotonic()
        try:
            answer = self._client.request(
                "PUT", TOKEN_PATH, headers={TOKEN_TTL_HEADER: str(self._token_ttl_s)}
            )
        except MetadataUnavailable as error:
            # A slow token gets the longest timeout before the hop limit is blamed.
            is_hop_limited = error.timed_out and (
                self._hop_limited or (error.is_final and self._answers_without_token())
            )
            if is_hop_limited:
                self._hop_limited = True
                raise MetadataUnavailable(
                    "token request timed out, but the metadata service is reachable: the hop limit is too "
                    f"low for a container; fix it with `{_FIX} --http-put-response-hop-limit 2`",
                    timed_out=True,
                ) from error
            raise
        if answer.status != 200:
            raise MetadataUnavailable(f"token request failed: {_refusal(answer.status)}")
        token = answer.body.decode("latin-1").strip()
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 1024):
            raise MetadataUnavailable("the metadata service returned an invalid token")
        ttl_s = _granted_s(answer) or self._token_ttl_s
        renew_mono_s = asked_mono_s + ttl_s - min(_RENEW_BEFORE_S, ttl_s / 4)
        self._session.store_token(token, renew_mono_s)
        self._hop_limited = False
        return token

    def _answers_without_token(self) -> bool:
        """Whether the service responds at all; only for the diagnosis, the response is not read."""
        try:
            self._client.request("GET", "/latest/meta-data/")
        except MetadataUnavailable:
            return False
        return True


def _granted_s(answer: MetadataResponse) -> int | None:
    text = answer.headers.get(TOKEN_TTL_HEADER.lower(), "")
    granted_s = int(text) if text.isdecimal() and len(text) <= 5 else 0
    return granted_s if 1 <= granted_s <= TOKEN_TTL_S else None


def _refusal(status: int) -> str:
    if 300 <= status < 400:
        return f"the metadata service returned a redirect (HTTP {status}), which is not followed"
    if status == 403:
        return (
            "the metadata service returned HTTP 403: it may be disabled; fix it with "
            f"`{_FIX} --http-endpoint enabled`"
        )
    return f"the metadata service returned HTTP {status}"


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One instant, read from both clocks."""

    mono_s: float
    wall_s: float
    """Seconds since 1970, UTC."""

    def by_server_clock(self, answer: MetadataResponse) -> ClockReading:
        """The same instant by the clock of the server, if the response has a ``Date``.

        ``Date`` has a resolution of one second; within that second the local clock is used.
        """
        date_s = server_date_s(answer)
        if date_s is None:
            return self
        return ClockReading(self.mono_s, min(max(self.wall_s, date_s), date_s + 1))


def server_date_s(answer: MetadataResponse) -> float | None:
    """The ``Date`` of a response, in seconds since 1970; None without a valid one."""
    try:
        return parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return None


def parse_instance_action(body: bytes, asked: ClockReading, assumed_grace_s: float) -> Notice:
    """The notice in the body of ``spot/instance-action``.  Any body is a notice, also an invalid one.

    Args:
        asked: the time of the request.  It is before the server read its clock, so the computed deadline is
            never late, and early by at most the round trip.
        assumed_grace_s: grace period if the body states no valid time.
    """
    action, stated = _parse(body)
    left_s = None if stated is None else stated.timestamp() - asked.wall_s
    if action == "hibernate":
        # Hibernation begins with the notice, whatever time is stated.
        grace_s, quality = 0.0, DeadlineQuality.DERIVED
    elif left_s is None or action not in _KINDS:
        grace_s = assumed_grace_s if left_s is None else min(max(left_s, 0.0), assumed_grace_s)
        quality = DeadlineQuality.ASSUMED
    else:
        grace_s = min(max(left_s, 0.0), NOTICE_S)
        quality = DeadlineQuality.STATED if grace_s == left_s else DeadlineQuality.DERIVED
    return Notice(
        source=AwsSpotSource.name,
        kind=_KINDS.get(action, "reclaim"),
        identity=AwsSpotSource.name,  # a VM is interrupted once, with any action and time
        severity=Severity.IMMINENT,
        deadline_mono_s=asked.mono_s + grace_s,
        deadline_quality=quality,
        detail=shortened(body.decode("utf-8", "replace")),
    )


def _parse(body: bytes) -> tuple[str, datetime | None]:
    """The action, empty if missing, and the stated time in UTC."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(fields, dict):
        return "", None
    return str(fields.get("action", "")), parse_time(fields.get("time"))


def parse_time(value: object) -> datetime | None:
    """An ISO 8601 instant in UTC; None if it is invalid."""
    try:
        stated = datetime.fromisoformat(value)  # type: ignore[arg-type]  # a wrong type is caught
        # AWS means UTC, also without a zone.
        return stated.replace(tzinfo=stated.tzinfo or UTC).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll."""

    answer: MetadataResponse
    notice: Notice | None
    """The notice in force, if any."""
    withdrawn_because: str = "the metadata service no longer shows a notice"
    """The reason of the withdrawal, if an earlier poll had a notice."""
    unsupported: str = ""
    """Why this VM cannot have such a notice; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """Options of all sources of AWS."""

    metadata_url: str = DEFAULT_URL
    assumed_grace_s: float
    """Grace period of a notice that states no time."""
    poll_interval_s: float = 1.0
    timeout_s: float = TIMEOUT_S
    """First timeout of an HTTP exchange; it adapts, up to five times this value."""
    blind_after_s: float = 15.0
    """Time without a valid response, at least three polls, after which the source is blind."""
    recheck_s: float = 60.0
    """Poll interval while this VM does not support the source."""
    clocks: Clocks = field(default_factory=Clocks)
    uniform: Callable[[float, float], float] = random.uniform
    """Random source of the jitter."""


class AwsSource(ABC):
    """Base of the sources: polls, posts each notice once, withdraws it, and reports its health.

    Args:
        options: of all sources.
        session: shared by all sources of this VM.
    """

    name: str
    slows_down: ClassVar[bool] = True
    """Whether it polls less often while this VM does not support the source."""

    def __init__(self, options: AwsOptions, session: ImdsSession | None = None) -> None:
        self._options = options
        self._session = session or ImdsSession()
        self._monotonic, self._wall = options.clocks.monotonic, options.clocks.wall
        self._live: Notice | None = None
        self._skew_s = 0.0

    def run(self, post: Post, stop: threading.Event) -> None:
        """See :class:`~swansongd.sources.base.Source`."""
        options = self._options
        interval_s = options.poll_interval_s
        client = MetadataClient(
            options.metadata_url,
            timeout_s=options.timeout_s,
            timeout_max_s=options.timeout_s * TIMEOUT_MAX_S / TIMEOUT_S,
            fallback_url=fallback_url(options.metadata_url, "aws"),
        )
        imds = Imds(client, monotonic=self._monotonic, session=self._session)
        health = HealthTracker(
            self.name,
            blind_after_s=max(options.blind_after_s, 3 * interval_s),
            monotonic=self._monotonic,
            post=post,
        )

        def poll() -> float:
            asked = ClockReading(self._monotonic(), self._wall())
            result = self._poll(imds, asked)
            self._post_change(result, post)
            next_s = interval_s
            if result.unsupported and result.notice is None:
                health.unsupported(result.unsupported)
                next_s = max(options.recheck_s, interval_s) if self.slows_down else interval_s
            else:
                health.ok("answers" + self._skew_note(asked, result.answer))
            return max(0.0, asked.mono_s + next_s - self._monotonic())

        backoff = Backoff(
            interval_s / 4, max(interval_s, min(2 * interval_s, 2.0)), options.uniform
        )
        watch(poll, client=client, health=health, backoff=backoff, stop=stop)

    @abstractmethod
    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        """Poll once.

        Raises:
            MetadataUnavailable: the state is unknown.
        """

    def _post_change(self, result: PollResult, post: Post) -> None:
        live, notice = self._live, result.notice
        if notice is None:
            if live is not None:
                self._live = None
                post(NoticeWithdrawn(self.name, result.withdrawn_because))
        elif must_post(live, notice, self._monotonic()):
            self._live = notice
            post(NoticeRaised(notice))

    def _skew_note(self, asked: ClockReading, answer: MetadataResponse) -> str:
        skew_s = asked.wall_s - asked.by_server_clock(answer).wall_s
        if abs(skew_s) <= CLOCK_SKEW_SHOWN_S:
            self._skew_s = 0.0
            return ""
        if abs(skew_s - self._skew_s) > CLOCK_SKEW_SHOWN_S:
            # Otherwise the old value stays, so that the reason does not change every second.
            self._skew_s = skew_s
        ahead = "ahead of" if self._skew_s > 0 else "behind"
        return f"; the local clock is {abs(self._skew_s):.0f} s {ahead} the clock of the metadata service"


class AwsSpotSource(AwsSource):
    """``aws.spot``: the spot interruption notice of this VM."""

    name = "aws.spot"
    slows_down = False
    _body = b""

    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        answer = imds.read(SPOT_PATH)
        notice = None
        if answer.status == 200:
            notice = parse_instance_action(
                answer.body, asked.by_server_clock(answer), self._options.assumed_grace_s
            )
            if server_date_s(answer) is None:
                notice = self._by_local_clock(notice, answer.body, asked)
            self._body = answer.body
        return PollResult(answer, notice, unsupported=not_spot(self._session))

    def _by_local_clock(self, notice: Notice, body: bytes, asked: ClockReading) -> Notice:
        """The notice with a deadline by the local clock, which may be wrong and may be set at any time.

        If it puts the notice into the past, the clock is wrong, and the assumed grace period counts.  While
        the body stays the same, the first deadline stays as well.
        """
        if self._live is not None and body == self._body:
            return self._live
        if notice.deadline_mono_s > asked.mono_s or notice.kind == "hibernate":
            return notice
        return replace(
            notice,
            deadline_mono_s=asked.mono_s + self._options.assumed_grace_s,
            deadline_quality=DeadlineQuality.ASSUMED,
        )


def not_spot(session: ImdsSession) -> str:
    """Why this VM gets no spot notices; empty if it may get them."""
    return "this is an on-demand VM" if session.life_cycle == ON_DEMAND else ""
