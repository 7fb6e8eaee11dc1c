# SPDX-License-Identifier: Apache-2.0
"""Each run of the tests tries a few seeds that no other run has tried."""

from __future__ import annotations

import random

import pytest

from testkit.simulation.simulators import SIMULATORS
from testkit.simulation.sweep import Unit, headline, played, repeated


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_new_seeds_find_no_problem(simulator: str) -> None:
    """No new seed shows a problem.  A failure prints the commands that repeat and shrink it."""
    seeds = 1 if SIMULATORS[simulator].world else 20
    unit = Unit(simulator, random.randrange(10**6, 10**9), seeds)
    for result in played(unit):
        pytest.fail(f"{headline(result)}\n{repeated(unit, result)}")
