# SPDX-License-Identifier: Apache-2.0
"""The health of the store, as it follows from attempts and operations."""

from __future__ import annotations

import pytest
from swansong_bucket.errors import Exists, Permanent, StoreError, Transient
from swansong_bucket.model import Health
from swansongd.core.events import Event, SourceChanged
from swansongd.flush.store_health import FAILING_AFTER_S, StoreHealth

from testkit.staged import Clock
from testkit.waiting import in_threads


class Watched:
    """A StoreHealth, and the events that it posts."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.health = StoreHealth(self.events.append, monotonic=self.clock)

    def attempt(self, took_s: float, error: str = "") -> None:
        began_mono_s = self.clock.now_s
        self.clock.now_s += took_s
        self.health.attempted(began_mono_s, Transient(error) if error else None)

    @property
    def now(self) -> tuple[Health, str] | None:
        last = self.events[-1] if self.events else None
        return (last.status.health, last.status.reason) if isinstance(last, SourceChanged) else None


@pytest.mark.fault("O02")
def test_a_store_that_does_not_answer_is_degraded_after_the_first_attempt() -> None:
    """An attempt that timed out after 8 s suffices; the health does not wait for the end of the retries."""
    watched = Watched()
    watched.attempt(0.1)
    watched.attempt(8.0, "timed out")
    assert watched.now == (Health.DEGRADED, "timed out")
    watched.attempt(0.1)
    assert watched.now == (Health.OK, "answers")


def test_the_age_of_the_last_answer_is_known() -> None:
    """``ok`` is as old as the last answer of the store; a failure is no answer, a refusal is one."""
    watched = Watched()
    assert watched.health.answered_mono_s is None
    watched.attempt(0.1)
    answered_mono_s = watched.clock.now_s
    watched.attempt(0.5, "timed out")
    assert watched.health.answered_mono_s == answered_mono_s
    watched.health.attempted(watched.clock.now_s, Permanent("403"))
    assert watched.health.answered_mono_s == watched.clock.now_s


def test_attempts_that_fail_immediately_count_from_the_first_one() -> None:
    """Refused connections for two seconds make the store degraded, with the first reason."""
    watched = Watched()
    watched.attempt(0.1)
    for number in range(10):
        watched.attempt(0.3, f"part {number}: connection refused")
    assert watched.clock.now_s - 1000 > FAILING_AFTER_S
    assert watched.now == (Health.DEGRADED, "part 0: connection refused")
    assert len(watched.events) == 2, "further attempts change nothing"


def test_a_store_that_throttles_some_requests_is_healthy() -> None:
    """Any number of failures changes nothing while other attempts succeed."""
    watched = Watched()
    for _ in range(50):
        watched.attempt(0.1)
        watched.attempt(1.0, "SlowDown")
    assert len(watched.events) == 1


def test_a_refused_attempt_does_not_change_the_health() -> None:
    """A store that refuses its first request never counts as healthy: the operation reports the refusal."""
    watched = Watched()
    watched.health.attempted(watched.clock.now_s, Permanent("404 NoSuchBucket"))
    assert watched.now is None
    watched.health.failed("claim", "404 NoSuchBucket")
    assert watched.now == (Health.DEGRADED, "404 NoSuchBucket")
    assert len(watched.events) == 1


def test_a_failed_operation_counts_until_the_operation_succeeds() -> None:
    """A store that refuses the flush still answers listings; only a successful flush clears the error."""
    watched = Watched()
    watched.health.failed("flush", "403 AccessDenied")
    watched.attempt(0.1)
    watched.health.ok("commit")
    assert watched.now == (Health.DEGRADED, "403 AccessDenied")
    watched.health.ok("flush")
    assert watched.now == (Health.OK, "answers")


def test_concurrent_reports_end_with_the_last_state() -> None:
    """The store is healthy once the operations of all thirty threads have succeeded."""
    watched = Watched()

    def work(number: int) -> None:
        for _ in range(200):
            watched.health.failed(f"operation {number}", "refused")
            watched.health.attempted(watched.clock.now_s, Transient("x"))
            watched.health.ok(f"operation {number}")

    in_threads(30, work)
    assert watched.now == (Health.OK, "answers")


def test_failed_attempts_are_counted_by_kind() -> None:
    """Each attempt counts, also one of the warmer; a success does not."""
    health = Watched().health
    errors: list[StoreError | None] = [Transient("503"), Permanent("403"), Exists("taken"), None]
    for error in errors:
        health.attempted(0.0, error)
    health.warmed(0.0, Permanent("403"))
    health.warmed(0.0, Transient("503"))
    assert {kind: count for kind, count in health.errors.items() if count} == {
        "transient": 2,
        "refused": 2,
        "exists": 1,
    }
