# SPDX-License-Identifier: Apache-2.0
"""Seeded runs of the whole decision loop against a world that fails.

``SWANSONG_SEEDS=20000`` runs more of them, ``SWANSONG_SEED=17`` one.  A failure names its seed, which
``python -m testkit.simulation shrink`` reduces to the few choices that matter.  Long runs: ``make simulate``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from swansong_bucket.model import Verdict
from swansongd.core import machine, notices
from swansongd.core.events import (
    Action,
    CheckComplete,
    ClaimGeneration,
    CommitManifest,
    Conclude,
    NoticeRaised,
    SignalTrainer,
    StartFlush,
)
from swansongd.core.request_ids import FOLLOW_UP
from swansongd.core.transition import Transition
from swansongd.observe.phase import Phase, is_follow_up_under_way, phase_of

from testkit.simulation.bucket import restored
from testkit.simulation.histories import failure_of, fits, live, live_with_gpu, reconnects
from testkit.simulation.world import FAULTS, MIB, RESERVE_S, World

SEEDS = int(os.environ.get("SWANSONG_SEEDS", "40"))
ONE_SEED = os.environ.get("SWANSONG_SEED")


def seeds() -> list[int]:
    return [int(ONE_SEED)] if ONE_SEED else list(range(SEEDS))


@pytest.mark.fault(
    "G01", "G02", "G03", "G05", "N09", "N14", "N15", "O03", "O04", "O08", "O24", "T03"
)
def test_no_fault_breaks_an_invariant() -> None:
    """S, I1, I2, I4 to I7, I9, I16, I18, after every event of every seed; no part starts in the reserve."""
    fired: set[str] = set()
    begun: list[float] = []
    wanted = {*FAULTS, "unsent_set_dropped"}
    for seed in (
        seeds() if ONE_SEED else range(4 * SEEDS)
    ):  # the rarest ones are not in all first seeds
        if seed >= SEEDS and fired >= wanted:
            break
        try:
            world = live(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        fired |= world.fired
        begun += world.begun
    assert not [left for left in begun if 0 < left <= RESERVE_S]
    assert ONE_SEED or any(left <= 0 for left in begun), "a deadline that is outlived stops nothing"
    assert ONE_SEED or fired >= wanted, f"never happened: {wanted - fired}"


@pytest.mark.fault("N09", "T09", "T12", "T17")
def test_honest_training_gets_safe_after_any_history() -> None:
    """H: restarts of everything, GPU failures, rewinds, rollbacks and faults of the store cost no SAFE."""
    kinds = set()
    for seed in seeds()[: max(20, SEEDS // 4)]:
        failure = failure_of("honest", seed)
        assert not failure, f"seed {seed}: {failure}"
        world = World(seed, trainer=None)
        kinds.add((world.has_hooks, world.world_size))
    assert ONE_SEED or len(kinds) == 3, kinds


def test_a_status_without_a_problem_is_a_promise() -> None:
    """F: after any history, a notice with time enough ends with SAFE if the status names no problem."""
    told = 0
    for seed in seeds()[: max(20, SEEDS // 4)]:
        try:
            told += "fits" in fits(seed).fired
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert ONE_SEED or told > 5


@pytest.mark.fault("X01", "X02", "X06", "X09")
def test_a_gpu_never_leads_to_a_checkpoint_of_suspect_training() -> None:
    """No evacuation asks it, no verdict is SAFE with its sets, and all invariants above hold."""
    found = [0, 0, 0]
    for seed in seeds()[: max(12, SEEDS // 8)]:
        try:
            world = live_with_gpu(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        found[0] += bool(world.suspect_starts)
        found[1] += bool(world.suspect_sets)
        found[2] += world.life > 1 and bool(world.suspect_starts)
    assert ONE_SEED or min(found) > 1, found


@pytest.mark.fault("T09", "T17")
def test_a_restart_leads_to_no_false_safe() -> None:
    """The daemon dies around the notice, and the trainer needs up to a minute to reconnect.

    It may have left the line of the newest commit before, or be ahead of it.
    """
    found = 0
    for seed in seeds():
        try:
            world = reconnects(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        ranks = [] if world.trainer is None else world.trainer.ranks
        found += not all(rank.is_connected for rank in ranks)
    assert ONE_SEED or found > 1, "every trainer has reconnected"


def test_only_reconcile_orders_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a transition records facts and reacts to the event, as its docstring states."""
    work = {
        SignalTrainer, StartFlush, CommitManifest, CheckComplete, ClaimGeneration, Conclude,
    }  # fmt: skip
    reactions: set[type[Action]] = set()
    reconcile = machine._reconcile

    def watched(transition: Transition) -> None:
        reactions.update(type(action) for action in transition.actions)
        reconcile(transition)

    monkeypatch.setattr(machine, "_reconcile", watched)
    for seed in range(8):
        live(seed)
    assert reactions
    assert not reactions & work


