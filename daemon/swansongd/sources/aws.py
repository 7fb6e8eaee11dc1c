# SPDX-License-Identifier: Apache-2.0
"""The metadata service of Amazon EC2 (IMDS version 2 only): its token, its sources, and ``aws.spot``.

On ``spot/instance-action`` 404 means that all is well, 200 that the VM will be taken, and everything
else that nobody knows.  The service is polled: it has no way to wait for a change.  Each source polls
its own path over a connection of its own, so that a path that hangs delays no other.
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

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.observe.health import HealthTracker
from swansongd.sources.base import Clock, Clocks, Post, is_news
from swansongd.sources.metadata import (
    DEFAULT_URL,
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    Answer,
    Backoff,
    MetadataClient,
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
"""The most that a spot notice leaves."""
CLOCK_SKEW_SHOWN_S = 5.0

ON_DEMAND = "on-demand"

_RENEW_BEFORE_S = 300.0
_RENEW_RETRY_S = 30.0
_KINDS = {"terminate": "reclaim", "stop": "stop", "hibernate": "hibernate"}
_FIX = "aws ec2 modify-instance-metadata-options --instance-id ID"


class ImdsSession:
    """What the sources of one VM share: the token, and the life cycle of the VM once it is known."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.life_cycle = ""
        """As ``instance-life-cycle`` says: ``spot``, ``on-demand`` ..."""
        self._renew_mono_s = math.inf
        self._lock = threading.Lock()

    def keep(self, token: str, renew_mono_s: float) -> None:
        """From now on use this token; from that instant on it is due to be renewed."""
        with self._lock:
            self.token, self._renew_mono_s = token, renew_mono_s

    def claim_renewal(self, now_mono_s: float) -> bool:
        """Whether the caller shall renew the token; if that fails, it is due again after a while."""
        with self._lock:
            if now_mono_s < self._renew_mono_s:
                return False
            self._renew_mono_s = now_mono_s + _RENEW_RETRY_S
            return True


