# SPDX-License-Identifier: Apache-2.0
"""How many parts travel at once: all that may where that pays, few where the processors are the limit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from swansongd.util.concurrency import FIRST, SAMPLE_S, ConcurrencyLimit

CPUS = 4


def driven(
    limit: ConcurrencyLimit,
    rate: Callable[[int], float],
    *,
    busy: Callable[[int], float] = lambda _now: 0.1,
    for_s: float = 3.0,
) -> list[int]:
    """The widths over time on a wire of ``rate`` bytes/s that takes ``busy`` of the processors."""
    mono_s, sent_bytes, cpu_s, said = 100.0, 0.0, 7.0, []
    step_s = 0.05
    for _ in range(round(for_s / step_s)):
        limit.sample(mono_s, int(sent_bytes), cpu_s, CPUS)
        said.append(limit.now)
        mono_s += step_s
        sent_bytes += rate(limit.now) * step_s
        cpu_s += busy(limit.now) * CPUS * step_s
    return said


@pytest.mark.parametrize("most", [32, 20, 5])
def test_where_each_connection_is_held_back_all_of_them_are_used_soon(most: int) -> None:
    """85 MB/s a connection: within a second there is as much as may be, and it stays so."""
    said = driven(ConcurrencyLimit(most), lambda now: 85e6 * now)
    assert said[0] == min(FIRST, most)
    assert set(said[round(1 / 0.05) :]) == {most}


def test_where_the_processors_are_the_limit_it_stays_with_few() -> None:
    """A process that has most of the processors asks for no more connections."""
    assert set(driven(ConcurrencyLimit(32), lambda _now: 1e9, busy=lambda _now: 0.9)) == {FIRST}


def test_what_brought_nothing_is_taken_back() -> None:
    """More connections at the same rate are given up after three looks, and tried again only now and then."""
    said = driven(ConcurrencyLimit(32), lambda _now: 1e9, for_s=20)
    assert max(said) == 2 * FIRST
    assert said.count(FIRST) > 0.8 * len(said)


def test_the_time_that_new_connections_take_is_not_held_against_them() -> None:
    """Nothing more in the first look, because they were being made; then what they bring."""
    changed_at = {FIRST: 0}
    steps = count()

    def rate(now: int) -> float:
        changed_at.setdefault(now, step := next(steps))
        is_making = step - changed_at[now] < 2 * SAMPLE_S / 0.05
        return 85e6 * (now / 2 if is_making and now > FIRST else now)

    assert driven(ConcurrencyLimit(32), rate)[-1] == 32


def test_what_changes_later_is_noticed() -> None:
    """A wire that was the limit at first, and is not any more, is soon used by all."""
    steps = count()
    said = driven(
        ConcurrencyLimit(32), lambda now: 1e9 if next(steps) < 60 else 200e6 * now, for_s=8
    )
    assert max(said[:60]) == 2 * FIRST
    assert said[-1] == 32


def test_what_was_found_outlives_the_count() -> None:
    """Bytes that are counted from nothing again are no fall of the rate."""
    limit = ConcurrencyLimit(32)
    for mono_s, sent_bytes in ((1.0, 0), (1.2, 20_000_000)):
        limit.sample(mono_s, sent_bytes, 0.0, CPUS)
    grown = limit.now
    assert grown > FIRST
    limit.reset_counters()
    for mono_s, sent_bytes in ((1.4, 0), (1.6, 10**7), (1.8, 2 * 10**7), (2.0, 3 * 10**7)):
        limit.sample(mono_s, sent_bytes, 0.0, CPUS)
        assert limit.now >= grown
