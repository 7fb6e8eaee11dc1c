# SPDX-License-Identifier: Apache-2.0
"""Random histories of the decision core and of retention, each decided by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import structlog
from swansong_bucket.model import GpuHealth, Severity, Verdict
from swansongd.core import planner
from swansongd.core.starts import WINDOW_S
from swansongd.observe.margin import problem_of
from swansongd.observe.tally import Figures

from testkit.simulation import retention
from testkit.simulation.bucket import Broken
from testkit.simulation.fleet import SLOWEST, Fleet
from testkit.simulation.world import LOAD_S, RESERVE_S, SETTLE_S, World

SOURCES = ("aws.spot", "gcp.preempted", "aws.rebalance")
SETTLED_S = 10.0
"""A verdict waits at most this long for a set of a trainer without hooks that settles."""
CLAIM_S = 3.0
"""A claim without faults, with those of earlier starts before it."""
MARGIN = 1.3
"""More time than the planner needs: its figures change until the request."""
QUIET_S = 45.0
"""The daemon is idle by then, or still has much to send: slow requests have ended, and those after them."""
SOON_S = (0.05, 0.3, 1.0, 3.0, 10.0)
"""Times between two things that happen."""
CRASHES_MAX = 5
"""Starts within two minutes after which the training may start twice more."""
AFTER_SAVE_S = 4.0
"""Longest time to another start in the last evacuation: many requests have their answer by then."""
AGAIN_S = 8.0
"""Longest pause before a request is repeated."""


def live(seed: int) -> World:
    """Training for a while, a notice, an evacuation, and the deadline passed, with faults to the end.

    The things that happen are as close together as they can be: within seconds of the notice, of a save, or
    of each other.
    """
    weather = random.Random(f"live {seed}")
    world = World(seed, trainer=None)
    world.every_steps = weather.choice((2, 3, 10))
    if weather.random() < 0.35:
        world.gpu_becomes(GpuHealth.OK, within_s=0.01)
    world.run(1000 + world.delay_s(40))
    for _ in range(weather.choice((0, 0, 1, 2))):
        _happens(world, weather)
        world.run(world.now + weather.choice(SOON_S))
    moments = [_awaits_a_save, _awaits_a_load, _awaits_a_load, _awaits_a_twin, _awaits_nothing]
    if world.world_size > 1:
        moments += [_awaits_uneven_ranks, _awaits_uneven_ranks]
    weather.choice(moments)(world, weather)
    world.raise_notice(weather.choice((2.0, 10.0, 30.0, 60.0)))
    if world.gpu is not None and weather.random() < 0.5:
        world.run(world.now + 0.2 + weather.choice(SOON_S))
        world.gpu_becomes(GpuHealth.LOST, within_s=0.1)
    if weather.random() < 0.2:
        _restarts_after_safe(world, weather)
    for _ in range(weather.choice((0, 1, 2, 4))):
        world.run(world.now + weather.choice(SOON_S))
        _happens(world, weather)
        if world.chance("second_vm", 0.2):
            world.second_vm()
    if weather.random() < 0.1:
        world.raise_notice(20.0, Severity.SHUTTING_DOWN, "logind")
    deadline_s = 0.0 if world.notice is None else world.notice.deadline_mono_s
    world.run(max(deadline_s, world.now) + weather.choice((1.0, 10.0)))
    return world


def _awaits_a_save(world: World, weather: random.Random) -> None:
    """Run until just after the next set; at most for some time."""
    sealed, until_s = len(world.sealed), world.now + 30.0
    while len(world.sealed) == sealed and world.now < until_s:
        world.run(world.now + 0.2)
    world.run(world.now + weather.choice((0.0, 0.5, 2.0)))


def _awaits_a_load(world: World, weather: random.Random) -> None:
    """The training starts again, often from an older state; run until just after it has loaded one."""
    weather.choice((_awaits_a_save, _awaits_a_twin, _awaits_a_twin))(world, weather)
    if weather.random() < 0.5:
        _awaits_a_commit(world, weather)
    world.restart_trainer(is_behind=weather.random() < 0.8)
    until_s = world.now + 5.0
    while world.trainer is not None and world.trainer.is_loading and world.now < until_s:
        world.run(world.now + 0.05)
    world.run(world.now + weather.choice((0.0, 0.1, 1.0)))


def _awaits_a_commit(world: World, weather: random.Random) -> None:
    """Run until the next set may be committed."""
    _awaits_a_save(world, weather)
    world.run(world.now + min(20.0, 1.0 + 2 * world.size_bytes / world.bandwidth))


def _awaits_a_twin(world: World, weather: random.Random) -> None:
    """The training loads an older state, and comes again to the step of its newest set."""
    _awaits_a_save(world, weather)
    _awaits_a_save(world, weather)
    if world.has_hooks and weather.random() < 0.5:
        world.restart_trainer(is_behind=True)
    else:
        world.rolls_back()
    newest = max((staged.id.step for staged in world.sealed), default=0)
    until_s = world.now + 30.0
    while world.now < until_s and world.trainer is not None:
        if not world.trainer.is_loading and world.trainer.step >= newest - 1:
            break
        world.run(world.now + 0.1)
    world.run(world.now + weather.choice((0.0, 0.3, 0.7, 1.0)) * world.boundary_s)


def _awaits_uneven_ranks(world: World, weather: random.Random) -> None:
    """One rank has completed a step more than the other, which is at a step that is saved."""
    del weather
    until_s = world.now + 20.0
    while world.now < until_s and world.trainer is not None:
        steps = [rank.step for rank in world.trainer.ranks]
        if max(steps) > min(steps) and min(steps) % world.every_steps == 0:
            return
        world.run(world.now + 0.05)


def _awaits_nothing(world: World, weather: random.Random) -> None:
    del world, weather


def _restarts_after_safe(world: World, weather: random.Random) -> None:
    """Run until SAFE, at most for some time; then the daemon and the training start again.

    The training may do so before SAFE, too, while the set that answers the request is stored.
    """
    if weather.random() < 0.5:
        _awaits_a_save(world, weather)
        world.restart_trainer(is_behind=True)
    known, until_s = len(world.conclusions), world.now + 20.0
    while world.now < until_s and not any(
        each.verdict is Verdict.SAFE for each in world.conclusions[known:]
    ):
        world.run(world.now + 0.2)
    world.run(world.now + weather.choice((0.0, 0.3, 2.0)))
    for is_daemon in weather.sample((True, False), 2):
        if is_daemon:
            world.stop_daemon()
        else:
            world.restart_trainer(is_behind=True)
        world.run(world.now + weather.choice((0.0, 0.3, 2.0)))


def honest(seed: int) -> World:
    """H: after any history without a second VM, training that answers in time gets SAFE.

    The history has restarts of everything, GPU failures, rewinds, rollbacks, withdrawn notices and a store
    that fails within its contract.  Then the faults stop, and a notice comes with time enough by the
    planner's formula.  The training may still be started again, and a rank may decline the first requests.

    Raises:
        Broken: an invariant is violated, or a verdict of the last evacuation is not SAFE.
    """
    weather = random.Random(f"honest {seed}")
    world = World(seed, trainer=None)
    world.every_steps = weather.choice((2, 3, 10))
    world.faults -= {"never_answers", "second_vm"}
    if not world.has_hooks:
        world.faults -= {"claim_lost"}  # the daemon's record is all that names its earlier starts
    if weather.random() < 0.3:
        world.gpu_becomes(GpuHealth.OK, within_s=0.01)
    world.run(1000 + world.delay_s(20))
    for _ in range(weather.choice((1, 2, 4, 8))):
        _happens(world, weather)
        world.run(world.now + weather.choice(SOON_S))
    world.is_calm_from_s = world.now
    _calm(world, weather)
    if world.has_hooks and weather.random() < 0.15:
        _crashes(world)
    may_crash = len(_recent_starts(world)) < CRASHES_MAX
    restarts = weather.choice((0, 0, 0, 1, 2)) if may_crash else 0
    world.hangs = weather.choice((0, 0, 1, 2)) if world.has_hooks else 0
    world.voids = weather.choice((0, 0, 1)) if world.has_hooks else 0
    one_s = needed_s = _needed_s(world)
    needed_s += world.voids * (one_s + AGAIN_S)
    needed_s += restarts * (3 * LOAD_S + 2 * world.boundary_s + AFTER_SAVE_S)
    if not world.has_hooks:
        needed_s += restarts * (world.save_s + 2 * SETTLE_S)
    needed_s += 2 * world.hangs * AGAIN_S
    world.vanishes = world.has_hooks and weather.random() < 0.3
    if not restarts and weather.random() < 0.2 and world.finishes():
        world.hangs = world.voids = 0
        world.run(world.now + weather.choice((0.0, 0.1, 1.0)))
    is_shutdown = not restarts and world.has_hooks and weather.random() < 0.3
    if is_shutdown:
        world.run(world.now + 1.5)  # a host that shuts down waits for no trainer to connect
    before = len(world.conclusions)
    world.raise_notice(needed_s, source="host" if is_shutdown else "deadline")
    ends_s = world.now + needed_s + 0.3
    for _ in range(restarts):
        world.run(world.now + weather.choice((0.3, 1.0, AFTER_SAVE_S)))
        weather.choice((world.restart_trainer, world.rolls_back))()
    world.run(ends_s)
    told = [each for each in world.conclusions[before:] if each.is_final]
    if world.trainer is not None and world.trainer.is_misled:
        return world  # to the daemon its ranks are of two starts, and have no common step
    if not told:
        reason = "no verdict" if world.exit is None else world.exit.reason
        raise Broken(f"H: {reason}")
    # Any other verdict waits until nothing can improve it, but for no start after one that has crashed.
    wrong = told[-1] if restarts else told[0]
    if wrong.verdict is not Verdict.SAFE:
        raise Broken(f"H: {wrong.verdict.value}: {wrong.reason}; then {told[-1].verdict.value}")
    if world.exit is not None and not is_shutdown:
        raise Broken(f"H: the daemon has ended: {world.exit.reason}")
    return world


def fits(seed: int) -> World:
    """F: while the status names no problem, a notice with time enough ends with SAFE.

    The history is :func:`honest` up to its last fault.  The notice comes soon after it.

    Raises:
        Broken: an invariant is violated, or the status was wrong.
    """
    weather = random.Random(f"fits {seed}")
    world = World(seed, trainer=None)
    world.every_steps = weather.choice((2, 3, 10))
    world.faults -= {"never_answers", "second_vm"}
    if weather.random() < 0.3:
        world.gpu_becomes(GpuHealth.OK, within_s=0.01)
    world.run(1030 + world.delay_s(20))
    for _ in range(weather.choice((0, 1, 2))):
        _happens(world, weather)
        world.run(world.now + weather.choice(SOON_S))
    world.is_calm_from_s = world.now
    world.ends_slowness()
    world.keeps = 1000  # a script that deletes sets before they are stored is not honest
    for source in SOURCES:
        world.withdraw_notice(source)
    world.run(world.now + weather.choice((1.5, 3.0, 10.0, 20.0)))
    if world.state.evacuation is not None or problem_of(world.state, world.now, Figures(), None):
        return world
    if world.trainer is not None and world.trainer.signalled and world.trainer.is_saving:
        return world  # it answers the signal of a withdrawn notice, after which it may end
    world.fired.add("fits")
    before, needed_s = len(world.conclusions), _needed_s(world)
    world.raise_notice(needed_s, source="deadline")
    world.run(world.now + needed_s + 0.3)
    told = [each for each in world.conclusions[before:] if each.is_final]
    if not told or told[0].verdict is not Verdict.SAFE:
        raise Broken(f"F: {told[0].verdict.value}: {told[0].reason}" if told else "F: no verdict")
    return world


def _happens(world: World, weather: random.Random) -> None:
    """One of the things that happen before the last notice."""
    match weather.randrange(24):
        case 0 | 1 | 2:
            severity = weather.choice((Severity.IMMINENT, Severity.ADVISORY))
            in_s = weather.choice((2.0, 10.0, 30.0, 60.0))
            world.raise_notice(in_s, severity, weather.choice(SOURCES))
        case 3 | 4:
            world.withdraw_notice()
        case 5 | 6 | 7:
            world.stop_daemon(weather.choice((0.0, 0.0, 1.0, 10.0)))
        case 8 | 9 | 10:
            world.restart_trainer(is_behind=weather.random() < 0.5)
        case 11 | 12 if world.gpu is not None:
            world.gpu_becomes(weather.choice(tuple(GpuHealth)))
        case 13 | 14:  # both at once: the daemon may learn of neither
            if world.has_hooks or weather.random() < 0.5:
                world.stop_daemon(weather.choice((0.0, 1.0)))
                world.restart_trainer(is_behind=weather.random() < 0.7)
            else:
                world.stop_daemon(15.0)
                world.rolls_back()
        case 15 | 16:
            _awaits_a_save(world, weather)
        case 17 | 18:  # its last set has not settled yet
            _awaits_a_save(world, weather)
            world.restart_trainer(is_behind=weather.random() < 0.7)
        case 19:
            _crashes(world)
        case 20:  # an older process may connect before the training does
            if world.has_hooks:
                world.restart_trainer()
                world.run(world.now + weather.choice((1.5, 4.0)))
            else:
                _awaits_a_twin(world, weather)
                _awaits_a_save(world, weather)
            world.stop_daemon()
        case _:
            world.rolls_back()


def _crashes(world: World) -> None:
    """The training starts again and again: more often than generations are claimed."""
    for _ in range(9):
        world.restart_trainer()
        world.run(world.now + 1.5)


def _calm(world: World, weather: random.Random) -> None:
    """All notices are withdrawn, the GPU is replaced, and training that it could have spoilt starts again."""
    world.ends_slowness()
    world.keeps = 1000  # a script that deletes sets before they are stored is not honest
    for source in SOURCES:
        world.withdraw_notice(source)
    if world.gpu is not None:
        world.gpu_becomes(GpuHealth.OK, within_s=0.1)
    report_s, every_steps = world.report_s, world.every_steps
    world.report_s, world.every_steps = 10.0, 10**9  # nothing happens for a while
    world.run(world.now + QUIET_S + weather.uniform(0, 20))
    while any(notice.source == "gpu" for notice in world.state.notices.live.values()):
        world.run(world.now + 10.0)  # it stays in force for minutes, and its end comes first
    world.report_s, world.every_steps = report_s, every_steps
    claims = [at_s for _, at_s in world.state.starts.claims if at_s > world.now - WINDOW_S]
    trainer = world.trainer if len(claims) < CRASHES_MAX and world.exit is None else None
    if trainer and trainer.is_loading and trainer.launched_s < world.now - QUIET_S:
        raise Broken(f"H: {trainer.start_id} has waited for its checkpoint since its start")
    if world.trainer is not None and world.trainer.process_id in world.suspect_starts:
        world.restart_trainer()
    if world.trainer is None:
        world.start_trainer()
    # The daemon has found a process without hooks by then, and any hello may still come.
    world.run(world.now + weather.choice((0.3 if world.has_hooks else 1.5, 3.0, 20.0)))


def _recent_starts(world: World) -> list[str]:
    return [id_ for id_, at_s in world.launched_s.items() if at_s > world.now - 120.0]


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


def reconnects(seed: int) -> World:
    """The daemon dies around the notice, and the trainer needs up to a minute to reconnect.

    It may have left the line of the newest commit before, or be ahead of it.
    """
    weather = random.Random(f"reconnects {seed}")
    world = World(seed, trainer=weather.choice(("one rank", "two ranks")))
    world.reconnects_slowly = True
    world.run(1000 + weather.uniform(10, 90))
    if weather.random() < 0.5:
        world.restart_trainer(is_behind=True)
        world.run(world.now + weather.choice((0.5, 5.0)))
    world.stop_daemon()
    world.run(world.now + weather.choice((0.1, 3.0, 15.0)))
    world.raise_notice(weather.choice((2.0, 6.0, 30.0)))
    world.run(world.now + 60)
    return world


def live_with_gpu(seed: int) -> World:
    """Training on a GPU that degrades, fails, flaps and recovers around a notice."""
    world, weather = World(seed, trainer=None), random.Random(f"gpu {seed}")
    world.gpu_becomes(GpuHealth.OK, within_s=0.01)
    world.run(1000 + weather.uniform(10, 60))
    for turn in range(weather.randrange(1, 6)):
        world.gpu_becomes(weather.choice(tuple(GpuHealth)))
        world.run(world.now + weather.choice((0.1, 2.0, 15.0)))
        if turn == 1:
            world.raise_notice(weather.choice((30.0, 120.0)))
            world.run(world.now + weather.uniform(0.1, 10))
        if weather.random() < 0.2:
            world.stop_daemon()
        if weather.random() < 0.2:
            world.restart_trainer()
    world.gpu_becomes(GpuHealth.LOST)
    world.run(world.now + weather.choice((0.7, 20.0)))
    world.raise_notice(30.0, source="gcp.preempted")
    world.run(world.now + 40)
    return world


def live_fleet(seed: int) -> Fleet:
    """Several VMs: notices, losses and restarts for some minutes, then training without faults.

    Raises:
        Broken: an invariant is violated, or the job does not train and commit in the end.
    """
    fleet = Fleet(seed)
    fleet.run(1010.0)
    fleet.trouble()
    for _ in range(fleet.random.choice((1, 2, 4))):
        fleet.run(fleet.now + fleet.delay_s(40.0))
        if fleet.random.random() < 0.3:
            _awaits_a_step(fleet)
        alive = [vm for vm in fleet.vms if vm.is_alive]
        if alive:
            fleet.take(fleet.random.choice(alive), fleet.random.choice((8.0, 30.0, 60.0, 120.0)))
        fleet.run(fleet.now + fleet.delay_s(40.0))
    fleet.faults.clear()
    fleet.run(fleet.now + 130.0)  # each deadline is over, and each VM reaches the store
    newest = fleet.whole()
    fleet.run_until(lambda: fleet.whole() != newest and fleet.commits(), 370.0)
    _hands_over(fleet)
    return fleet


def _awaits_a_step(fleet: Fleet) -> None:
    """The job starts again; run until just after the first step, at most for 20 s."""
    fleet.restart(fleet.delay_s(2.0))
    until_s = fleet.now + 20.0
    while fleet.now < until_s and fleet.start is not None:
        if fleet.start.step > fleet.start.first_step:
            return
        fleet.run(fleet.now + 0.1)


def _hands_over(fleet: Fleet) -> None:
    """F6: without faults, the next start resumes from the set that all VMs have sealed just before it."""
    start = fleet.start
    assert start is not None
    for vm in fleet.vms:
        vm.slow = 1.0
    fleet.run(fleet.now + SLOWEST * fleet.flush_s)  # a slow flush that began before ends
    newest = max(fleet.whole_sets(start), default=-1)
    fleet.run_until(lambda: max(fleet.whole_sets(start), default=-1) > newest, 120.0)
    step = max(fleet.whole_sets(start))
    fleet.restart(0.5)
    fleet.run_until(lambda: fleet.start is not None and fleet.start.trains, 120.0)
    resumed = None if fleet.start is None else fleet.start.resumed
    if resumed is None or resumed.step < step:
        raise Broken(
            f"F6: all VMs had sealed step {step}, and the next start resumes from {resumed}"
        )


_prune = cache(retention.code)


def retained(seed: int) -> retention.World:
    """Writers, operators and prunes of one bucket."""
    return retention.run_history(seed, _prune())


HISTORIES: dict[str, Callable[[int], object]] = {
    "live": live,
    "honest": honest,
    "fits": fits,
    "reconnects": reconnects,
    "gpu": live_with_gpu,
    "fleet": live_fleet,
    "retention": retained,
}


def failure_of(name: str, seed: int) -> str:
    """The violation of one history; empty if it has none."""
    try:
        HISTORIES[name](seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def silence() -> None:
    """Log nothing but critical errors."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
