# SPDX-License-Identifier: Apache-2.0
"""Sources that contradict themselves: for minutes, each poll withdraws, delays or renames the notice.

The world of :mod:`simulation.world` plays trainer, staging, flush and store, and checks its invariants after
every event: a SAFE verdict names no state from before the request.  ``make simulate`` runs more seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from swansong_bucket.model import DeadlineQuality, Notice, Severity, Verdict
from swansongd.core import notices
from swansongd.core.events import Action, Log, Mark, NoticeRaised, NoticeWithdrawn

from testkit.simulation.world import MIB, World, restart_alone
from testkit.story import a_notice

ONE_SEED = os.environ.get("SWANSONG_SEED")
SEEDS = [int(ONE_SEED)] if ONE_SEED else range(int(os.environ.get("SWANSONG_SEEDS", "1")))
MINUTES = 3


class Unsteady(World):
    """The world with one source that changes its notice at each poll, and a daemon that dies at times."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.faults.clear()
        self.boundary_s, self.save_s = 0.2, 0.1
        self.size_bytes, self.bandwidth = MIB, 200 * MIB
        self.opened: list[str] = []
        """Ids of the evacuations, in order."""
        self.lines = 0

    def _carry_out(self, action: Action) -> None:
        match action:
            case Mark(evacuation_id, "notice", _):
                self.opened.append(evacuation_id)
            case Log(event=event) if event != "committed":
                self.lines += 1
        super()._carry_out(action)

    def polls(self, says: Callable[[int], Notice | None], *, every_s: float = 1.0) -> None:
        """The source is polled once a second; the daemon is restarted four times meanwhile."""
        before: Notice | None = None
        restarts = {self.random.randrange(MINUTES * 60) for _ in range(4)}
        for poll in range(MINUTES * 60):
            self.run(self.now + every_s)
            notice = says(poll)
            if notice is not None:
                self.step(NoticeRaised(notice))
            elif before is not None:
                self.step(NoticeWithdrawn(before.source, "gone"))
            before = notice
            if poll in restarts:
                restart_alone(self)


def flips(world: Unsteady) -> Callable[[int], Notice | None]:
    """GCP's ``preempted`` alternates between TRUE and FALSE; its identity is that of the boot."""

    def says(poll: int) -> Notice | None:
        if poll % 2:
            return None
        notice = a_notice("gcp.preempted", deadline_mono_s=world.now + 25)
        return replace(notice, deadline_quality=DeadlineQuality.ASSUMED)

    return says


def recedes(world: Unsteady) -> Callable[[int], Notice | None]:
    """The stated time is always a few seconds away."""
    return lambda poll: a_notice("aws.spot", deadline_mono_s=world.now + 3)


def is_past(world: Unsteady) -> Callable[[int], Notice | None]:
    """The stated time is always just in the past."""
    return lambda poll: a_notice(
        "aws.scheduled", deadline_mono_s=world.now - 1, severity=Severity.SCHEDULED
    )


def alternates(world: Unsteady) -> Callable[[int], Notice | None]:
    """Each poll shows another event."""
    return lambda poll: a_notice(
        "aws.scheduled",
        deadline_mono_s=world.now + 60,
        severity=Severity.SCHEDULED,
        identity=f"event {poll}",
    )


@pytest.mark.fault("N09", "N17")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [flips, recedes, is_past, alternates])
def test_an_unsteady_source_costs_a_few_checkpoints_a_minute(
    seed: int, kind: Callable[[Unsteady], Callable[[int], Notice | None]]
) -> None:
    """Evacuations are limited, their ids never return, and in the end a real notice is evacuated."""
    world = Unsteady(seed)
    world.run(world.now + 20)
    world.polls(kind(world))
    daemons = 5  # each counts again
    limit = daemons * notices.AT_ONCE + MINUTES * 60 / notices.EVERY_S
    assert world.opened, "no evacuation at all"
    assert len(world.opened) <= limit
    assert world.lines <= 3 * MINUTES * 60, "log lines besides those of the evacuations"
    # A restarted daemon opens its evacuation again.
    assert len(set(world.opened)) >= len(world.opened) - daemons, "ids that return"
    world.step(NoticeWithdrawn("gcp.preempted", "gone"))
    world.step(NoticeWithdrawn("aws.spot", "gone"))
    world.run(world.now + 60)
    world.verdict = None
    assert world.trainer is not None
    stood_at = world.trainer.step
    world.raise_notice(30, source="logind", severity=Severity.SHUTTING_DOWN)
    world.run(world.now + 25)
    assert world.verdict is not None
    assert world.verdict.verdict is Verdict.SAFE
    assert world.verdict.commit is not None
    assert world.verdict.commit.step > stood_at
