# SPDX-License-Identifier: Apache-2.0
"""An observer that remembers what only readers of the status want: failed saves, refused ranks, dropped sets.

No decision depends on it.  Instants called ``*_mono_s`` are of this VM's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swansongd.core.events import (
    CommitDone,
    Log,
    PartsCounted,
    TrainerFailed,
)
from swansongd.core.state import State
from swansongd.observe.facts import NewestDated, TrainerRefused
from swansongd.observe.observer import Observation


@dataclass(frozen=True, slots=True)
class RefusedRanks:
    """Processes that were refused because another one has their rank: number and last one."""

    count: int = 0
    reason: str = ""
    mono_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FailedSaves:
    """Checkpoints that the trainer failed to write since the daemon started: number and last one.

    A checkpoint counts once although each of its ranks may report the failure.
    """

    count: int = 0
    request_id: str = ""
    """Empty for a checkpoint of the trainer's own schedule."""
    step: int | None = None
    rank: int | None = None
    """The first rank that reported the failure."""
    reason: str = ""
    mono_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DroppedSets:
    """Sealed sets that were deleted unsent since the daemon started, because newer ones supersede them."""

    count: int = 0
    step: int | None = None
    """Step of the newest one."""
    mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures at one moment."""

    refused: RefusedRanks = RefusedRanks()
    failed_saves: FailedSaves = FailedSaves()
    dropped: DroppedSets = DroppedSets()
    committed_mono_s: float | None = None
    """When the newest whole commit became whole.  For a commit that a claim found it is known once its
    manifest is read, by the wall clocks of two VMs."""


class Tally:
    """Keeps the figures; an :class:`~swansongd.observe.observer.Observer`."""

    def __init__(self) -> None:
        self.figures = Figures()
        """Replaced with each change, so any thread may read it."""

    def observe(self, observation: Observation) -> None:
        """Take note of one decision."""
        before, after, event, actions, now_mono_s = observation
        newest = after.commits.last_complete
        if newest != before.commits.last_complete:
            is_made_now = isinstance(event, CommitDone | PartsCounted)
            self._put(committed_mono_s=now_mono_s if is_made_now else None)
        other, was = after.starts.predecessor, before.starts.predecessor
        if other and other.newest and other.newest != (was and was.newest):
            self._put(committed_mono_s=now_mono_s)
        match event:
            case NewestDated(ref, age_s) if ref == newest and self.figures.committed_mono_s is None:
                self._put(committed_mono_s=now_mono_s - age_s)
            case TrainerRefused(_, reason):
                count = self.figures.refused.count + 1
                self._put(refused=RefusedRanks(count, reason, now_mono_s))
            case TrainerFailed(failed_step=int()):
                self._record_failed(before, event, now_mono_s)
        for action in actions:
            match action:
                case Log(event="unsent_set_dropped", facts=(("step", int(step)), *_)):
                    count = self.figures.dropped.count + 1
                    self._put(dropped=DroppedSets(count, step, now_mono_s))

    def _record_failed(self, before: State, event: TrainerFailed, now_mono_s: float) -> None:
        trainer, last = before.ranks.on(event.connection), self.figures.failed_saves
        if (event.request_id, event.failed_step) != (last.request_id, last.step):
            failed = FailedSaves(
                last.count + 1,
                event.request_id,
                event.failed_step,
                None if trainer is None else trainer.rank,
                event.reason,
                now_mono_s,
            )
            self._put(failed_saves=failed)

    def _put(self, **changed: object) -> None:
        self.figures = replace(self.figures, **changed)  # type: ignore[arg-type]
