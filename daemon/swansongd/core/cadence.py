# SPDX-License-Identifier: Apache-2.0
"""The interval between periodic checkpoints that costs the least training time.

Without a notice, an interruption loses half an interval on average.  Each checkpoint costs the time for which
training stands still.  Young found the interval with the least sum of both (J. W. Young, "A first order
approximation to the optimum checkpoint interval", Communications of the ACM 17, 1974).  Daly added the terms
that matter when a checkpoint takes long compared with the time between interruptions (J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22,
2006).

An interruption whose evacuation ended SAFE lost nothing and does not count.  The mean time between
interruptions (MTBF) is that between uncovered ones.
"""

from __future__ import annotations

import math

from swansong import bounds
from swansong_bucket.loss_records import History

INTERVAL_MIN_S = 60.0
"""Lower bound of the formula: a save costs more than the time for which training stands still."""


def young_s(save_cost_s: float, mtbf_s: float) -> float:
    """Young's interval, which Daly's refines; see :func:`optimum_interval_s`."""
    return math.sqrt(2 * save_cost_s * mtbf_s)


def optimum_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Daly's interval: training time from the end of one checkpoint to the beginning of the next.

    Args:
        save_cost_s: training stands still this long for one checkpoint.
        mtbf_s: mean time between interruptions; positive.
    """
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_cost_s / (2 * mtbf_s)
    return young_s(save_cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def expected_mtbf_s(prior_s: float, history: History) -> float:
    """Mean time between uncovered interruptions; the prior weighs as much as one after ``prior_s``."""
    observed_s = min(max(0.0, history.observed_s), bounds.SECONDS_MAX)
    return (prior_s + observed_s) / (1 + max(0, history.uncovered))


def interval_s(*, save_cost_s: float | None, store_s: float, mtbf_s: float) -> float:
    """Training time between two periodic checkpoints.

    Args:
        save_cost_s: None until one was measured; the first checkpoint therefore comes early.
        store_s: from the request to the last stored byte.  A checkpoint begins only after the previous one
            is stored.
        mtbf_s: see :func:`expected_mtbf_s`.
    """
    optimum_s = 0.0 if save_cost_s is None else optimum_interval_s(max(0.0, save_cost_s), mtbf_s)
    return min(max(INTERVAL_MIN_S, store_s, optimum_s), bounds.SECONDS_MAX)
