# SPDX-License-Identifier: Apache-2.0
"""A small version of ``python -m bench.evacuations``."""

from __future__ import annotations

from bench.evacuations import JOBS, NOTICES, mean_loss_s, row, simulate


def test_follow_ups_reduce_the_training_that_is_repeated() -> None:
    """For each notice and state: the mean is no worse, and for a small state it is a tenth.

    Where hardly any fits, one that takes longer than all before it may cost its stall: 1 % of the loss.
    """
    for notice in NOTICES:
        for job in JOBS:
            before, after = (
                [o.redone_s + o.stall_s for o in simulate(job, notice, 100, follow_ups=on)]
                for on in (False, True)
            )
            assert sum(after) <= 1.01 * sum(before), (notice.name, job.name)
    small, aws = JOBS[0], NOTICES[0]
    after = sorted(outcome.redone_s for outcome in simulate(small, aws, 100, follow_ups=True))
    assert after[90] < 12.0
    assert row(small, aws, 10).startswith("| AWS")


def test_the_learned_spread_needs_no_floor() -> None:
    """If times differ by 5 %, a floor of 25 % costs more than a twentieth; if by 30 %, it gains less."""
    large = JOBS[2]
    even, uneven = (
        [mean_loss_s(large, sigma, floor, 150) for floor in (0.0, 0.25)] for sigma in (0.05, 0.3)
    )
    assert even[0] < 0.95 * even[1]
    assert uneven[0] < 1.05 * uneven[1]
