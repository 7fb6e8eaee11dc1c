# SPDX-License-Identifier: Apache-2.0
"""``make bench-preemption``: the arithmetic of the loss, and the rate of the store."""

from __future__ import annotations

import pytest

from bench.preemption.loss import Measured, split


def steps(first: int, start: float, count: int, step_s: float = 0.1) -> list[tuple[int, float]]:
    return [(first + n, start + n * step_s) for n in range(count)]


def test_parts_of_a_loss() -> None:
    """A stall is time beyond the usual step; redone are the steps after the restored one."""
    before = steps(1, 100.0, 50) + steps(51, 107.0, 20)
    after = steps(41, 130.0, 5)
    loss = split(before, after, restored=40, noticed=103.0, cut=109.0, pause_s=10.0)
    assert loss.stall_s == pytest.approx(107.0 - 104.9 - 0.1)
    assert loss.redone_s == pytest.approx((70 - 40) * 0.1)
    assert loss.down_s == pytest.approx(130.0 - 109.0 - 10.0 - 0.1)
    assert loss.total_s == pytest.approx(2.0 + 3.0 + 10.9)


def test_a_trainer_that_stops_early_stands_still_until_the_cut() -> None:
    """The time from the last step to the power cut is a stall, even if no step follows the notice."""
    for last, noticed in ((100.9, 100.5), (100.9, 102.0)):
        loss = split(
            steps(1, 100.0, 10),
            steps(11, 120.0, 2),
            restored=10,
            noticed=noticed,
            cut=109.0,
            pause_s=0.0,
        )
        assert loss.stall_s == pytest.approx(109.0 - max(last, noticed) - 0.1)
        assert loss.redone_s == 0.0


def test_the_bound_has_the_terms_of_the_goal() -> None:
    """Save, B/W, reserve, one step, B/R, and the time to start."""
    measured = Measured(
        save_s=1.0, size_bytes=600, send_bytes_s=300.0, fetch_bytes_s=200.0, reserve_s=3.0
    )
    parts = measured.bound_parts(step_s=0.5)
    assert parts["send"] == 2.0
    assert parts["fetch"] == 3.0
    assert sum(parts.values()) == 1.0 + 2.0 + 3.0 + 0.5 + 3.0 + 5.0
