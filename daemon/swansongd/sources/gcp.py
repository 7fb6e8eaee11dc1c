# SPDX-License-Identifier: Apache-2.0
"""How Google Compute Engine is watched, and ``gcp.preempted``; gcp_events.py has the other sources.

The metadata server holds a request until the value differs from the one whose ETag the request names,
so that word arrives within milliseconds.  ``last_etag=0`` names no value and is answered at once: each
watch begins with it, or it would wait in vain for a change that has happened already.
"""

from __future__ import annotations

import random
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.observe.health import HealthTracker
from swansongd.sources.base import Clocks, Post, is_news
from swansongd.sources.metadata import (
    DEFAULT_URL,
    Answer,
    Backoff,
    MetadataClient,
    MetadataUnavailable,
    fallback_url,
    shortened,
    watch,
)

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
LONG_NOTICE_S = 120.0
"""The preemption notice that a Spot VM can be created with; the only other one is none at all."""
LEARN_AFTER_S = 15.0
"""A VM that runs on for so long after the flip has the long notice: otherwise the power key is pressed
together with the flip."""
MARGIN_S = 5.0
"""Kept from the long notice: the shutdown that follows it may come a little early."""

_ASK_AGAIN_S = 60.0
_NO_ETAG = "0"
_ETAG = re.compile(r"[!-~]{1,128}")
"""Goes into the next request, so it is short and printable."""
_BASE = "/computeMetadata/v1/"
_FLAVOR = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True, slots=True)
class Sight:
    """What one answer showed of a key."""

    answer: Answer
    is_fresh: bool
    """The server held the request until now: a value that differs has just changed."""

    @property
    def text(self) -> str:
        return self.answer.body.decode("utf-8", "replace").strip()


class KeyWatch:
    """The value of one metadata key: as it is, then each time that it changes.

    Args:
        client: the connection; its time limit must exceed ``hang_s``.
        key: for example ``instance/preempted``.
        hang_s: the server is asked to answer after this many seconds even without a change.
        parameters: more for the query.
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

    def next(self) -> Sight:
        """Wait for the next word.  The value may be the same as before: that is how waiting ends.

        Raises:
            MetadataUnavailable: no answer, or not from the metadata server.  The next call asks for
                the value as it is, as it does after any status but 200.
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
            told = answer.headers.get("etag", "")
            self._etag = told if _ETAG.fullmatch(told) else _NO_ETAG
        return Sight(answer, is_fresh=etag != _NO_ETAG)


def get(client: MetadataClient, path: str, parameters: Mapping[str, str] | None = None) -> Answer:
    """Ask once; any status is an answer, if only it comes from the metadata server.

    Raises:
        MetadataUnavailable: no answer, or somebody else's.
    """
    answer = client.request("GET", path, headers=_FLAVOR, params=parameters)
    if answer.headers.get("metadata-flavor") != "Google":
        raise MetadataUnavailable(
            f"who answers (HTTP {answer.status}) is not the metadata server: no Metadata-Flavor"
        )
    return answer


