# SPDX-License-Identifier: Apache-2.0
"""Two VMs of one run, of which the second replaces the first: random histories in a simulated world.

The decisions, the farewells, the claims, the commits and the look at the other VM are production code.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.model import CommitRef
from swansongd.core.events import (
    CheckComplete,
    ClaimGeneration,
    CommitManifest,
    Conclude,
    Exit,
    Mark,
    PredecessorDenied,
    Rescan,
    WithdrawClaim,
)
from swansongd.core.starts import PREDECESSOR_SILENCE_S
from swansongd.core.state import Predecessor
from swansongd.observe.accounting import Accounting, last_report
from swansongd.observe.observer import Observation
from swansongd.observe.phase import Phase, phase_of
from swansongd.observe.timeline import Timeline, recorded
from swansongd.restore.context import RestoreContext
from swansongd.restore.predecessor import PredecessorWatch

from testkit.simulation.bucket import KEYS, Committer, SimStore, restored
from testkit.story import Story

pytestmark = pytest.mark.fault("OE04", "H05")

WALL_S = 1.8e9
"""Difference between the wall clock and the monotonic one."""
SEEDS = 100
EVENTS = {
    "train": 8, "save": 4, "notice": 2, "withdraw": 1, "leave": 0.5, "stop": 0.5, "continue": 1,
    "restart": 0.7, "power cut": 0.3, "network": 0.3, "boot": 1, "ask": 2, "takeover": 0.1,
}  # fmt: skip
"""Events, by how often they happen."""
REACHED = (Phase.AWAITING_HANDOVER, Phase.STANDING_BY, Phase.FENCED)


class Vm(Story):
    """A daemon with its trainer."""

    def __init__(self, world: World, start_id: str) -> None:
        super().__init__(claimed=False, handover=True)
        self.world = world
        self.start_id = start_id
        self.grants = False
        self.is_stopped = False
        self.is_over = False
        self.has_network = True
        """False: its farewells are lost."""
        self.told: list[Farewell] = []
        self.step = 0
        self.timeline = Timeline("", 0.0)
        self.accounting = Accounting(lambda _resume: None, self._say)
        self.committer = Committer(
            world.store, None, self.tell, lambda _within_s, happens: happens(), vm=start_id
        )
        self.starts_made = 1

    @property
    def connection(self) -> int:
        return self.state.connected[0].connection

    @property
    def runs(self) -> bool:
        return not (self.is_stopped or self.is_over)

    def boot(self) -> None:
        self.scan()
        self.committer.read_run()

    def train(self) -> None:
        if self.state.connected and self.state.generation is not None:
            self.step += 1
            self.progress(self.step, self.connection)

    def save(self) -> None:
        """Seal a set for the request, or without one, and send it."""
        if not self.state.connected:
            return
        request = next((r for r in self.state.requests_made if r.is_waiting), None)
        if request is not None:
            self.accept(self.step, self.connection)
            self.answer(self.step, f"n{len(self.staging)}", self.connection)
        elif self.step > max((staged.id.step for staged in self.staging), default=-1):
            self.seal(self.step, f"n{len(self.staging)}", start_id=self.start_id)
        while self.state.flush.flight is not None and not self.is_over:
            self.flushed()

    def restart(self) -> None:
        """The trainer starts again, and claims another generation."""
        for trainer in self.state.connected:
            self.leave(trainer.connection)
        self.starts_made += 1
        self.start_id = f"{self.start_id[:3]}-{self.starts_made}"
        self.join(self.starts_made, pid=100 * self.starts_made, start_id=self.start_id)
        if not self.is_over:
            self.starts(0, self.starts_made, start_id=self.start_id)
            self.step = 0

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        before, after, event, actions, now_mono_s = observation
        self.accounting.record(before, after, event, now_mono_s)
        for action in actions:
            self._carry_out(action)
        self.accounting.observe(observation)

    def _carry_out(self, action: Any) -> None:
        match action:
            case ClaimGeneration():
                self.committer.claim(action)
            case WithdrawClaim():
                self.committer.withdraw_claim()
            case CommitManifest():
                self.committer.commit(action)
            case CheckComplete():
                self.committer.check_complete(action)
            case Mark():
                if action.evacuation_id != self.timeline.evacuation_id:
                    self.timeline = Timeline(action.evacuation_id, self.now)
                self.timeline.add(action, self.now)
            case Conclude():
                self._say(action, self.now)
            case Exit():
                self.is_over = True
            case Rescan():
                self.scan()

    def _say(self, conclusion: Conclude, now_mono_s: float) -> None:
        """Write a farewell."""
        generation, now_wall_s = self.state.newest_generation, WALL_S + now_mono_s
        if generation is None or not self.has_network:
            return
        training = last_report(
            self.accounting.training, self.state, now_mono_s=now_mono_s, now_wall_s=now_wall_s
        )
        made = Farewell(
            run="r",
            generation=generation,
            conclusion=conclusion,
            evacuation=recorded(
                self.timeline,
                self.state,
                (),
                node=0,
                offset_s=WALL_S,
                is_over=training is not None and training.is_over,
            ),
            training=training,
            written=wall.text(math.floor(now_wall_s)),
        )
        self.told.append(made)
        # As in the bucket: the keys of one second have no order.
        stamp = f"{math.floor(now_mono_s):06}-{self.world.random.getrandbits(16):04x}"
        self.world.store.put(KEYS.farewell(generation, stamp), farewells.encode(made))


class World:
    """The first VM trains; the second one starts at any moment."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.store = SimStore()
        self.old = Vm(self, "old")
        self.old.boot()
        self.old.join(start_id="old")
        self.old.starts(0, start_id="old")
        self.next: Vm | None = None
        self.watch: PredecessorWatch | None = None
        self.is_released = False
        """The operator has ended the wait."""
        self.has_claimed = False
        self.newest: CommitRef | None = None
        """The newest commit at the claim of the second VM."""
        self._written = 0
        self._wrote_mono_s = self.now

    def happens(self, what: str, after_s: float | None = None) -> None:
        """One event, if it is possible now; then both daemons have their turns."""
        self.now += self.random.choice((0.0, 0.3, 2.0, 20.0)) if after_s is None else after_s
        for vm in filter(None, (self.old, self.next)):
            vm.now = max(vm.now, self.now)
        old, new = self.old, self.next
        match what:
            case "stop" | "continue":
                old.is_stopped = what == "stop"
            case "power cut":
                old.is_over = True
            case "network":
                old.has_network = not old.has_network
            case "boot" if new is None:
                self._boot()
            case "ask" if new is not None and not new.state.connected:
                new.join(start_id="new")
            case "takeover" if new is not None:
                self.is_released = True
                new.tell(PredecessorDenied("swansong takeover"))
            case "notice" | "withdraw" | "train" | "save" | "leave" | "restart" if old.runs:
                getattr(old, what)()
        if old.runs:
            old.wait(0)
        if len(self.store.objects) != self._written:
            self._written, self._wrote_mono_s = len(self.store.objects), self.now
        if self.next is not None:
            self._turn(self.next)

    def _boot(self) -> None:
        self.next = new = Vm(self, "new")
        new.now = self.now
        new.state = replace(new.state, starts=replace(new.state.starts, predecessor=Predecessor()))
        staging: Any = None
        self.watch = PredecessorWatch(
            RestoreContext(
                self.store,
                KEYS,
                staging,
                lambda: new.state,
                threading.Event(),
                monotonic=lambda: self.now,
            ),
            new.committer.claimant.owns,
            lambda _generation: None,
            wall=lambda: WALL_S + self.now,
        )
        new.boot()

    def _turn(self, new: Vm) -> None:
        if self.watch is not None and new.state.starts.predecessor is not None:
            new.tell(self.watch._look())
        new.wait(0)
        if not self.has_claimed and new.state.generation is not None:
            self.has_claimed = True
            found = restored(self.store)
            self.newest = None if found is None else found.ref
            assert self._may_claim(), "the next VM did not wait"

    def _may_claim(self) -> bool:
        if self.is_released or not self.old.told:
            return True
        last = self.old.told[-1]
        if last.evacuation.is_ended and not self.old.state.connected:
            return True
        opened_wall_s, deadline_s = last.evacuation.opened_wall_s, last.evacuation.deadline_s
        is_late = deadline_s is not None and WALL_S + self.now >= opened_wall_s + deadline_s
        return is_late or self.now >= self._wrote_mono_s + PREDECESSOR_SILENCE_S


def test_the_next_vm_waits_for_the_end_and_no_longer() -> None:
    """VMs stop and continue, notices are withdrawn, farewells are lost, trainers and VMs end at any moment.

    The claim of the next VM comes after the last commit of the other one.  While that one trains, the next VM
    claims only if no farewell arrives, or if the operator says so.
    """
    reached = Counter[str]()
    for seed in range(SEEDS):
        world = World(seed)
        shown = set()
        for what in world.random.choices([*EVENTS], weights=[*EVENTS.values()], k=60):
            world.happens(what)
            shown |= {phase_of(vm.state) for vm in (world.old, world.next) if vm is not None}
        for what in ("boot", "ask", *["nothing"] * 20):
            world.happens(what, PREDECESSOR_SILENCE_S / 15)
        assert world.has_claimed, f"seed {seed}: the next VM waits without end"
        for what in ("continue", "train", "notice", "save"):
            world.happens(what)
        found = restored(world.store)
        assert (None if found is None else found.ref) == world.newest, f"seed {seed}"
        reached.update(shown)
    assert min(reached[phase] for phase in REACHED) > SEEDS / 20, reached
