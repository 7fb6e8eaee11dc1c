# SPDX-License-Identifier: Apache-2.0
"""The concurrency limit: high if each connection is slow, low if this process is the bottleneck."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
from swansong_bucket.util.concurrency import FIRST, SAMPLE_S, ConcurrencyLimit

CPUS = 4
STEP_S = 0.05


def driven(
    limit: ConcurrencyLimit,
    rate: Callable[[int], float],
    *,
    busy: Callable[[int], float] = lambda _now: 0.1,
    for_s: float = 3.0,
) -> list[int]:
    """The limits over time, for a link of ``rate`` bytes/s and a CPU share of ``busy``.

    Both are functions of the limit.
    """
    mono_s, sent_bytes, cpu_s, limits = 100.0, 0.0, 7.0, []
    for _ in range(round(for_s / STEP_S)):
        limit.sample(mono_s, int(sent_bytes), cpu_s, CPUS)
        limits.append(limit.now)
        mono_s += STEP_S
        sent_bytes += rate(limit.now) * STEP_S
        cpu_s += busy(limit.now) * CPUS * STEP_S
    return limits


def since_growth(rate: Callable[[int, int], float]) -> Callable[[int], float]:
    """A rate that depends on the limit, and on the number of steps since it has grown."""
    steps = count()
    before, grown_at = FIRST, -10

    def found(now: int) -> float:
        nonlocal before, grown_at
        step = next(steps)
        if now > before:
            grown_at = step
        before = now
        return rate(now, step - grown_at)

    return found


@pytest.mark.parametrize("most", [32, 20, 5])
def test_with_slow_connections_the_limit_reaches_its_maximum_within_a_second(most: int) -> None:
    """Each connection transfers 85 MB/s."""
    limits = driven(ConcurrencyLimit(most), lambda now: 85e6 * now)
    assert limits[0] == min(FIRST, most)
    assert set(limits[round(1 / 0.05) :]) == {most}


def test_with_busy_processors_the_limit_stays_low() -> None:
    assert set(driven(ConcurrencyLimit(32), lambda _now: 1e9, busy=lambda _now: 0.9)) == {FIRST}


def test_a_doubling_without_effect_is_reverted() -> None:
    """If the rate stays the same, the limit returns within a second, and the pauses grow."""
    limits = driven(ConcurrencyLimit(32), lambda _now: 1e9, for_s=20)
    assert max(limits) == 2 * FIRST
    assert limits[-200:].count(FIRST) > 0.75 * 200


def test_the_first_sample_after_a_doubling_may_be_slow() -> None:
    """New connections raise the rate only once they are established."""
    changed_at = {FIRST: 0}
    steps = count()

    def rate(now: int) -> float:
        changed_at.setdefault(now, step := next(steps))
        is_connecting = step - changed_at[now] < 2 * SAMPLE_S / 0.05
        return 85e6 * (now / 2 if is_connecting and now > FIRST else now)

    assert driven(ConcurrencyLimit(32), rate)[-1] == 32


def test_bytes_in_buffers_are_no_gain() -> None:
    """The buffers of new connections take bytes at once, and the link transfers no more of them."""

    def rate(now: int, since_growth: int) -> float:
        return min(85e6 * now, 250e6) * (1.5 if since_growth < SAMPLE_S / STEP_S else 1.0)

    limits = driven(ConcurrencyLimit(32), since_growth(rate), for_s=20)
    assert max(limits) == 8
    assert limits[-200:].count(4) > 0.75 * 200


def test_the_limit_grows_when_the_link_becomes_faster() -> None:
    """The link is the bottleneck for three seconds, and each connection after that."""
    steps = count()
    limits = driven(
        ConcurrencyLimit(32), lambda now: 1e9 if next(steps) < 60 else 200e6 * now, for_s=8
    )
    assert max(limits[:60]) == 2 * FIRST
    assert limits[-1] == 32


def test_a_doubling_counts_if_it_raises_the_mean_rate_of_uneven_samples() -> None:
    """New connections read and digest a chunk for 0.3 s first, and the other samples vary by half."""
    steps = count()

    def rate(now: int, since_growth: int) -> float:
        share = 1.5 if next(steps) // 2 % 2 else 0.5
        return share * 70e6 * (now / 2 if since_growth < 0.3 / STEP_S else now)

    limits = driven(ConcurrencyLimit(32), since_growth(rate), for_s=6)
    assert limits[round(4 / 0.05)] == 32


def test_requests_that_all_wait_for_a_response_need_more_connections() -> None:
    """Chunks leave in bursts, a second apart: each burst is lost on no trial."""
    steps = count()
    limits = driven(
        ConcurrencyLimit(32), lambda now: 170e6 * now if next(steps) % 20 < 2 else 0.0, for_s=10
    )
    assert limits[-1] == 32


def test_another_transfer_begins_with_half_of_the_limit_and_tries_the_doubling_first() -> None:
    limit = ConcurrencyLimit(32)
    driven(limit, lambda now: min(85e6 * now, 16 * 85e6), for_s=4)
    limit.begin()
    assert limit.now == 8
    assert 16 in driven(limit, lambda now: min(85e6 * now, 16 * 85e6), for_s=0.3)
    for _ in range(4):
        limit.begin()
        driven(limit, lambda _now: 1e9, for_s=1.2)
    limit.begin()
    assert limit.now == FIRST


def test_busy_processors_lower_the_limit_of_the_next_transfers() -> None:
    """A limit that was learned on an idle machine does not stay."""
    limit = ConcurrencyLimit(32)
    driven(limit, lambda now: 85e6 * now, for_s=4)
    for expected in (16, 8, 4, FIRST):
        limit.begin()
        assert limit.now == expected
        assert max(driven(limit, lambda _now: 1e9, busy=lambda _now: 0.9, for_s=1.0)) == expected


@pytest.mark.parametrize("for_s", [0.05, 0.15, 0.2])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_small_transfer_halves_nothing(for_s: float, share: float) -> None:
    """It ends before a doubling is judged: a small set, or one that another set interrupts."""
    limit = ConcurrencyLimit(32)
    driven(limit, lambda now: 85e6 * now, for_s=4)
    for _ in range(5):
        limit.begin()
        assert limit.now == 16
        driven(limit, lambda _now: 20e6, busy=lambda _now: share, for_s=for_s)


def test_the_samples_of_a_transfer_may_be_seconds_apart() -> None:
    """The VM was paused, or the last connection waited for a response."""
    limit = ConcurrencyLimit(32)
    for mono_s, sent_bytes in ((100.0, 0), (103.0, 10**9), (106.0, 10**9), (109.0, 2 * 10**9)):
        limit.sample(mono_s, sent_bytes, 0.0, CPUS)
        assert FIRST <= limit.now <= 32


def test_an_evacuation_lifts_the_limit_of_the_background() -> None:
    """For all ends of the trials before: the flush in flight needs more connections within a second."""
    for throttled_steps in range(100, 200, 5):
        steps = count()
        limits = driven(
            ConcurrencyLimit(32),
            lambda now, steps=steps, last=throttled_steps: (
                85e6 * now if next(steps) > last else 5e7
            ),
            for_s=throttled_steps * 0.05 + 1,
        )
        assert max(limits[:throttled_steps]) == 2 * FIRST
        assert limits[-1] >= 16


def test_a_sample_below_the_mean_raises_no_limit() -> None:
    """The rates of a link that two connections fill vary by a seventh."""
    noise = random.Random(5)
    means = []
    for _ in range(20):
        limits = driven(ConcurrencyLimit(32), lambda _now: noise.gauss(1e9, 2e8), for_s=30)
        means.append(sum(limits) / len(limits))
    assert sum(means) / len(means) < 15
