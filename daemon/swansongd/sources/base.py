# SPDX-License-Identifier: Apache-2.0
"""What a source is: a thread of its own that watches one place for word of the VM's end.

A source holds no policy.  It posts :class:`~swansongd.core.events.NoticeRaised` (again and again for
the same notice if that is simplest: identity makes it idempotent), ``NoticeWithdrawn`` when the place
where it saw the notice says that it is gone, and ``SourceChanged`` when its health changes.  It never
raises out of :meth:`Source.run`, never exits, and takes "could not ask" for *unknown*, not for "no".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from swansongd.core.events import Event, SourceChanged
from swansongd.model import DeadlineQuality, Health, Notice, SourceStatus

Post = Callable[[Event], None]
"""Hands an event to the decision loop.  May block, never raises."""

Clock = Callable[[], float]
"""Seconds of ``time.monotonic`` or of ``time.time``, whichever the parameter is named for."""


class Source(Protocol):
    """One source of notices.  The service runs each in a daemon thread of its own."""

    name: str
    """Glossary name, for example ``aws.spot``."""

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set.  Returns within a second of that, or is abandoned."""


MOVED_S = 2.0
"""A deadline that moves by less is the same: servers name whole seconds, and clocks are slewed."""


def is_news(before: Notice | None, notice: Notice, now_mono_s: float) -> bool:
    """Whether the decision loop has to know of this sighting, after that of ``before``.

    An assumed deadline recedes with each poll, and so does one that has passed: the first sight stands.
    After the VM slept a deadline is nearer than it seemed, and the source may put it off.
    """
    if before is None or (before.identity, before.kind, before.severity) != (
        notice.identity,
        notice.kind,
        notice.severity,
    ):
        return True
    later_s = notice.deadline_mono_s - before.deadline_mono_s
    is_put_off = (
        notice.deadline_quality is DeadlineQuality.STATED and notice.deadline_mono_s > now_mono_s
    )
    return later_s < -MOVED_S or (later_s > MOVED_S and is_put_off)


class HealthTracker:
    """Turns single successes and failures into health, and says so once per change.

    A change of the reason alone is posted too, with the ``since`` of the health that goes on.

    Args:
        source: glossary name of the source.
        blind_after_s: without one good answer for this long the source counts as blind.
        monotonic: the clock.
    """

    def __init__(self, source: str, *, blind_after_s: float, monotonic: Clock, post: Post) -> None:
        self._source = source
        self._blind_after_s = blind_after_s
        self._monotonic = monotonic
        self._post = post
        self._last_good_mono_s = monotonic()
        self._status: SourceStatus | None = None

    def ok(self, reason: str = "answers") -> None:
        """The source answered as it should."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.OK, reason)

    def failed(self, reason: str) -> None:
        """The source could not be asked, or not be understood.

        ``reason`` should be the same words for the same cause: each new wording is posted.
        """
        blind = self._monotonic() - self._last_good_mono_s >= self._blind_after_s
        self._become(Health.BLIND if blind else Health.DEGRADED, reason)

    def degraded(self, reason: str) -> None:
        """The source answers, but something about it is amiss."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.DEGRADED, reason)

    def unsupported(self, reason: str) -> None:
        """The source answered, and says that this VM has no such thing."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.UNSUPPORTED, reason)

    def _become(self, health: Health, reason: str) -> None:
        before = self._status
        if before is not None and (before.health, before.reason) == (health, reason):
            return
        goes_on = before is not None and before.health is health
        self._status = SourceStatus(
            source=self._source,
            health=health,
            reason=reason,
            since_mono_s=before.since_mono_s if before and goes_on else self._monotonic(),
        )
        self._post(SourceChanged(self._status))
