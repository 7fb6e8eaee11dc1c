# SPDX-License-Identifier: Apache-2.0
"""The uncertainty of a rate that a few events show.  Pure."""

from __future__ import annotations

import math


def poisson_interval(count: int, *, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of the mean of a Poisson distribution, for an observed count (Garwood 1936)."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _mean_where(count - 1, 1 - tail)
    return low, _mean_where(count, tail)


def _mean_where(count: int, probability: float) -> float:
    """The mean for which at most ``count`` events have this probability."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > probability else (low, middle)
    return low


def _at_most(count: int, mean: float) -> float:
    """Probability of at most this number of events."""
    logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
    return min(1.0, math.fsum(math.exp(each) for each in logs))
