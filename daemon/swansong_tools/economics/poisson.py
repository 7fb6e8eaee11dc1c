# SPDX-License-Identifier: Apache-2.0
"""The uncertainty of a rate that a few events show.  Pure."""

from __future__ import annotations

import math


def poisson_interval(count: int) -> tuple[float, float]:
    """The exact 95 % interval of the mean of a Poisson distribution, for a count (Garwood 1936)."""
    low = 0.0 if count == 0 else _mean_where(count - 1, 0.975)
    return low, _mean_where(count, 0.025)


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
