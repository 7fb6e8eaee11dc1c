# SPDX-License-Identifier: Apache-2.0
"""The loop of all sources that ask a metadata service."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from swansong_bucket.model import DeadlineQuality, Notice, Severity
from swansong_bucket.util.http1 import http_date

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.observe.health import HealthTracker
from swansongd.sources.metadata import (
    DEFAULT_URL,
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    Backoff,
    MetadataClient,
    MetadataResponse,
    shortened,
    watch,
)
from swansongd.sources.source import Clocks, Post, must_post

CLOCK_SKEW_SHOWN_S = 5.0


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

    def deadline(
        self, stated: datetime | None, assumed_s: float, *, plus_s: float = 0.0
    ) -> tuple[float, DeadlineQuality]:
        """The deadline ``plus_s`` after a stated time, now if it has passed; else after the assumed time."""
        if stated is None:
            return self.mono_s + assumed_s, DeadlineQuality.ASSUMED
        left_s = stated.timestamp() + plus_s - self.wall_s
        quality = DeadlineQuality.STATED if left_s > 0 else DeadlineQuality.DERIVED
        return self.mono_s + max(0.0, left_s), quality


def server_date_s(answer: MetadataResponse) -> float | None:
    """The ``Date`` of a response, in seconds since 1970; None without a valid one."""
    stated = http_date(answer.headers.get("date", ""))
    return None if stated is None else stated.timestamp()


def parse_time(value: object) -> datetime | None:
    """An ISO 8601 instant in UTC, also without a zone; None if it is invalid."""
    try:
        stated = datetime.fromisoformat(value)  # type: ignore[arg-type]  # a wrong type is caught
        return stated.replace(tzinfo=stated.tzinfo or UTC).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def parse_date(text: str) -> datetime | None:
    """An instant such as ``21 Jan 2019 09:00:43 GMT``, or in ISO 8601; None if it is invalid."""
    return http_date(text) or parse_time(text)


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
class PollOptions:
    """Options of one source."""

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

    @property
    def timeout_max_s(self) -> float:
        """The longest timeout of an HTTP exchange."""
        return self.timeout_s * TIMEOUT_MAX_S / TIMEOUT_S

    def backoff(self) -> Backoff:
        """The delays before retries."""
        interval_s = self.poll_interval_s
        return Backoff(interval_s / 4, max(interval_s, min(2 * interval_s, 2.0)))


Poller = Callable[[ClockReading], PollResult]
"""Polls once; the argument is the time of the request.  Raises MetadataUnavailable: the state is unknown."""


class PolledSource(ABC):
    """Polls, posts each notice once, withdraws it, and reports its health."""

    name: str
    cloud: ClassVar[str]
    severity: ClassVar[Severity] = Severity.IMMINENT
    slows_down: ClassVar[bool] = True
    """Whether it polls less often while this VM does not support the source."""
    repeats_at_once: ClassVar[bool] = False
    """Whether it polls at once after a change, because the service holds the request until the next one."""

    def __init__(self, options: PollOptions) -> None:
        self._options = options
        self._monotonic, self._wall = options.clocks.monotonic, options.clocks.wall
        self._live: Notice | None = None
        self.has_earlier = False
        """Whether a notice of an earlier life of the daemon is in force, until the first valid response."""
        self._skew_s = 0.0
        self._lock = threading.Lock()
        """Orders posts of this source."""

    @property
    def interval_s(self) -> float:
        """Shortest time between two polls."""
        return self._options.poll_interval_s

    def run(self, post: Post, stop: threading.Event) -> None:
        """See :class:`~swansongd.sources.source.Source`."""
        options = self._options
        interval_s = self.interval_s
        client = MetadataClient(
            options.metadata_url,
            timeout_s=options.timeout_s,
            timeout_max_s=options.timeout_max_s,
            cloud=self.cloud,
        )
        poll_once = self.poller(client)
        health = HealthTracker(
            self.name,
            blind_after_s=max(options.blind_after_s, 3 * interval_s),
            monotonic=self._monotonic,
            post=post,
        )

        def poll() -> float:
            asked = ClockReading(self._monotonic(), self._wall())
            result = poll_once(asked)
            has_changed = self._post_change(result, post, stop)
            next_s = 0.0 if has_changed and self.repeats_at_once else interval_s
            if result.unsupported and result.notice is None:
                health.unsupported(result.unsupported)
                next_s = max(options.recheck_s, interval_s) if self.slows_down else interval_s
            else:
                health.ok("answers" + self._skew_note(asked, result.answer))
            return max(0.0, asked.mono_s + next_s - self._monotonic())

        watch(poll, client=client, health=health, backoff=options.backoff(), stop=stop)

    @abstractmethod
    def poller(self, client: MetadataClient) -> Poller:
        """The poll of this source over a connection."""

    @classmethod
    def noticed(
        cls,
        kind: str,
        deadline: tuple[float, DeadlineQuality],
        detail: str,
        *,
        identity: str | None = None,
    ) -> Notice:
        """A notice of this source; without an identity it is always the same one."""
        deadline_mono_s, quality = deadline
        return Notice(
            source=cls.name,
            kind=kind,
            identity=cls.name if identity is None else f"{cls.name}:{identity}",
            severity=cls.severity,
            deadline_mono_s=deadline_mono_s,
            deadline_quality=quality,
            detail=shortened(detail),
        )

    def raised(  # noqa: B027 - most sources have nothing to add
        self, notice: Notice, post: Post, stop: threading.Event
    ) -> None:
        """Called after ``notice`` was posted."""

    def _post_change(self, result: PollResult, post: Post, stop: threading.Event) -> bool:
        """Post a new, changed or withdrawn notice; returns whether there was one."""
        live, notice = self._live, result.notice
        has_earlier, self.has_earlier = self.has_earlier, False
        if notice is None:
            if live is None and not has_earlier:
                return False
            with self._lock:
                self._live = None
                post(NoticeWithdrawn(self.name, result.withdrawn_because))
            return live is not None
        if not must_post(live, notice, self._monotonic()):
            return False
        with self._lock:
            self._live = notice
            post(NoticeRaised(notice))
        self.raised(notice, post, stop)
        return True

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
