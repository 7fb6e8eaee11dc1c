# SPDX-License-Identifier: Apache-2.0
"""A small version of ``python -m bench.evacuations``."""

from __future__ import annotations

from bench.evacuations import JOBS, NOTICES, percentile, row, simulate


def test_follow_ups_reduce_the_training_that_is_repeated() -> None:
    """For each notice and state: the mean is no worse, and for a small state it is a tenth."""
    for notice in NOTICES:
        for job in JOBS:
            before, after = (
                [o.redone_s + o.stall_s for o in simulate(job, notice, 100, follow_ups=on)]
                for on in (False, True)
            )
            assert sum(after) <= sum(before), (notice.name, job.name)
    small, aws = JOBS[0], NOTICES[0]
    after = sorted(outcome.redone_s for outcome in simulate(small, aws, 100, follow_ups=True))
    assert percentile(after, 0.9) < 12.0
    assert row(small, aws, 10).startswith("| AWS")