def read_boot_id(path: str = BOOT_ID_PATH) -> str:
    """Identity of this boot of the VM; ``unknown`` where the kernel does not tell."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip() or "unknown"
    except OSError:
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpOptions:
    """How the sources of GCP watch."""

    metadata_url: str = DEFAULT_URL
    grace_s: float
    """Grace period of a notice that does not state its time."""
    boot_id: str = field(default_factory=read_boot_id)
    """Part of the identity of each notice."""
    hang_s: int = 10
    """How long the server is asked to hold a request, in whole seconds."""
    timeout_s: float = 12.0
    """Limit of each HTTP exchange, more than ``hang_s``; it adapts to a slow server.  A connection that
    broke without a sign can hide a notice for this long."""
    retry_cap_s: float = 2.0
    """The longest wait before the next request after a failure."""
    blind_after_s: float = 30.0
    """Without an answer for this long the source is blind."""
    clocks: Clocks = field(default_factory=Clocks)
    uniform: Callable[[float, float], float] = random.uniform
    """The source of jitter."""


class GcpSource(ABC):
    """Watches one key of the metadata server in a thread.  Subclasses interpret its value.

    A key that was never there (404) makes the source unsupported, and is asked for again every minute.
    """

    name: str
    key: ClassVar[str]
    parameters: ClassVar[Mapping[str, str]] = {}
    pace_s: ClassVar[float] = 1.0
    """Shortest interval of requests to a server that ends each hanging request without a change."""

    def __init__(self, options: GcpOptions) -> None:
        self._options = options
        self._monotonic, self._wall = options.clocks.monotonic, options.clocks.wall
        self._identity = f"{self.name}:{options.boot_id}"
        self._lock = threading.Lock()
        self._live: Notice | None = None

    def run(self, post: Post, stop: threading.Event) -> None:
        """See :class:`~swansongd.sources.base.Source`."""
        # A slow server needs more than the time for which it holds the request.
        options = self._options
        slack_s = options.timeout_s - options.hang_s
        client = MetadataClient(
            options.metadata_url,
            timeout_s=options.timeout_s,
            timeout_max_s=options.timeout_s + 4 * max(0.0, slack_s),
            fallback_url=fallback_url(options.metadata_url, "gcp"),
        )
        key = KeyWatch(client, self.key, hang_s=options.hang_s, parameters=self.parameters)
        health = HealthTracker(
            self.name, blind_after_s=options.blind_after_s, monotonic=self._monotonic, post=post
        )
        is_known = False

        def look() -> float:
            nonlocal is_known
            asked_mono_s = self._monotonic()
            sight = key.next()
            if sight.answer.status == 404 and not is_known and not self.is_idle(sight):
                health.unsupported("this VM has no such key")
                return _ASK_AGAIN_S
            if self.is_idle(sight):
                notice = None
            elif sight.answer.status == 200:
                notice = self.read(sight)
            else:
                raise MetadataUnavailable(f"the metadata server answers HTTP {sight.answer.status}")
            is_known = True
            changed = self._settle(notice, post, stop)
            health.ok()
            return 0.0 if changed else max(0.0, asked_mono_s + self.pace_s - self._monotonic())

        backoff = Backoff(min(0.2, options.retry_cap_s), options.retry_cap_s, options.uniform)
        watch(look, client=client, health=health, backoff=backoff, stop=stop)

    @abstractmethod
    def is_idle(self, sight: Sight) -> bool:
        """Whether this answer says that nothing is ahead."""

    @abstractmethod
    def read(self, sight: Sight) -> Notice | None:
        """The notice in an answer with status 200 that is not idle; None where it announces no end.

        Raises:
            MetadataUnavailable: it cannot be understood.
        """

    def raised(  # noqa: B027 - most sources have nothing to add
        self, notice: Notice, post: Post, stop: threading.Event
    ) -> None:
        """Called after ``notice`` was posted."""

    def _settle(self, notice: Notice | None, post: Post, stop: threading.Event) -> bool:
        """Post what is new; whether anything was."""
        before = self._live
        if notice is None and before is None:
            return False
        if notice is not None and not is_news(before, notice, self._monotonic()):
            return False
        with self._lock:
            self._live = notice
            if notice is None:
                post(NoticeWithdrawn(self.name, "the metadata server no longer shows it"))
            else:
                post(NoticeRaised(notice))
        if notice is not None:
            self.raised(notice, post, stop)
        return True


class GcpPreemptedSource(GcpSource):
    """``gcp.preempted``: this Spot VM is being taken.

    The key says that, not when: a Spot VM has 120 s or none, by how it was created, and nothing inside
    it tells which.  Where the configuration does not say either it is learned: the short grace period
    is assumed at first; a notice that is still live after :data:`LEARN_AFTER_S` is posted once more,
    with the same identity, the later deadline and quality *derived*.  A shutdown by the host that has
    begun by then is a notice of its own, more severe than this one.

    Where the flip was not seen as it happened (a restart, an outage) it is taken to be as old as the
    last FALSE; where there was none the long notice is not counted on.

    Args:
        options: ``grace_s`` is the time from the first sight to the end, without the long notice.
        notice_s: the preemption notice that the VM was created with, 0 or 120; None to learn it.
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
        self._flipped_mono_s: float | None = None

    def is_idle(self, sight: Sight) -> bool:
        idle = sight.answer.status == 200 and sight.text.upper() == "FALSE"
        if idle:
            self._idle_mono_s = self._monotonic()
        return idle

    def read(self, sight: Sight) -> Notice:
        if sight.text.upper() != "TRUE":
            raise MetadataUnavailable(
                f"preempted is neither TRUE nor FALSE: {shortened(sight.text, 60)}"
            )
        now_mono_s = self._monotonic()
        if self._live is None:
            self._flipped_mono_s = now_mono_s if sight.is_fresh else self._idle_mono_s
        stated_mono_s = self._long_deadline_mono_s() if self._notice_s else None
        return Notice(
            source=self.name,
            kind="reclaim",
            identity=self._identity,
            severity=Severity.IMMINENT,
            deadline_mono_s=(
                now_mono_s + self._options.grace_s if stated_mono_s is None else stated_mono_s
            ),
            deadline_quality=(
                DeadlineQuality.ASSUMED if stated_mono_s is None else DeadlineQuality.DERIVED
            ),
            detail=f"preempted is {sight.text}",
        )

    def raised(self, notice: Notice, post: Post, stop: threading.Event) -> None:
        if self._notice_s is None and self._long_deadline_mono_s() is not None:
            threading.Thread(
                target=self._learn, args=(notice, post, stop), name="gcp-learn", daemon=True
            ).start()

    def _learn(self, notice: Notice, post: Post, stop: threading.Event) -> None:
        if stop.wait(self._learn_after_s):
            return
        with self._lock:  # a withdrawal comes before this or after it, and stands
            deadline_mono_s = self._long_deadline_mono_s()
            if self._live is not notice or deadline_mono_s is None:
                return
            later = replace(
                notice,
                deadline_mono_s=max(deadline_mono_s, notice.deadline_mono_s),
                deadline_quality=DeadlineQuality.DERIVED,
                detail=f"{notice.detail}, and the VM runs on: it has the long notice",
            )
            self._live = later
            post(NoticeRaised(later))

    def _long_deadline_mono_s(self) -> float | None:
        """The end by the long notice; None where nobody knows when the flip was."""
        if self._flipped_mono_s is None:
            return None
        return self._flipped_mono_s + LONG_NOTICE_S - MARGIN_S