class Imds:
    """GET with the session's token, and the life of that token.  Never asks without one for an answer.

    Args:
        client: the connection.
        monotonic: the clock.
        session: shared with the other sources of this VM.
        token_ttl_s: life to ask for, 1 to 21600 seconds.
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

    def get(self, path: str) -> Answer:
        """Ask; where the token is refused, ask anew with a new one.  A 401 refused that one as well.

        Raises:
            MetadataUnavailable: no answer, or no token.
        """
        token = self._session.token
        if token is not None:
            answer = self._ask(path, token)
            if answer.status != 401:
                return answer
        newer = self._session.token  # another source may have been refused, and fixed it, already
        if newer is None or newer == token:
            newer = self._fetch_token()
        return self._ask(path, newer)

    def look(self, path: str) -> Answer:
        """An answer that says something: 200, or 404 for "there is nothing".

        Raises:
            MetadataUnavailable: no answer, no token, or any other status: *unknown*.
        """
        answer = self.get(path)
        if answer.status not in (200, 404):
            raise MetadataUnavailable(_refusal(answer.status))
        return answer

    def renew_if_due(self) -> None:
        """Replace a token that is soon to expire.  Call between polls; a failure is tried again later."""
        if self._session.claim_renewal(self._monotonic()):
            with contextlib.suppress(MetadataUnavailable):
                self._fetch_token()

    def _ask(self, path: str, token: str) -> Answer:
        return self._client.request("GET", path, headers={TOKEN_HEADER: token})

    def _fetch_token(self) -> str:
        asked_mono_s = self._monotonic()
        try:
            answer = self._client.request(
                "PUT", TOKEN_PATH, headers={TOKEN_TTL_HEADER: str(self._token_ttl_s)}
            )
        except MetadataUnavailable as error:
            # A token that is merely slow gets more time first.
            is_swallowed = error.timed_out and (
                self._hop_limited or (error.is_final and self._answers_without_token())
            )
            if is_swallowed:
                self._hop_limited = True
                raise MetadataUnavailable(
                    "the metadata service answers, but its token does not arrive: the hop limit is "
                    "too low for a container; fix it with "
                    f"`{_FIX} --http-put-response-hop-limit 2`",
                    timed_out=True,
                ) from error
            raise
        if answer.status != 200:
            raise MetadataUnavailable(f"asked for a token, {_refusal(answer.status)}")
        token = answer.body.decode("latin-1").strip()
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 1024):
            raise MetadataUnavailable("what the metadata service gives for a token is none")
        ttl_s = _granted_s(answer) or self._token_ttl_s
        self._session.keep(token, asked_mono_s + ttl_s - min(_RENEW_BEFORE_S, ttl_s / 4))
        self._hop_limited = False
        return token

    def _answers_without_token(self) -> bool:
        """For diagnosis alone: the answer is not looked at."""
        try:
            self._client.request("GET", "/latest/meta-data/")
        except MetadataUnavailable:
            return False
        return True


def _granted_s(answer: Answer) -> int | None:
    text = answer.headers.get(TOKEN_TTL_HEADER.lower(), "")
    granted_s = int(text) if text.isdecimal() and len(text) <= 5 else 0
    return granted_s if 1 <= granted_s <= TOKEN_TTL_S else None


def _refusal(status: int) -> str:
    if 300 <= status < 400:
        return f"the metadata service redirects (HTTP {status}), which is not followed"
    if status == 403:
        return (
            "the metadata service refuses (HTTP 403): it may be switched off; fix it with "
            f"`{_FIX} --http-endpoint enabled`"
        )
    return f"the metadata service answers HTTP {status}"


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant on both clocks."""

    mono_s: float
    wall_s: float
    """Seconds since 1970, UTC."""

    def fixed(self, answer: Answer) -> Moment:
        """The same instant by the clock of the server, where it shows one.

        ``Date`` names a second; within that second the local clock is believed.
        """
        date_s = server_date_s(answer)
        if date_s is None:
            return self
        return Moment(self.mono_s, min(max(self.wall_s, date_s), date_s + 1))


def server_date_s(answer: Answer) -> float | None:
    """The server's clock as of this answer, in seconds since 1970; None where the answer does not show it."""
    try:
        return parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return None


def read_instance_action(body: bytes, asked: Moment, assumed_grace_s: float) -> Notice:
    """The notice that the body of ``spot/instance-action`` holds, however it is mangled.

    Args:
        asked: when it was asked for.  That lies before the server looked at its clock, so the deadline
            comes out early by the time that the answer took, never late.
        assumed_grace_s: grace period where the body does not say, or not understandably.
    """
    action, stated = _parse(body)
    left_s = None if stated is None else stated.timestamp() - asked.wall_s
    if action == "hibernate":
        # Begins with the notice; the stated time grants nothing.
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
        identity=AwsSpotSource.name,  # a VM is taken once, whatever the action and the time
        severity=Severity.IMMINENT,
        deadline_mono_s=asked.mono_s + grace_s,
        deadline_quality=quality,
        detail=shortened(body.decode("utf-8", "replace")),
    )


