# SPDX-License-Identifier: Apache-2.0
"""Seeded runs of the whole decision loop against a world that fails.

``SWANSONG_SEEDS=20000`` runs more of them, ``SWANSONG_SEED=17`` one.  A failure names its seed.
"""

from __future__ import annotations

import os

import pytest
from simulation.world import FAULTS, MIB, RESERVE_S, World, restart_alone
from swansongd.core import advance
from swansongd.core.events import NoticeRaised
from swansongd.core.state import Phase
from swansongd.model import Severity, Verdict

SEEDS = int(os.environ.get("SWANSONG_SEEDS", "80"))
ONE_SEED = os.environ.get("SWANSONG_SEED")


def seeds() -> list[int]:
    return [int(ONE_SEED)] if ONE_SEED else list(range(SEEDS))


def live(seed: int) -> World:
    """Training for a while, a notice, an evacuation, and the deadline passed."""
    world = World(seed)
    world.run(1000 + world.delay_s(200))
    if world.chance("second_vm", 0.3):
        world.second_vm()
    if world.random.random() < 0.3:
        world.raise_notice(300, Severity.ADVISORY, "aws.rebalance")
    world.raise_notice(world.random.choice((2.0, 30.0, 120.0)))
    world.run(world.now + world.delay_s(40))
    if world.chance("withdrawn", 0.5):
        world.withdraw_notice()
    if world.chance("second_vm", 0.3):
        world.second_vm()
    if world.random.random() < 0.3:
        world.raise_notice(20.0, Severity.SHUTTING_DOWN, "logind")
    world.run(world.now + 200)
    return world


@pytest.mark.fault("G01", "G02", "G03", "G05", "N09", "N14", "N15", "O03", "O04", "O08", "T03")
def test_no_fault_breaks_an_invariant() -> None:
    """I1, I2, I4, I5, I7, I9, I16, I18 and the reserve, after every event of every seed."""
    fired: set[str] = set()
    for seed in seeds():
        try:
            fired |= live(seed).fired
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert ONE_SEED or fired >= set(FAULTS), f"never happened: {set(FAULTS) - fired}"


def test_the_same_seed_is_the_same_run() -> None:
    """Otherwise a failing seed could not be looked into."""
    first, second = live(11), live(11)
    assert first.store.objects == second.store.objects
    assert first.state == second.state


@pytest.mark.fault("N17", "N12")
def test_once_the_faults_stop_everything_sealed_is_committed() -> None:
    """V3 and V6: after the weather has cleared, the newest usable set becomes a commit, and V7: IDLE."""
    for seed in seeds()[:40]:
        world = World(seed, is_calm_from_s=1060.0)
        world.faults -= {"never_answers"}
        try:
            world.run(1050.0)
            world.raise_notice(30.0)
            world.run(1060.0)
            world.trainer, world.is_over = None, True  # nothing new from here on
            world.run(1060.0 + 30 + advance.OUTLIVED_S + 2000)
            state = world.state
            assert world.exit is None
            assert state.phase is Phase.IDLE, state.phase
            assert not state.uncommitted, state.uncommitted
            assert not state.stored
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


def test_what_fits_by_the_formula_ends_safe() -> None:
    """V3: no faults, time enough: SAFE before the deadline, whatever the sizes and delays."""
    tried = 0
    for seed in seeds()[:40]:
        world = World(seed)
        world.faults.clear()
        world.run(1100.0)
        backlog_s = world._size_bytes / world._bandwidth
        needed_s = 4 * world._boundary_s + world._save_s + 2 * backlog_s + RESERVE_S + 3
        world.raise_notice(needed_s)
        deadline = world.now + needed_s
        world.run(deadline)
        tried += 1
        assert world.verdict is not None, f"seed {seed}"
        assert world.verdict.verdict is Verdict.SAFE, f"seed {seed}: {world.verdict}"
    assert tried or ONE_SEED


@pytest.mark.fault("N09", "T09")
def test_a_restart_at_any_moment_changes_no_outcome() -> None:
    """I13: the notice is seen again, the evacuation goes on, and it ends SAFE all the same."""
    for tenth in range(0, 400, 7):
        world = World(3)
        world.faults.clear()
        world._size_bytes, world._bandwidth, world._save_s = 100 * MIB, 50 * MIB, 2.0
        world.run(1100.0)
        world.raise_notice(100.0)
        notice = world.notice
        world.run(1100.0 + tenth / 10)
        restart_alone(world)
        world.run(1199.0)
        assert notice is not None
        assert world.state.notices, "the notice is not forgotten"
        world.step(NoticeRaised(notice))
        assert world.verdict is not None, f"restart after {tenth / 10} s"
        assert world.verdict.verdict is Verdict.SAFE, f"restart after {tenth / 10} s"
        emergency = [s for s in world.sealed if s.request_id]
        assert len(emergency) == 1, f"restart after {tenth / 10} s: {len(emergency)} checkpoints"