@pytest.mark.fault("T17")
def test_a_trainer_that_connects_after_the_notice_is_asked_in_time() -> None:
    """V1: a verdict before the deadline, and only SAFE if the checkpoint of the late trainer fits."""
    timely = 0
    for seed in seeds()[:30]:
        world = World(seed, has_trainer=False)
        world.faults.clear()
        world.run(1010.0)
        world.raise_notice(90.0)
        world.run(1010.0 + world.delay_s(80.0))
        left_s = 1100.0 - world.now
        world.start_trainer()
        world.run(1105.0)
        told = [conclusion for conclusion in world.conclusions if conclusion.is_final]
        assert told[0].slack_s >= -1.0, (seed, told)
        if left_s > world.take_s + 10.0:
            timely += 1
            assert {conclusion.verdict for conclusion in told} == {Verdict.SAFE}, (seed, told)
    assert ONE_SEED or timely > 5


@pytest.mark.fault("T17")
def test_a_verdict_comes_in_time_although_no_trainer_connects() -> None:
    """V1: in time for the farewell, and once, however long the daemon has waited."""
    for seed in seeds()[:30]:
        world = World(seed, has_trainer=False)
        world.faults &= {"refused", "lost_reply", "late_scan"}
        world.run(1010.0)
        world.raise_notice(90.0)
        world.run(1105.0)
        told = [conclusion for conclusion in world.conclusions if conclusion.is_final]
        assert [conclusion.verdict for conclusion in told] == [Verdict.NO_TRAINING], (seed, told)
        assert told[0].slack_s > 0, (seed, told)


