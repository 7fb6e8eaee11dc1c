# SPDX-License-Identifier: Apache-2.0
"""``deadline``: ends that are known in advance, as an instant or as a longest run time since the boot.

Examples are the end of a Capacity Block, a slot of a job queue, and ``max-run-duration`` of an instance.
Each poll computes the time left, so a wall clock that is set later moves the deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from swansong_bucket.model import DeadlineQuality, Notice, Severity

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.observe.health import HealthTracker
from swansongd.sources.source import MOVED_S, Clock, Post, must_post

NAME = "deadline"
_POLL_S = 1.0
_NEVER_BLIND_S = float("inf")


@dataclass(frozen=True, slots=True)
class End:
    """One configured end of this VM."""

    identity: str
    """The same after a restart of the daemon."""
    description: str
    left_s: Callable[[], float]
    """Returns the seconds left."""


def end_at(instant: datetime, *, wall: Clock) -> End:
    """An end at an instant.

    Args:
        instant: with a time zone.
        wall: ``time.time``.
    """
    stamp = instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return End(f"{NAME}:{stamp}", f"sources.end_at, {stamp}", lambda: instant.timestamp() - wall())


def end_after(duration_s: float, *, boot_id: str, since_boot: Clock) -> End:
    """An end some time after the boot.

    Args:
        since_boot: seconds since the boot, including suspension (CLOCK_BOOTTIME).
    """
    return End(
        f"{NAME}:{boot_id}:{duration_s:g}",
        f"sources.max_run_duration_s, {duration_s:g} s after the boot",
        lambda: duration_s - since_boot(),
    )


class DeadlineSource:
    """Raises a notice for the earliest end: scheduled at first, imminent within the lead time.

    Args:
        ends: at least one.
        lead_s: time before the end at which the notice becomes imminent.
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
            self._poll(post, health)
            stop.wait(_POLL_S)

    def _poll(self, post: Post, health: HealthTracker) -> None:
        left_s, end = min(((end.left_s(), end) for end in self._ends), key=lambda pair: pair[0])
        if left_s <= 0 and self._posted is None:
            # Most likely a setting of an earlier VM.
            health.degraded(f"{end.description}, is in the past and raises no notice; correct it")
            return
        health.ok(end.description)
        now_mono_s = self._monotonic()
        notice = Notice(
            source=NAME,
            kind="capacity-end",
            identity=end.identity,
            severity=Severity.IMMINENT if left_s <= self._lead_s else Severity.SCHEDULED,
            deadline_mono_s=now_mono_s + max(0.0, left_s),
            deadline_quality=DeadlineQuality.STATED,
            detail=end.description,
        )
        before = self._posted
        if not must_post(before, notice, now_mono_s):
            return
        if (
            before is not None
            and before.identity == notice.identity
            and notice.deadline_mono_s > before.deadline_mono_s + MOVED_S
        ):
            # Deadlines only move earlier, so a clock that was set back withdraws the notice first.
            post(NoticeWithdrawn(NAME, "the clock was set back"))
        self._posted = notice
        post(NoticeRaised(notice))
