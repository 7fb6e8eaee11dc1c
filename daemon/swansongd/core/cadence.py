# SPDX-License-Identifier: Apache-2.0
"""How often a periodic checkpoint pays: seldom enough to train, often enough to lose little.

What is lost without any notice is half an interval on average; what is paid is the time for which each
checkpoint holds training up.  Young found the interval at which the sum of the two is least (J. W. Young,
"A first order approximation to the optimum checkpoint interval", Communications of the ACM 17, 1974), and
Daly the terms that count when a checkpoint is not cheap beside the time between interruptions (J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006).

An interruption whose evacuation ended SAFE lost nothing, so it does not count: the mean time between
interruptions is that between those that nothing was saved for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swansong import bounds

INTERVAL_MIN_S = 60.0
"""Never more often than this by the formula: a save costs more than the time that it holds up the loop."""


@dataclass(frozen=True, slots=True)
class History:
    """What the bucket tells of the run's earlier VMs."""

    observed_s: float = 0.0
    """How long the run has been watched: from its first claim to our own."""
    uncovered: int = 0
    """Interruptions in that time without a SAFE farewell."""


def optimum_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Daly's interval: training time from the end of one checkpoint to the beginning of the next.

    Args:
        save_cost_s: how long one checkpoint holds training up.
        mtbf_s: mean time between interruptions; positive.
    """
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * save_cost_s * mtbf_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def expected_mtbf_s(prior_s: float, history: History) -> float:
    """Mean time between uncovered interruptions; the prior counts like one seen after ``prior_s``."""
    observed_s = min(max(0.0, history.observed_s), bounds.SECONDS_MAX)
    return (prior_s + observed_s) / (1 + max(0, history.uncovered))


def interval_s(*, save_cost_s: float | None, store_s: float, mtbf_s: float) -> float:
    """Training time between two periodic checkpoints.

    Args:
        save_cost_s: None until one was taken: the first comes early, to be measured.
        store_s: from the request to the last byte stored; a checkpoint does not begin before the one
            before it is safe.
        mtbf_s: see :func:`expected_mtbf_s`.
    """
    optimum_s = 0.0 if save_cost_s is None else optimum_interval_s(max(0.0, save_cost_s), mtbf_s)
    return min(max(INTERVAL_MIN_S, store_s, optimum_s), bounds.SECONDS_MAX)
