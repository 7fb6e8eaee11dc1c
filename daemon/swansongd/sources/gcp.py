# SPDX-License-Identifier: Apache-2.0
"""Google Compute Engine's metadata server: the base of its sources, and ``gcp.preempted``.

The server holds a request until the value differs from the one whose ETag the request names, so a change
arrives within milliseconds.  With ``last_etag=0`` the server responds immediately.  Each watch begins with
such a request; otherwise it would miss a change that has already happened.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from swansong_bucket.model import DeadlineQuality, Notice

from swansongd.core.events import NoticeRaised
from swansongd.sources.metadata import (
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
    shortened,
)
from swansongd.sources.polled import ClockReading, PolledSource, Poller, PollOptions, PollResult
from swansongd.sources.source import Post

LONG_NOTICE_S = 120.0
"""The optional preemption notice of a Spot VM; without that option there is no notice at all."""
LEARN_AFTER_S = 15.0
"""A VM that still runs this long after ``preempted`` became TRUE has the long notice.  Without it, the power
button is pressed at the same moment."""
MARGIN_S = 5.0
"""Subtracted from the long notice: the shutdown that follows it may come slightly early."""

_NO_ETAG = "0"
_ETAG = re.compile(r"[!-~]{1,128}")
"""Checked because it becomes part of the next request."""
_BASE = "/computeMetadata/v1/"
_FLAVOR = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True, slots=True)
class WatchResult:
    """One response about a watched key."""

    answer: MetadataResponse
    is_change: bool
    """The server held the request, so a different value has changed just now."""

    @property
    def text(self) -> str:
        return self.answer.text


class KeyWatch:
    """Watches one metadata key: first its current value, then each change.

    Args:
        client: the connection; its timeout must exceed ``hang_s``.
        key: for example ``instance/preempted``.
        hang_s: seconds after which the server responds even without a change.
        parameters: further parameters of the query.
    """

    def __init__(
        self,
        client: MetadataClient,
        key: str,
        *,
        hang_s: int,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        self._client = client
        self._path = _BASE + key
        self._hang_s = hang_s
        self._parameters = dict(parameters or {})
        self._etag = _NO_ETAG

    def next(self) -> WatchResult:
        """Wait for the next response.  After ``hang_s`` it may have the same value as before.

        After an error, and after any status but 200, the next call requests the current value.

        Raises:
            MetadataUnavailable: no valid response, or one of another server.
        """
        etag, self._etag = self._etag, _NO_ETAG
        parameters = {
            **self._parameters,
            "wait_for_change": "true",
            "last_etag": etag,
            "timeout_sec": str(self._hang_s),
        }
        answer = get(self._client, self._path, parameters)
        if answer.status == 200:
            reported = answer.headers.get("etag", "")
            self._etag = reported if _ETAG.fullmatch(reported) else _NO_ETAG
        return WatchResult(answer, is_change=etag != _NO_ETAG)


def get(
    client: MetadataClient, path: str, parameters: Mapping[str, str] | None = None
) -> MetadataResponse:
    """GET a path; returns a response of any status.

    Raises:
        MetadataUnavailable: no valid response, or one of another server.
    """
    answer = client.request("GET", path, headers=_FLAVOR, params=parameters)
    if answer.headers.get("metadata-flavor") != "Google":
        raise MetadataUnavailable(
            f"HTTP {answer.status} without Metadata-Flavor: the response is not from the metadata server"
        )
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpOptions(PollOptions):
    """Options of all sources of GCP."""

    boot_id: str
    """Part of the identity of each notice."""
    hang_s: int = 10
    """Seconds for which the server may hold a request."""
    timeout_s: float = 12.0
    """First timeout of an HTTP exchange, longer than ``hang_s``; it adapts to a slow server.  A connection
    that is silently lost can delay a notice by this time."""
    blind_after_s: float = 30.0

    @property
    def timeout_max_s(self) -> float:
        """For a slow server: the time that it holds the request, and more time for the exchange."""
        return self.timeout_s + 4 * max(0.0, self.timeout_s - self.hang_s)


class GcpSource(PolledSource):
    """Watches one key of the metadata server.  Subclasses interpret its value.

    If the key was never there (404), the source is unsupported and requests the key once a minute.
    """

    cloud = "gcp"
    repeats_at_once = True
    key: ClassVar[str]
    parameters: ClassVar[Mapping[str, str]] = {}
    pace_s: ClassVar[float] = 1.0
    """Shortest interval of requests to a server that does not hold them."""
    _options: GcpOptions

    @property
    def interval_s(self) -> float:
        return self.pace_s

    def poller(self, client: MetadataClient) -> Poller:
        key = KeyWatch(client, self.key, hang_s=self._options.hang_s, parameters=self.parameters)
        is_known = False

        def poll(_asked: ClockReading) -> PollResult:
            nonlocal is_known
            result = key.next()
            notice = None
            if not self.is_idle(result):
                if result.answer.status == 404 and not is_known:
                    missing = "the metadata server does not have this key"
                    return PollResult(result.answer, None, unsupported=missing)
                if result.answer.status != 200:
                    raise MetadataUnavailable(
                        f"the metadata server returned HTTP {result.answer.status}"
                    )
                notice = self.read(result)
            is_known = True
            over = "the metadata server no longer shows it"
            return PollResult(result.answer, notice, withdrawn_because=over)

        return poll

    @abstractmethod
    def is_idle(self, result: WatchResult) -> bool:
        """Whether this response means that no event is planned."""

    @abstractmethod
    def read(self, result: WatchResult) -> Notice:
        """The notice in a response with status 200 that is not idle.

        Raises:
            MetadataUnavailable: the value is unknown.
        """

    def _deadline(
        self, result: WatchResult, stated: datetime | None, plus_s: float = 0.0
    ) -> tuple[float, DeadlineQuality]:
        """The deadline ``plus_s`` after a time that the value may state."""
        now = ClockReading(self._monotonic(), self._wall()).by_server_clock(result.answer)
        return now.deadline(stated, self._options.assumed_grace_s, plus_s=plus_s)

    def _skew_note(self, asked: ClockReading, answer: MetadataResponse) -> str:  # noqa: ARG002
        return ""  # the server may have held the request


class GcpPreemptedSource(GcpSource):
    """``gcp.preempted``: this Spot VM is being preempted.

    The key states no time.  A Spot VM has a preemption notice of 120 s or none, an option of its creation
    that is not visible inside the VM.  If the configuration does not state it either, the source learns it:
    it first assumes the short grace period.  If the notice is still in force after :data:`LEARN_AFTER_S`, the
    source posts it again, with the same identity, the later deadline and the quality *derived*.  If the
    host has begun a shutdown by then, that is a separate and more severe notice.

    After a restart or an outage the time of the change is unknown.  The source then uses the time of the last
    FALSE; without one it does not count on the long notice.

    Args:
        options: ``assumed_grace_s`` is the time from the first TRUE to the end, without the long notice.
        notice_s: the preemption notice of this VM, 0 or 120; None to learn it.
        learn_after_s: see above.
    """

    name = "gcp.preempted"
    key = "instance/preempted"
    pace_s = 0.2

    def __init__(
        self,
        options: GcpOptions,
        *,
        notice_s: float | None = None,
        learn_after_s: float = LEARN_AFTER_S,
    ) -> None:
        super().__init__(options)
        self._notice_s = notice_s
        self._learn_after_s = learn_after_s
        self._idle_mono_s: float | None = None
        self._preempted_mono_s: float | None = None

    def is_idle(self, result: WatchResult) -> bool:
        idle = result.answer.status == 200 and result.text.upper() == "FALSE"
        if idle:
            self._idle_mono_s = self._monotonic()
        return idle

    def read(self, result: WatchResult) -> Notice:
        if result.text.upper() != "TRUE":
            raise MetadataUnavailable(
                f"preempted is neither TRUE nor FALSE: {shortened(result.text, 60)}"
            )
        now_mono_s = self._monotonic()
        if self._live is None:
            self._preempted_mono_s = now_mono_s if result.is_change else self._idle_mono_s
        deadline = now_mono_s + self._options.assumed_grace_s, DeadlineQuality.ASSUMED
        long_mono_s = self._long_deadline_mono_s() if self._notice_s else None
        if long_mono_s is not None:
            deadline = long_mono_s, DeadlineQuality.DERIVED
        detail = f"preempted is {result.text}"
        return self.noticed("reclaim", deadline, detail, identity=self._options.boot_id)

    def raised(self, notice: Notice, post: Post, stop: threading.Event) -> None:
        if self._notice_s is None and self._long_deadline_mono_s() is not None:
            threading.Thread(
                target=self._learn, args=(notice, post, stop), name="gcp-learn", daemon=True
            ).start()

    def _learn(self, notice: Notice, post: Post, stop: threading.Event) -> None:
        if stop.wait(self._learn_after_s):
            return
        with self._lock:  # a concurrent withdrawal is ordered before or after this, and wins
            deadline_mono_s = self._long_deadline_mono_s()
            if self._live is not notice or deadline_mono_s is None:
                return
            later = replace(
                notice,
                deadline_mono_s=max(deadline_mono_s, notice.deadline_mono_s),
                deadline_quality=DeadlineQuality.DERIVED,
                detail=f"{notice.detail}, and the VM still runs: it has the long notice",
            )
            self._live = later
            post(NoticeRaised(later))

    def _long_deadline_mono_s(self) -> float | None:
        """The end by the long notice; None if the time of the preemption is unknown."""
        if self._preempted_mono_s is None:
            return None
        return self._preempted_mono_s + LONG_NOTICE_S - MARGIN_S
