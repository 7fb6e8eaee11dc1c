# SPDX-License-Identifier: Apache-2.0
"""Ends that are known in advance, on clocks that the test sets."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from swansong_bucket.config.values import InvalidValue, utc_instant
from swansong_bucket.model import DeadlineQuality, Health, Notice, Severity
from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.core.events import Event, NoticeRaised, NoticeWithdrawn, SourceChanged
from swansongd.sources.fixed import DeadlineSource
from swansongd.sources.selection import open_sources
from swansongd.sources.source import Clocks

END = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@dataclass
class World:
    """The clocks of a VM, and the events of the source; ``poll`` runs one poll."""

    wall_s: float = 0.0
    mono_s: float = 1000.0
    boot_s: float = 0.0
    events: list[Event] = field(default_factory=list)

    def watch(self, instant: datetime | None, run_s: float | None) -> None:
        (source,) = open_sources(
            SourcesConfig(cloud="none", end_at=instant, max_run_duration_s=run_s, end_lead_s=120.0),
            DeadlineConfig(),
            boot_id="boot",
            clocks=Clocks(
                monotonic=lambda: self.mono_s,
                wall=lambda: self.wall_s,
                since_boot=lambda: self.boot_s,
            ),
        )
        assert source.name == "deadline"
        self.source = source

    def poll(self) -> list[Event]:
        """Events of one poll, without health."""
        before = len(self.events)
        stop = _Once()
        self.source.run(self.events.append, stop)  # type: ignore[arg-type]
        return [e for e in self.events[before:] if not isinstance(e, SourceChanged)]

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.mono_s += seconds
        self.boot_s += seconds

    @property
    def health(self) -> Any:
        return [e.status for e in self.events if isinstance(e, SourceChanged)][-1]


class _Once:
    """A stop event that is set by the first wait."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, _: float) -> bool:
        self._is_set = True
        return True


def only_notice(events: list[Event]) -> Notice:
    (event,) = events
    assert isinstance(event, NoticeRaised)
    return event.notice


def before_end(seconds: float, *, run_s: float | None = None) -> World:
    """A VM that watches its end, at this time before it."""
    world = World(wall_s=END.timestamp() - seconds)
    world.watch(END, run_s)
    return world


def test_a_far_end_is_scheduled_and_a_near_one_imminent() -> None:
    """One identity and one deadline: posted as scheduled, and again when the lead time begins."""
    world = before_end(3600)
    far = only_notice(world.poll())
    assert (far.source, far.kind) == ("deadline", "capacity-end")
    assert (far.severity, far.deadline_quality) == (Severity.SCHEDULED, DeadlineQuality.STATED)
    assert far.deadline_mono_s == pytest.approx(1000 + 3600)
    assert world.health.health is Health.OK
    world.pass_s(3479)
    assert world.poll() == []
    world.pass_s(1)
    near = only_notice(world.poll())
    assert near.severity is Severity.IMMINENT
    assert near.identity == far.identity
    assert near.deadline_mono_s == pytest.approx(far.deadline_mono_s)
    for _ in range(3):
        world.pass_s(100)
        assert world.poll() == []


def test_an_end_in_the_past_is_a_warning_and_not_a_notice() -> None:
    """A setting of an earlier VM causes no evacuation, in any poll."""
    world = before_end(-1)
    for _ in range(3):
        assert world.poll() == []
        world.pass_s(5)
    assert world.health.health is Health.DEGRADED
    assert "sources.end_at, 2026-03-01T12:00:00Z, is in the past" in world.health.reason


def test_an_end_that_is_in_the_future_after_the_clock_was_set_counts() -> None:
    """At the start the clock was ahead, so the end seemed to be in the past."""
    world = before_end(-1000)
    assert world.poll() == []
    world.wall_s -= 2000
    assert only_notice(world.poll()).deadline_mono_s == pytest.approx(2000)
    assert world.health.health is Health.OK


def test_a_clock_set_forward_moves_the_deadline_earlier() -> None:
    """The same notice is posted again."""
    world = before_end(3600)
    first = only_notice(world.poll())
    world.wall_s += 600
    moved = only_notice(world.poll())
    assert moved.identity == first.identity
    assert moved.deadline_mono_s == pytest.approx(1000 + 3000)


def test_a_clock_set_back_withdraws_and_raises_again() -> None:
    """A deadline never moves later, so the wrong notice is withdrawn and a new one raised."""
    world = before_end(60)
    assert only_notice(world.poll()).severity is Severity.IMMINENT
    world.wall_s -= 3600
    withdrawn, raised = world.poll()
    assert withdrawn == NoticeWithdrawn("deadline", "the clock was set back")
    assert isinstance(raised, NoticeRaised)
    assert raised.notice.severity is Severity.SCHEDULED
    assert raised.notice.deadline_mono_s == pytest.approx(1000 + 3660)


def test_a_slewed_clock_posts_nothing() -> None:
    """A change of less than two seconds is not a jump."""
    world = before_end(3600)
    world.poll()
    for step_s in (0.4, -0.9, 0.4):
        world.wall_s += step_s
        assert world.poll() == []


def test_a_vm_that_was_suspended_past_the_end_evacuates() -> None:
    """The monotonic clock stood still during the suspension: the deadline is now."""
    world = before_end(3600)
    world.poll()
    world.wall_s += 3700
    notice = only_notice(world.poll())
    assert notice.severity is Severity.IMMINENT
    assert notice.deadline_mono_s == pytest.approx(1000)
    world.pass_s(5)
    assert world.poll() == []


def test_a_run_time_counts_from_the_boot_with_any_wall_clock() -> None:
    """Its identity contains this boot."""
    world = World(wall_s=5e9, boot_s=600.0)
    world.watch(None, 3600.0)
    notice = only_notice(world.poll())
    assert notice.deadline_mono_s == pytest.approx(1000 + 3000)
    assert notice.identity == "deadline:boot:3600"
    world.wall_s -= 4e9
    assert world.poll() == []


@pytest.mark.parametrize(("run_s", "identity"), [(600.0, "boot"), (7200.0, "2026")])
def test_the_earlier_of_two_ends_counts(run_s: float, identity: str) -> None:
    """One source has one notice."""
    world = before_end(3600, run_s=run_s)
    notice = only_notice(world.poll())
    assert notice.identity.startswith(f"deadline:{identity}")
    assert notice.deadline_mono_s == pytest.approx(1000 + min(run_s, 3600))


def test_the_source_stops_within_a_second() -> None:
    world = before_end(3600)
    assert isinstance(world.source, DeadlineSource)
    stop = threading.Event()
    thread = threading.Thread(target=world.source.run, args=(world.events.append, stop))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "text",
    ["2026-03-01T12:00:00Z", "2026-03-01t13:00:00.000+01:00", "2026-03-01 12:00:00+00:00", END],
)
def test_instants_are_read(text: object) -> None:
    """RFC 3339 as a string, or TOML's date-time; always in UTC."""
    assert utc_instant(text) == END
    assert utc_instant(text).tzinfo is UTC


@pytest.mark.parametrize(
    "value",
    ["2026-03-01T12:00:00", "2026-03-01", "tomorrow", "", "2026-13-01T00:00:00Z", 5, None, True,
     datetime(2026, 3, 1)],  # noqa: DTZ001
)  # fmt: skip
def test_an_invalid_instant_is_refused(value: object) -> None:
    """Above all a time without a zone, because it is ambiguous."""
    with pytest.raises(InvalidValue, match=r"is not a time|has no time zone"):
        utc_instant(value)
