# SPDX-License-Identifier: Apache-2.0
"""The interface of a source: a thread that watches one place for notices.

A source has no policy.  It posts three events:

- :class:`~swansongd.core.events.NoticeRaised` for a notice; repeats are allowed, because the identity makes
  it idempotent;
- ``NoticeWithdrawn`` when the place where it found the notice no longer shows it;
- ``SourceChanged`` when its health changes.

:meth:`Source.run` never raises and returns only after ``stop``.  A failed request means *unknown*, and never
that there is no notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swansong_bucket.model import DeadlineQuality, Notice

from swansongd.core.events import Event
from swansongd.util import boot

Post = Callable[[Event], None]
"""Passes an event to the decision loop.  May block, never raises."""

Clock = Callable[[], float]
"""Seconds of ``time.monotonic`` or ``time.time``, according to the name of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The clocks of a VM, in seconds."""

    monotonic: Clock = time.monotonic
    wall: Clock = time.time
    """Since 1970, UTC."""
    since_boot: Clock = boot.boottime_s
    """Since the boot, including suspension."""


class Source(Protocol):
    """One source of notices.  The service runs each in a separate daemon thread."""

    name: str
    """Glossary name, for example ``aws.spot``."""

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set; return within a second after that, or the thread is abandoned."""


MOVED_S = 2.0
"""A deadline that moves by less counts as the same: servers state whole seconds, and clocks are slewed."""


def must_post(before: Notice | None, notice: Notice, now_mono_s: float) -> bool:
    """Whether the decision loop needs this notice after ``before``.

    An assumed deadline moves later with each poll, and so does one that has passed: the first one counts.
    After a suspension of the VM the deadline is nearer than before, and the source may postpone it.
    """
    if before is None or (before.identity, before.kind, before.severity) != (
        notice.identity,
        notice.kind,
        notice.severity,
    ):
        return True
    later_s = notice.deadline_mono_s - before.deadline_mono_s
    is_postponed = (
        notice.deadline_quality is DeadlineQuality.STATED and notice.deadline_mono_s > now_mono_s
    )
    return later_s < -MOVED_S or (later_s > MOVED_S and is_postponed)
