# SPDX-License-Identifier: Apache-2.0
"""Seeded runs of several daemons of one job in a world that fails.

``make simulate SIMULATORS=fleet`` runs more of them.  A failure names its seed.
"""

from __future__ import annotations

import pytest
from swansong_bucket.model import Verdict

from testkit.simulation.fleet import FAULTS, Fleet
from testkit.simulation.histories import live_fleet

pytestmark = pytest.mark.timeout(600)

SEEDS = range(4, 16)
"""Few seeds from the first one on have every fault and verdict."""


@pytest.mark.fault("N09", "G04", "G17", "T12", "H01")
def test_no_fault_breaks_an_invariant_of_several_vms() -> None:
    """F1 to F5 after every event; without faults the job trains, and its checkpoints become whole."""
    fired: set[str] = set()
    verdicts: set[Verdict] = set()
    for seed in SEEDS:
        try:
            fleet = live_fleet(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        fired |= fleet.fired
        verdicts |= {done.verdict for vm in fleet.vms for done in vm.verdicts}
    assert fired >= set(FAULTS), f"never happened: {set(FAULTS) - fired}"
    assert verdicts >= {Verdict.SAFE, Verdict.PARTIAL}, verdicts


@pytest.mark.fault("N09", "G17")
@pytest.mark.parametrize("vms", [2, 3])
def test_a_checkpoint_that_all_vms_have_sealed_is_where_the_job_resumes(vms: int) -> None:
    """The VM with the notice commits its part and is lost; the slow survivors finish theirs first."""
    for seed in range(8):
        fleet = Fleet(seed, faults=(), vms=vms)
        fleet.flush_s = 20.0
        start = fleet.start
        assert start is not None
        fleet.run_until(lambda: start.trains and start.step >= 3, 60)  # noqa: B023
        doomed = fleet.random.choice(fleet.vms)
        fleet.take(doomed, 60.0)
        fleet.run_until(lambda: start.targets, 20)  # noqa: B023
        (target,) = start.targets.values()
        fleet.run_until(
            lambda: all(any(s.id.step == target for s in vm.staging) for vm in fleet.vms),  # noqa: B023
            20,
        )
        fleet.run_until(
            lambda: doomed.state.part is not None or doomed.verdicts,  # noqa: B023
            45,
        )
        fleet.lose(doomed)
        fleet.run_until(
            lambda: fleet.start not in (None, start) and bool(fleet.start and fleet.start.trains),  # noqa: B023
            200,
        )
        assert fleet.start is not None
        assert fleet.start.resumed is not None, f"seed {seed}"
        assert fleet.start.resumed.step >= target, f"seed {seed}: {fleet.start.resumed}"
