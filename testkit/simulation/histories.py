# SPDX-License-Identifier: Apache-2.0
"""Random histories of one VM, each decided by its seed, for the tests, the mutants and long runs.

``python -m testkit.simulation.histories 0 20000`` runs these seeds of both histories of one VM and of the
history of several VMs, in all processors, and prints those that fail.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import structlog
from swansongd.core import planner
from swansongd.model import GpuHealth, Severity, Verdict

from testkit.simulation.bucket import Broken
from testkit.simulation.fleet import Fleet
from testkit.simulation.world import LOAD_S, RESERVE_S, SETTLE_S, World

SOURCES = ("aws.spot", "gcp.preempted", "aws.rebalance")
SETTLED_S = 10.0
"""A verdict waits at most this long for a set of a trainer without hooks that settles."""
CLAIM_S = 3.0
"""A claim without faults, with those of earlier starts before it."""
MARGIN = 1.3
"""More time than the planner needs: its figures change until the request."""
QUIET_S = 100.0
"""After this time without an evacuation, the next notice is not one too many."""


def live(seed: int) -> World:
    """Training for a while, a notice, an evacuation, and the deadline passed, with faults to the end."""
    world = World(seed, trainer=None)
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


def honest(seed: int) -> World:
    """H: after any history without a second VM, training that answers in time gets SAFE.

    The history has restarts of everything, GPU failures, rewinds, rollbacks, withdrawn notices and a store
    that fails within its contract.  Then the faults stop, and a notice comes with time enough by the
    planner's formula.

    Raises:
        Broken: an invariant is violated, or the last verdict is not SAFE.
    """
    weather = random.Random(f"honest {seed}")
    world = World(seed, trainer=None)
    world.faults -= {"never_answers", "second_vm"}
    if not world.has_hooks:
        world.faults -= {"claim_lost"}  # the daemon's record is all that names its earlier starts
    if weather.random() < 0.3:
        world.gpu_becomes(GpuHealth.OK, within_s=0.01)
    world.is_calm_from_s = 1000 + weather.uniform(20, 250)
    while world.now < world.is_calm_from_s:
        world.run(min(world.is_calm_from_s, world.now + weather.uniform(1, 60)))
        _happens(world, weather)
    _calm(world, weather)
    needed_s = _needed_s(world)
    before = len(world.conclusions)
    world.raise_notice(needed_s, source="deadline")
    world.run(world.now + needed_s + 0.3)
    told = [each for each in world.conclusions[before:] if each.is_final]
    if world.exit is not None:
        raise Broken(f"H: the daemon has ended: {world.exit.reason}")
    if not told or told[-1].verdict is not Verdict.SAFE:
        raise Broken(f"H: {told[-1].verdict.value}: {told[-1].reason}" if told else "H: no verdict")
    return world


def _happens(world: World, weather: random.Random) -> None:
    """One of the things that happen before the last notice."""
    match weather.randrange(10):
        case 0 | 1 | 2:
            severity = weather.choice((Severity.IMMINENT, Severity.ADVISORY))
            in_s = weather.choice((2.0, 10.0, 30.0, 120.0))
            world.raise_notice(in_s, severity, weather.choice(SOURCES))
        case 3 | 4:
            world.withdraw_notice()
        case 5:
            world.stop_daemon(weather.choice((0.0, 10.0)))
        case 6:
            world.restart_trainer(is_behind=weather.random() < 0.5)
        case 7 if world.gpu is not None:
            world.gpu_becomes(weather.choice(tuple(GpuHealth)))
        case _:
            pass


def _calm(world: World, weather: random.Random) -> None:
    """All notices are withdrawn, the GPU is replaced, and training that it could have spoilt starts again."""
    world.ends_slowness()
    world.keeps = 1000  # a script that deletes sets before they are stored is not honest
    for source in SOURCES:
        world.withdraw_notice(source)
    if world.gpu is not None:
        world.gpu_becomes(GpuHealth.OK, within_s=0.1)
    world.run(world.now + QUIET_S + weather.uniform(0, 60))
    while any(notice.source == "gpu" for notice in world.state.notices.live.values()):
        world.run(world.now + 10.0)  # it stays in force for minutes, and its end comes first
    if world.trainer is not None and world.trainer.process_id in world.suspect_starts:
        world.restart_trainer()
    if world.trainer is None:
        world.start_trainer()
    # The daemon has found a process without hooks by then, and any hello may still come.
    world.run(world.now + weather.choice((0.3 if world.has_hooks else 1.5, 3.0, 20.0)))


def _needed_s(world: World) -> float:
    """Enough for one checkpoint, as it is and as the daemon measures it.

    A trainer may have to connect and load first, to end a save in progress, and to wait for its claim.
    """
    send_s = world.size_bytes / world.bandwidth
    needed_s = 3 * LOAD_S + 4 * world.boundary_s + 2 * world.save_s + 2 * send_s + CLAIM_S
    needed_s += SETTLE_S + SETTLED_S + RESERVE_S
    while not _fits(world, needed_s / MARGIN):
        needed_s += 5.0
    return needed_s


def _fits(world: World, left_s: float) -> bool:
    """Whether the planner asks the trainer, with this time left."""
    state = world.state
    plan = planner.decide(
        left_s=left_s,
        reserve_s=RESERVE_S,
        measured=state.measured,
        has_trainer=True,
        candidates=state.candidates,
        is_committing=bool(state.commits.stored),
    )
    return plan.kind is planner.PlanKind.TAKE and plan.fits


def live_fleet(seed: int) -> Fleet:
    """Several VMs: notices, losses and restarts for a quarter of an hour, then training without faults.

    Raises:
        Broken: an invariant is violated, or the job does not train and commit in the end.
    """
    fleet = Fleet(seed)
    fleet.run(1010.0)
    fleet.trouble()
    for _ in range(fleet.random.choice((2, 4, 6))):
        fleet.run(fleet.now + fleet.delay_s(120.0))
        alive = [vm for vm in fleet.vms if vm.is_alive]
        if alive:
            fleet.take(fleet.random.choice(alive), fleet.random.choice((8.0, 30.0, 60.0, 120.0)))
        fleet.run(fleet.now + fleet.delay_s(60.0))
    fleet.faults.clear()
    fleet.run(fleet.now + 200.0)
    newest = fleet.whole()
    fleet.run(fleet.now + 300.0)
    if fleet.start is None or not fleet.start.trains:
        raise Broken("the job does not train")
    if fleet.whole() == newest:
        raise Broken(f"{newest} is still the newest whole checkpoint")
    return fleet


HISTORIES: dict[str, Callable[[int], object]] = {
    "live": live,
    "honest": honest,
    "fleet": live_fleet,
}


def failure_of(name: str, seed: int) -> str:
    """The violation of one history; empty if it has none."""
    try:
        HISTORIES[name](seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _timed_failure(name: str, seed: int) -> tuple[int, str, float]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    begun_s = time.process_time()
    return seed, failure_of(name, seed), time.process_time() - begun_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--history", choices=HISTORIES, action="append")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    failures = 0
    with ProcessPoolExecutor(given.processes) as pool:
        for name in given.history or HISTORIES:
            spent_s = 0.0
            seeds = range(given.first, given.end)
            for seed, failure, took_s in pool.map(
                partial(_timed_failure, name), seeds, chunksize=20
            ):
                spent_s += took_s
                if failure:
                    failures += 1
                    print(f"{name} seed {seed}: {failure}", flush=True)
            per_1000_s = 1000 * spent_s / max(1, len(seeds))
            print(f"{name}: {len(seeds)} seeds, {per_1000_s:.0f} CPU s per 1,000", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