@pytest.mark.fault("N17", "N12")
def test_once_the_faults_stop_everything_sealed_is_committed() -> None:
    """V3 and V6: after the last fault the newest usable set becomes a commit, and V7: IDLE."""
    for seed in seeds()[: max(20, SEEDS // 4)]:
        world = World(seed, is_calm_from_s=1060.0)
        world.faults -= {"never_answers"}
        try:
            world.run(1050.0)
            world.raise_notice(30.0)
            world.run(1060.0)
            world.trainer, world.is_over = None, True  # nothing new from here on
            world.run(1060.0 + 30 + notices.OUTLIVED_S + 2000)
            state = world.state
            assert world.exit is None
            assert phase_of(state) is Phase.IDLE, phase_of(state)
            assert not state.uncommitted, state.uncommitted
            assert not state.commits.stored
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


def test_what_fits_by_the_formula_ends_safe() -> None:
    """V3: without faults and with enough time: SAFE before the deadline, for all sizes and delays."""
    tried = 0
    for seed in seeds()[: max(20, SEEDS // 4)]:
        world = World(seed)
        world.faults.clear()
        world.run(1100.0)
        backlog_s = world.size_bytes / world.bandwidth
        needed_s = 4 * world.boundary_s + world.save_s + 2 * backlog_s + RESERVE_S + 3
        world.raise_notice(needed_s)
        deadline = world.now + needed_s
        world.run(deadline)
        tried += 1
        assert world.verdict is not None, f"seed {seed}"
        assert world.verdict.verdict is Verdict.SAFE, f"seed {seed}: {world.verdict}"
    assert tried or ONE_SEED


def calm(seed: int, *, save_s: float, flush_s: float, boundary_s: float = 5.0) -> World:
    """No faults, chosen numbers, and nothing left to send: all sealed sets are committed."""
    world = World(seed)
    world.faults.clear()
    world.size_bytes, world.bandwidth = 1024 * MIB, round(1024 * MIB / flush_s)
    world.save_s, world.boundary_s = save_s, boundary_s
    world.run(1100.0)
    while world.state.uncommitted or world.state.commits.stored or world.state.commits.last is None:
        world.run(world.now + 1)
        assert world.now < 2000
    return world


def without_a_save(world: World) -> None:
    """Runs until no periodic checkpoint is being saved or sent, and training is past the newest commit."""
    world.every_steps, world.interval_s = 10**9, 1e9
    settings = replace(world.state.settings, checkpoint_interval_s=world.interval_s)
    world.state = replace(world.state, settings=settings)
    world.run(world.now + 100)
    while world.growing or world.state.uncommitted or world.state.commits.stored:
        world.run(world.now + 1)
        assert world.now < 2000


@pytest.mark.parametrize(
    ("hides_growing", "verdict"), [(False, Verdict.SAFE), (True, Verdict.PARTIAL)]
)
def test_save_and_flush_overlap(hides_growing: bool, verdict: Verdict) -> None:
    """With early shards a set is in time that would be too late if it were sent after its seal.

    Training is past the newest commit, and no save is under way that would answer the notice.
    """
    world = calm(5, save_s=40.0, flush_s=36.0)
    without_a_save(world)
    world.hides_growing = hides_growing
    world.raise_notice(40 + 36 / 4 + 2 * 5 + RESERVE_S + 4)
    world.run(world.now + 40 + 36 / 4 + 2 * 5 + RESERVE_S + 4)
    assert bool(world.early) is not hides_growing
    assert world.verdict is not None
    assert world.verdict.verdict is verdict, world.verdict


@pytest.mark.fault("O02", "O03", "D10")
def test_a_store_too_slow_for_the_set_ends_partial_with_the_older_commit_whole() -> None:
    """V4, V5: whenever the bandwidth collapses, the verdict is in time, and the older commit stays whole."""
    verdicts = set()
    for seed in seeds()[:30]:
        world = calm(seed, save_s=2.0, flush_s=20.0, boundary_s=4.0)
        older = world.state.commits.last
        world.raise_notice(60.0)
        deadline = world.now + 60.0
        world.run(world.now + world.delay_s(40))
        world.bandwidth //= world.random.choice((10, 100, 10_000))
        world.run(deadline + 0.6)
        assert world.verdict is not None, f"seed {seed}: no verdict"
        verdicts.add(world.verdict.verdict)
        assert world.verdict.verdict in (Verdict.SAFE, Verdict.PARTIAL), f"seed {seed}"
        if world.verdict.verdict is Verdict.PARTIAL:
            assert older is not None
            assert world.verdict.commit is not None
            assert world.verdict.commit >= older, f"seed {seed}"
        assert not [left for left in world.begun if 0 < left <= RESERVE_S], f"seed {seed}"
    assert ONE_SEED or verdicts == {Verdict.SAFE, Verdict.PARTIAL}


@pytest.mark.fault("N09", "T09")
def test_a_restart_at_any_moment_changes_no_outcome() -> None:
    """I13: the notice is seen again, and it still ends SAFE, with one checkpoint."""
    for tenth in range(0, 400, 13):
        world = World(3)
        world.faults.clear()
        world.size_bytes, world.bandwidth, world.save_s = 100 * MIB, 50 * MIB, 2.0
        world.run(1060.0)
        world.every_steps, world.interval_s = 10**9, 1e9  # a save under way could answer the notice
        world.run(1100.0)
        world.raise_notice(100.0)
        notice = world.notice
        world.run(1100.0 + tenth / 10)
        world.stop_daemon()
        world.run(1199.0)
        assert notice is not None
        assert world.state.notices.live, "the notice is not forgotten"
        world.step(NoticeRaised(notice))
        assert world.verdict is not None, f"restart after {tenth / 10} s"
        assert world.verdict.verdict is Verdict.SAFE, f"restart after {tenth / 10} s"
        emergency = [
            s
            for s in world.sealed
            if s.request_id
            and not s.request_id.startswith("periodic-")
            and FOLLOW_UP not in s.request_id
        ]
        assert len(emergency) == 1, f"restart after {tenth / 10} s: {len(emergency)} checkpoints"


def test_periodic_checkpoints_are_taken_and_committed() -> None:
    """With no fault and no notice, each interval has its checkpoint, unless the store cannot follow."""
    tried = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(80):  # few of them can take any
        world = World(seed)
        world.faults.clear()
        world.every_steps = 10**9
        takes_s = 2 * world.boundary_s + world.save_s + 2 * world.size_bytes / world.bandwidth
        if world.takes_periodic and takes_s < world.interval_s / 2:
            tried += 1
            world.run(1300.0)
            steps = {ref.step for ref in world.commits()}
            assert world.periodic, f"seed {seed}: none was taken"
            assert set(world.periodic[:-1]) <= steps, f"seed {seed}: {world.periodic}, {steps}"
    assert tried > 3 or ONE_SEED


@pytest.mark.fault("G03", "T12", "T09")
def test_a_trainer_that_starts_before_the_newest_commit_replaces_it() -> None:
    """Restarts at lower steps at any time, any number of lives, with restarts of the daemon in between.

    Soon after, the next VM would resume from a state of the last trainer, and a notice ends SAFE.
    """
    tried = 0
    for seed in seeds()[:15]:
        world = World(seed, is_calm_from_s=1250.0)
        world.faults = {"restart", "late_scan", "refused", "lost_reply"} & world.faults
        world.boundary_s, world.save_s = 1.0, 2.0
        world.size_bytes, world.bandwidth = 100 * MIB, 50 * MIB
        world.every_steps = 20
        world.run(1020 + world.delay_s(80))
        for _ in range(world.random.randrange(1, 4)):
            world.restart_trainer(is_behind=True)
            world.run(world.now + world.delay_s(50))
        world.run(1250.0)
        world.restart_trainer(is_behind=True)
        world.run(1250.0 + 45)
        made, trainer = restored(world.store), world.trainer
        assert made is not None
        assert trainer is not None
        assert world.witness.sets[made.nonce].line == trainer.line.id, f"seed {seed}: {made.ref}"
        world.raise_notice(120.0)
        world.run(world.now + 60)
        assert world.verdict is not None, f"seed {seed}"
        assert world.verdict.verdict is Verdict.SAFE, f"seed {seed}: {world.verdict}"
        tried += made.ref.generation > 1
    assert tried > 5 or ONE_SEED, "hardly any start was behind a state of its generation"


@pytest.mark.fault("T19", "T20", "T21", "T22")
def test_no_fault_of_a_follow_up_touches_the_standing_commit() -> None:
    """Power, trainer, notice and daemon fail at any moment after SAFE, which stands with its commit.

    The simulator checks each verdict against the one before, and against the store.
    """
    ended = set()
    for seed in seeds()[:12]:
        world = World(seed, takes_follow_ups=True)
        world.faults.clear()
        world.every_steps = 10**9
        world.boundary_s, world.save_s = 0.5, 2.0
        world.size_bytes, world.bandwidth = 100 * MIB, 50 * MIB
        world.run(1030.0)
        world.raise_notice(120.0)
        world.run(world.now + 20.0)
        assert world.verdict is not None
        assert world.verdict.verdict is Verdict.SAFE
        standing = world.verdict.commit
        world.run(world.now + world.delay_s(60.0))
        while seed % 2 and world.now < 1140 and not is_follow_up_under_way(world.state):
            world.run(world.now + 0.5)
        end = world.random.choice(("power", "trainer", "notice", "daemon"))
        is_under_way = is_follow_up_under_way(world.state)
        ended.add((end, is_under_way))
        if end == "trainer" and world.trainer is not None:
            world._dies(world.trainer)
        elif end == "notice":
            world.withdraw_notice()
        elif end == "daemon":
            world.stop_daemon()
        else:
            world.life += 1  # no event reaches this VM any more
        world.run(world.now + 15.0)
        assert world.verdict.verdict is Verdict.SAFE, f"seed {seed}: {end}"
        assert standing is not None
        assert world.verdict.commit is not None
        assert max(world.commits()) >= world.verdict.commit >= standing, f"seed {seed}: {end}"
    assert ONE_SEED or len({end for end, _ in ended}) == 4
    assert ONE_SEED or any(is_under_way for _, is_under_way in ended)
