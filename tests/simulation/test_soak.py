# SPDX-License-Identifier: Apache-2.0
"""An hour of contradicting sources: every urgent notice is evacuated once, and no evacuation is invented.

The world of :mod:`simulation.world` plays trainer, staging, flush and store.  The faults here are those of
the sources: their health flaps, and notices appear, repeat, move later or earlier, become more severe and
disappear.  ``SWANSONG_SEED=17`` runs one seed, and ``SWANSONG_SEEDS=500`` many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from swansong_bucket.model import Health, Notice, Severity, SourceStatus, Verdict
from swansongd.core.events import (
    Action,
    CheckFence,
    Conclude,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    SourceChanged,
    WokeUp,
)
from swansongd.core.notices import OUTLIVED_S
from swansongd.observe.phase import Phase, phase_of

from testkit.simulation.world import MIB, World
from testkit.story import a_notice

HOUR_S = 3600.0
ONE_SEED = os.environ.get("SWANSONG_SEED")
SEEDS = [int(ONE_SEED)] if ONE_SEED else range(1, 1 + int(os.environ.get("SWANSONG_SEEDS", "1")))
"""Trainers die with odd seeds only, such as the first one."""
URGENT = ("aws.spot", "gcp.preempted", "manual")
ADVISORY = ("aws.rebalance", "gcp.upcoming")


@dataclass
class Told:
    """One notice of the simulation, and the time at which the daemon could know it."""

    notice: Notice
    said: Notice
    """As it was said last: nearer, further or worse than at first."""
    urgent_s: float | None = None
    gone_s: float | None = None
    nearest_s: float = field(default=float("inf"))


class Weather(World):
    """The world with more sources, and no other faults than trainers that connect and end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.faults = {"trainer_death"} if seed % 2 else set()
        self.boundary_s, self.save_s = 1.0, 2.0
        self.size_bytes, self.bandwidth = 100 * MIB, 50 * MIB
        self.told: list[Told] = []
        self.live: dict[str, Told] = {}
        self.opened: list[tuple[float, str]] = []
        """When an evacuation began, and because of which source."""
        self.concluded: list[tuple[float, Conclude]] = []
        self.looks = 0
        self.naps = 0
        self.numbers = 0
        for happens, every_s in (
            (self._health_flaps, 5.0),
            (self._advisory_storm, 90.0),
            (self._urgent, 150.0),
            (self._sleeps, 300.0),
            (self._trainer_returns, 40.0),
        ):
            self._again_and_again(happens, every_s)

    # ------------------------------------------------------------------ what the weather does

    def _again_and_again(self, happens: Callable[[], None], every_s: float) -> None:
        def once() -> None:
            if self.now < 1000.0 + HOUR_S:
                happens()
                self.at(self.delay_s(2 * every_s), once)

        self.at(self.delay_s(2 * every_s), once)

    def _health_flaps(self) -> None:
        source = self.random.choice((*URGENT, *ADVISORY, "logind", "store"))
        self._says_health(source, self.random.choice(list(Health)))

    def _says_health(self, source: str, health: Health) -> None:
        status = SourceStatus(source=source, health=health, reason="seed", since_mono_s=self.now)
        self.step(SourceChanged(status))

    def _sleeps(self) -> None:
        self.naps += 1
        self.step(WokeUp(self.delay_s(1000)))

    def _trainer_returns(self) -> None:
        if self.trainer is None:
            self._trainer_starts()

    def _advisory_storm(self) -> None:
        for source in ADVISORY:
            told = self._new(source, self.delay_s(600), Severity.ADVISORY)
            for _ in range(20):
                self._say(told, told.notice)
            if self.random.random() < 0.5:
                self.at(self.delay_s(60), lambda told=told: self._gone(told))  # type: ignore[misc]

    def _urgent(self) -> None:
        source = self.random.choice(URGENT)
        if self.live:
            return  # one at a time, so that the effect of each is known
        begins_as = self.random.choice((Severity.ADVISORY, Severity.IMMINENT))
        told = self._new(source, 60 + self.delay_s(60), begins_as)
        self.live[source] = told
        self._say(told, told.notice)
        if begins_as is Severity.ADVISORY:  # it escalates
            worse = replace(told.notice, severity=Severity.IMMINENT)
            self.at(self.delay_s(20), lambda: self._say(told, worse))
        for _ in range(self.random.randrange(6)):
            self.at(self.delay_s(50), lambda: self._say_again(told))
        if self.random.random() < 0.5:
            self.at(20 + self.delay_s(30), lambda: self._gone(told))
        else:  # it stays until well after its time, and the VM runs
            self.at(125 + OUTLIVED_S, lambda: self._gone(told))

    def _say_again(self, told: Told) -> None:
        """The same notice: unchanged, later or earlier."""
        by_s = self.random.choice((0.0, 0.0, 500.0, -3.0))
        said = replace(told.said, deadline_mono_s=told.said.deadline_mono_s + by_s)
        self._say(told, said)

    def _new(self, source: str, in_s: float, severity: Severity) -> Told:
        self.numbers += 1
        notice = a_notice(
            source,
            deadline_mono_s=self.now + in_s,
            severity=severity,
            identity=f"{source}:{self.numbers}",
        )
        told = Told(notice, notice)
        self.told.append(told)
        return told

    def _say(self, told: Told, said: Notice) -> None:
        if told.gone_s is not None:
            return
        told.said = said
        told.nearest_s = min(told.nearest_s, said.deadline_mono_s)
        if said.severity >= Severity.IMMINENT and told.urgent_s is None:
            told.urgent_s = self.now
        self.step(NoticeRaised(said))

    def _gone(self, told: Told) -> None:
        if told.gone_s is None:
            told.gone_s = self.now
            self.live.pop(told.notice.source, None)
            self.step(NoticeWithdrawn(told.notice.source, "gone"))

    # ------------------------------------------------------------------ what came of it

    def _carry_out(self, action: Action) -> None:
        super()._carry_out(action)
        match action:
            case Mark(_, "notice", facts):
                source = str(dict(facts)["source"])
                self.opened.append((self.now, source))
                told = self.live.get(source)
                assert told is not None, f"{source}: an evacuation for a notice that is not live"
                assert told.urgent_s is not None, f"{source}: an evacuation for an advisory notice"
            case Conclude():
                self.concluded.append((self.now, action))
            case CheckFence():
                self.looks += 1

    def judge(self) -> int:
        """Check that each urgent notice led to one evacuation; returns the number of urgent notices."""
        urgent = [told for told in self.told if told.urgent_s is not None]
        again = 0
        for told in urgent:
            assert told.urgent_s is not None
            end_s = told.gone_s or self.now
            of_it = [at for at, _ in self.opened if told.urgent_s <= at <= end_s]
            assert of_it[:1] == [told.urgent_s], f"{told}: evacuations at {of_it}"
            # A later time that the source named meanwhile counts once the VM has outlived the earlier one.
            assert len(of_it) <= 2, f"{told}: evacuations at {of_it}"
            assert all(at > told.nearest_s + OUTLIVED_S for at in of_it[1:])
            again += len(of_it) - 1
            verdicts = [at for at, _ in self.concluded if told.urgent_s <= at <= end_s]
            if end_s > told.nearest_s + 0.5:  # it stayed
                assert verdicts, f"{told}: no verdict"
                assert verdicts[0] <= told.nearest_s + 0.5, f"{told}: the verdict came too late"
        assert len(self.opened) == len(urgent) + again, "as many evacuations as urgent notices"
        return len(urgent)


@pytest.mark.fault("N02", "N06", "N09", "N14", "N17")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_hour_of_contradicting_sources(seed: int) -> None:
    """Only urgent notices are evacuated, once each, with a verdict in time; then the state is IDLE."""
    world = Weather(seed)
    world.run(1000.0 + HOUR_S)
    world.run(world.now + 200)
    for told in world.told:
        world._gone(told)
    for source in (*URGENT, *ADVISORY, "logind", "store"):
        world._says_health(source, Health.OK)
    world.run(world.now + 60)
    assert world.judge() >= 5
    assert any(done.verdict is Verdict.SAFE for _, done in world.concluded)
    assert world.looks == world.naps, "each suspension causes one check of the fence"
    assert world.exit is None
    assert phase_of(world.state) is Phase.IDLE
    assert {status.health for status in world.state.notices.sources.values()} == {Health.OK}
    assert not world.state.notices.live
    assert len(world.state.course.opened) <= 64
