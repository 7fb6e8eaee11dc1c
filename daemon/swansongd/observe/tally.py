# SPDX-License-Identifier: Apache-2.0
"""An observer that remembers what only readers of the status want: failed saves, refused ranks, dropped sets.

No decision depends on it.  Instants called ``*_mono_s`` are of this VM's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swansongd.core.events import (
    CommitDone,
    Log,
    PartsCounted,
    TrainerFailed,
)
from swansongd.core.state import State
from swansongd.observe.facts import NewestDated, TrainerRefused
from swansongd.observe.observer import Observation
from swansongd.observe.status import (
    DroppedStatus,
    FailedSavesStatus,
    FailedSaveStatus,
    RefusedStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures at one moment.  The report sets their ages, from the instants."""

    refused: RefusedStatus = field(default_factory=RefusedStatus)
    refused_mono_s: float | None = None
    failed_saves: FailedSavesStatus = field(default_factory=FailedSavesStatus)
    """A checkpoint counts once although each of its ranks may report the failure; the first one is named."""
    failed_mono_s: float = 0.0
    failed_request_id: str = ""
    """Empty for a checkpoint of the trainer's own schedule."""
    dropped: DroppedStatus = field(default_factory=DroppedStatus)
    dropped_mono_s: float | None = None
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
                refused = RefusedStatus(count=self.figures.refused.count + 1, last=reason or None)
                self._put(refused=refused, refused_mono_s=now_mono_s)
            case TrainerFailed(failed_step=int()):
                self._record_failed(before, event, now_mono_s)
        for action in actions:
            match action:
                case Log(event="unsent_set_dropped", facts=(("step", int(step)), *_)):
                    dropped = DroppedStatus(count=self.figures.dropped.count + 1, step=step)
                    self._put(dropped=dropped, dropped_mono_s=now_mono_s)

    def _record_failed(self, before: State, event: TrainerFailed, now_mono_s: float) -> None:
        failed, request_id = self.figures.failed_saves, event.request_id
        last_step = None if failed.last is None else failed.last.step
        if (request_id, event.failed_step) == (self.figures.failed_request_id, last_step):
            return
        trainer = before.ranks.on(event.connection)
        rank = None if trainer is None else trainer.rank
        last = FailedSaveStatus(step=event.failed_step, rank=rank, reason=event.reason, age_s=0.0)
        self._put(
            failed_saves=FailedSavesStatus(count=failed.count + 1, last=last),
            failed_mono_s=now_mono_s,
            failed_request_id=request_id,
        )

    def _put(self, **changed: object) -> None:
        self.figures = replace(self.figures, **changed)  # type: ignore[arg-type]
