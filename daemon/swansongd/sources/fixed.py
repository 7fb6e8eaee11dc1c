# SPDX-License-Identifier: Apache-2.0
"""Ends that are known beforehand: a configured instant, or a longest run time counted from the boot.

The end of a Capacity Block, a job's slot, ``max-run-duration`` of an instance.  The time left is taken
anew at each look, so a wall clock that is set meanwhile moves the deadline with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.observe.health import HealthTracker
from swansongd.sources.base import Clock, Post

NAME = "deadline"
JUMP_S = 1.0
"""A deadline that moves by less is the same one: clocks are slewed."""

_LOOK_S = 1.0
_NEVER_BLIND_S = float("inf")


@dataclass(frozen=True, slots=True)
class End:
    """One end of this VM's time.

    ``identity`` is the same after a restart of the daemon, ``words`` say when, ``left_s`` how long
    it is till then.
    """

    identity: str
    words: str
    left_s: Callable[[], float]


def end_at(instant: datetime, *, wall: Clock) -> End:
    """The end at an instant.

    Args:
        instant: with its time zone.
        wall: ``time.time``.
    """
    stamp = instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return End(f"{NAME}:{stamp}", f"sources.end_at, {stamp}", lambda: instant.timestamp() - wall())


def end_after(duration_s: float, *, boot_id: str, since_boot: Clock) -> End:
    """The end a while after the boot.

    Args:
        since_boot: seconds since the boot, suspension included (CLOCK_BOOTTIME).
    """
    return End(
        f"{NAME}:{boot_id}:{duration_s:g}",
        f"sources.max_run_duration_s, {duration_s:g} s after the boot",
        lambda: duration_s - since_boot(),
    )


class DeadlineSource:
    """Announces the earliest of some known ends: far ahead as scheduled, near as imminent.

    Args:
        ends: at least one.
        lead_s: so long before the end the notice becomes imminent.
        monotonic: the clock.
    """

    name = NAME

    def __init__(self, ends: tuple[End, ...], *, lead_s: float, monotonic: Clock) -> None:
        self._ends = ends
        self._lead_s = lead_s
        self._monotonic = monotonic
        self._posted: Notice | None = None

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set."""
        health = HealthTracker(
            NAME, blind_after_s=_NEVER_BLIND_S, monotonic=self._monotonic, post=post
        )
        while not stop.is_set():
            self._look(post, health)
            stop.wait(_LOOK_S)

    def _look(self, post: Post, health: HealthTracker) -> None:
        left_s, end = min(((end.left_s(), end) for end in self._ends), key=lambda pair: pair[0])
        if left_s <= 0 and self._posted is None:
            # The VM has outlived it already: a setting of an earlier VM, most likely.
            health.degraded(f"{end.words}, lies in the past: no notice comes of it; correct it")
            return
        health.ok(end.words)
        notice = Notice(
            source=NAME,
            kind="capacity-end",
            identity=end.identity,
            severity=Severity.IMMINENT if left_s <= self._lead_s else Severity.SCHEDULED,
            deadline_mono_s=self._monotonic() + max(0.0, left_s),
            deadline_quality=DeadlineQuality.STATED,
            detail=end.words,
        )
        before = self._posted
        if before is not None and before.identity == notice.identity:
            later_s = notice.deadline_mono_s - before.deadline_mono_s
            # Past its end the VM lives on borrowed time: the deadline stays where it was.
            stays = left_s <= 0 or abs(later_s) < JUMP_S
            if stays and notice.severity == before.severity:
                return
            if later_s >= JUMP_S:
                # Deadlines only move earlier; a clock that was set back takes the notice back.
                post(NoticeWithdrawn(NAME, "the clock was set back"))
        self._posted = notice
        post(NoticeRaised(notice))
