# SPDX-License-Identifier: Apache-2.0
"""Rate limits of events and of log lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swansongd.util.rates import LogLimit, TokenBucket


@given(
    st.floats(1, 100),
    st.floats(0.01, 100),
    st.lists(st.floats(0, 10), min_size=1, max_size=300),
)
def test_no_more_than_the_burst_and_the_rate_are_admitted(
    capacity: float, per_s: float, pauses_s: list[float]
) -> None:
    """For any pauses between the events."""
    bucket = TokenBucket(capacity, per_s)
    now = admitted = 0.0
    for pause_s in pauses_s:
        now += pause_s
        admitted += bucket.take(now)
        assert admitted <= capacity + per_s * (now - pauses_s[0]) + 1e-6


def test_events_at_the_rate_are_always_admitted() -> None:
    bucket = TokenBucket(1, 2.0)
    assert all(bucket.take(number * 0.5) for number in range(1000))


def test_an_event_may_cost_several_tokens() -> None:
    bucket = TokenBucket(10, 1.0)
    assert [bucket.take(0.0, 4.0) for _ in range(3)] == [True, True, False]
    assert bucket.take(0.0, 2.0)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=200))
def test_every_log_line_is_written_or_counted(burst: int, lines: list[tuple[int, float]]) -> None:
    """After a pause, the next line of each kind is written with the number of suppressed lines."""
    limit = LogLimit(burst=burst, interval_s=10.0)
    now = 0.0
    counted: dict[int, int] = {}
    for kind, pause_s in lines:
        now += pause_s
        extra = limit.admit(kind, now)
        if extra is not None:
            counted[kind] = counted.get(kind, 0) + 1 + extra.get("suppressed", 0)
    now += 11.0
    for kind in {kind for kind, _ in lines}:
        extra = limit.admit(kind, now)
        assert extra is not None
        counted[kind] = counted.get(kind, 0) + extra.get("suppressed", 0)
        assert counted[kind] == sum(each == kind for each, _ in lines)


def test_the_number_of_kinds_in_memory_is_limited() -> None:
    """A further kind replaces the least recently seen one."""
    limit = LogLimit(burst=1, interval_s=60.0, kinds_max=10)
    for number in range(1000):
        assert limit.admit(number, 0.0) == {}
        assert limit.admit("often", 0.0) == ({} if number == 0 else None)
    assert len(limit._kinds) == 10
