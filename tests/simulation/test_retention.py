# SPDX-License-Identifier: Apache-2.0
"""Random histories of a bucket: prune loses nothing that is protected, and leaves nothing else.

``make simulate SEEDS=10000 SIMULATORS=retention`` plays more of them.
"""

from __future__ import annotations

import pytest

from testkit.simulation.retention import code, run_history
from testkit.simulation.retention_mutants import MUTANTS, seeds_to_kill

HISTORIES = 150


@pytest.mark.fault("G14", "G15", "G40", "G42", "G44", "G45")
def test_no_history_loses_what_is_protected() -> None:
    """Rules R1 to R5 hold after every prune, whatever writers, operators, crashes and clocks do."""
    prune = code()
    worlds = [run_history(seed, prune) for seed in range(HISTORIES)]
    assert sum(world.prunes for world in worlds) > 4 * HISTORIES
    assert sum(world.crashes for world in worlds) > HISTORIES / 4


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_prune_is_found(name: str) -> None:
    """Each known fault breaks a rule within a few hundred histories."""
    assert seeds_to_kill(MUTANTS[name], 500)
