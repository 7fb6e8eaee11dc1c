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
import threading
from abc import abstractmethod
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from swansong_bucket.model import DeadlineQuality, Notice

from swansongd.sources.metadata import (
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
)
from swansongd.sources.polled import (
    ClockReading,
    PolledSource,
    Poller,
    PollOptions,
    PollResult,
    parse_time,
    server_date_s,
)
from swansongd.sources.source import Clock

TOKEN_PATH = "/latest/api/token"  # noqa: S105
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
TOKEN_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"  # noqa: S105
TOKEN_TTL_S = 21600
SPOT_PATH = "/latest/meta-data/spot/instance-action"

NOTICE_S = 120.0
"""Longest time between a spot interruption notice and the end."""

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
    """

    def __init__(
        self,
        client: MetadataClient,
        *,
        monotonic: Clock,
        session: ImdsSession | None = None,
    ) -> None:
        self._client = client
        self._monotonic = monotonic
        self._session = session or ImdsSession()
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
            raise _refused(answer.status)
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
                "PUT", TOKEN_PATH, headers={TOKEN_TTL_HEADER: str(TOKEN_TTL_S)}
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
                    "low for a container",
                    command=f"{_FIX} --http-put-response-hop-limit 2",
                    timed_out=True,
                ) from error
            raise
        if answer.status != 200:
            raise _refused(answer.status, "token request failed: ")
        token = answer.body.decode("latin-1").strip()
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 1024):
            raise MetadataUnavailable("the metadata service returned an invalid token")
        ttl_s = _granted_s(answer) or TOKEN_TTL_S
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


def _refused(status: int, prefix: str = "") -> MetadataUnavailable:
    if 300 <= status < 400:
        return MetadataUnavailable(
            f"{prefix}the metadata service returned a redirect (HTTP {status}), which is not followed"
        )
    if status == 403:
        return MetadataUnavailable(
            f"{prefix}the metadata service returned HTTP 403: it may be disabled",
            command=f"{_FIX} --http-endpoint enabled",
        )
    return MetadataUnavailable(f"{prefix}the metadata service returned HTTP {status}")


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
    # Without another identity: a VM is interrupted once, with any action and time.
    return AwsSpotSource.noticed(
        _KINDS.get(action, "reclaim"),
        (asked.mono_s + grace_s, quality),
        body.decode("utf-8", "replace"),
    )


def _parse(body: bytes) -> tuple[str, datetime | None]:
    """The action, empty if missing, and the stated time in UTC."""
    fields = json_of(body)
    if not isinstance(fields, dict):
        return "", None
    return str(fields.get("action", "")), parse_time(fields.get("time"))


def json_of(body: bytes) -> Any:
    """The value of a JSON text; None if it is not one."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class AwsSource(PolledSource):
    """Base of the sources of AWS.

    Args:
        options: of the source.
        session: shared by all sources of this VM.
    """

    cloud = "aws"

    def __init__(self, options: PollOptions, session: ImdsSession | None = None) -> None:
        super().__init__(options)
        self._session = session or ImdsSession()

    def poller(self, client: MetadataClient) -> Poller:
        imds = Imds(client, monotonic=self._monotonic, session=self._session)
        return partial(self._poll, imds)

    @abstractmethod
    def _poll(self, imds: Imds, asked: ClockReading) -> PollResult:
        """Poll once.

        Raises:
            MetadataUnavailable: the state is unknown.
        """


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