def _parse(body: bytes) -> tuple[str, datetime | None]:
    """Action ("" where there is none) and stated time in UTC."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(fields, dict):
        return "", None
    return str(fields.get("action", "")), read_time(fields.get("time"))


def read_time(value: object) -> datetime | None:
    """An instant as the service writes it (ISO 8601), in UTC; None where it cannot be read."""
    try:
        stated = datetime.fromisoformat(value)  # type: ignore[arg-type]  # a wrong type is caught
        # A time without a zone is meant in UTC, as all of them are.
        return stated.replace(tzinfo=stated.tzinfo or UTC).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the service showed."""

    answer: Answer
    notice: Notice | None
    """The live one; None where there is none."""
    gone: str = "the metadata service no longer shows a notice"
    """Why a notice that was there before is withdrawn."""
    missing: str = ""
    """Why this VM has no such source; empty where it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """How the sources of AWS poll."""

    metadata_url: str = DEFAULT_URL
    assumed_grace_s: float
    """Grace period of a notice that does not state its time."""
    poll_interval_s: float = 1.0
    timeout_s: float = TIMEOUT_S
    """Limit of each HTTP exchange at first; it adapts, up to five times as much."""
    blind_after_s: float = 15.0
    """Without an answer for this long, or for three polls, the source is blind."""
    look_again_s: float = 60.0
    """From one poll to the next while this VM seems to have no such source."""
    clocks: Clocks = field(default_factory=Clocks)
    uniform: Callable[[float, float], float] = random.uniform
    """The source of jitter."""


class AwsSource(ABC):
    """Base of the sources: polls, posts each notice once, withdraws it, and reports its health.

    Args:
        options: how it polls.
        session: shared by all sources of this VM.
    """

    name: str
    rests: ClassVar[bool] = True
    """It polls less often while this VM seems to have no such source."""

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

        def look() -> float:
            asked = Moment(self._monotonic(), self._wall())
            seen = self._look(imds, asked)
            self._show(seen, post)
            next_s = interval_s
            if seen.missing and seen.notice is None:
                health.unsupported(seen.missing)
                next_s = max(options.look_again_s, interval_s) if self.rests else interval_s
            else:
                health.ok("answers" + self._skew_words(asked, seen.answer))
            return max(0.0, asked.mono_s + next_s - self._monotonic())

        backoff = Backoff(
            interval_s / 4, max(interval_s, min(2 * interval_s, 2.0)), options.uniform
        )
        watch(look, client=client, health=health, backoff=backoff, stop=stop)

    @abstractmethod
    def _look(self, imds: Imds, asked: Moment) -> Look:
        """Ask once.

        Raises:
            MetadataUnavailable: nothing is known.
        """

    def _show(self, seen: Look, post: Post) -> None:
        live, notice = self._live, seen.notice
        if notice is None:
            if live is not None:
                self._live = None
                post(NoticeWithdrawn(self.name, seen.gone))
        elif is_news(live, notice, self._monotonic()):
            self._live = notice
            post(NoticeRaised(notice))

    def _skew_words(self, asked: Moment, answer: Answer) -> str:
        skew_s = asked.wall_s - asked.fixed(answer).wall_s
        if abs(skew_s) <= CLOCK_SKEW_SHOWN_S:
            self._skew_s = 0.0
            return ""
        if abs(skew_s - self._skew_s) > CLOCK_SKEW_SHOWN_S:
            # Else the old words stand, so that they do not change by the second.
            self._skew_s = skew_s
        ahead = "ahead of" if self._skew_s > 0 else "behind"
        return f"; the local clock is {abs(self._skew_s):.0f} s {ahead} the metadata service's"


class AwsSpotSource(AwsSource):
    """``aws.spot``: the spot interruption notice of this VM."""

    name = "aws.spot"
    rests = False
    _body = b""

    def _look(self, imds: Imds, asked: Moment) -> Look:
        answer = imds.look(SPOT_PATH)
        notice = None
        if answer.status == 200:
            notice = read_instance_action(
                answer.body, asked.fixed(answer), self._options.assumed_grace_s
            )
            if server_date_s(answer) is None:
                notice = self._by_local_clock(notice, answer.body, asked)
            self._body = answer.body
        return Look(answer, notice, missing=not_spot(self._session))

    def _by_local_clock(self, notice: Notice, body: bytes, asked: Moment) -> Notice:
        """Nobody knows how far the local clock is off, and it may be set at any time.

        Where it puts the notice into the past, it is wrong: the assumed grace period counts.  The deadline of
        the first sight stands for as long as the service says the same.
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
    """Why there are no spot notices for this VM; empty if there may be."""
    return "this is an on-demand VM" if session.life_cycle == ON_DEMAND else ""
