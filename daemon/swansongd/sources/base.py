# SPDX-License-Identifier: Apache-2.0
"""What a source is: a thread of its own that watches one place for word of the VM's end.

A source holds no policy.  It posts :class:`~swansongd.core.events.NoticeRaised` (again and again for
the same notice if that is simplest: identity makes it idempotent), ``NoticeWithdrawn`` when the place
where it saw the notice says that it is gone, and ``SourceChanged`` when its health changes.  It never
raises out of :meth:`Source.run`, never exits, and takes "could not ask" for *unknown*, not for "no".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swansongd.core.events import Event
from swansongd.model import DeadlineQuality, Notice

Post = Callable[[Event], None]
"""Hands an event to the decision loop.  May block, never raises."""

Clock = Callable[[], float]
"""Seconds of ``time.monotonic`` or of ``time.time``, whichever the parameter is named for."""


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The clocks of a VM, in seconds."""

    monotonic: Clock = time.monotonic
    wall: Clock = time.time
    """Since 1970, UTC."""
    since_boot: Clock = _since_boot_s
    """Counts the time for which the VM was suspended."""


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
