# SPDX-License-Identifier: Apache-2.0
"""Watches the VM that this one replaces, for as long as it may still commit (``run.handover``).

That VM records its notice in farewells: the first one when its evacuation opens, another one with each
verdict, and one without a deadline if the notice is withdrawn.  It has ended once a farewell says that its
training is over, once the deadline has passed, or once it has written no record for a long time.  A VM that
never had a notice is not awaited: nothing shows whether it still runs.

:mod:`swansongd.core.starts` claims nothing meanwhile.  The claim alone decides who may commit, so a wrong
clock or a forged farewell costs time, and never a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import structlog
from swansong_bucket.errors import StoreError
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.model import DRILL, is_drill
from swansong_bucket.runs import catalog, commit

from swansongd.core.events import PredecessorDenied, PredecessorFound
from swansongd.core.starts import PREDECESSOR_SILENCE_S
from swansongd.core.state import Predecessor
from swansongd.restore.context import RestoreContext

_LOOK_INTERVAL_S = 0.5
_QUIET_INTERVAL_S = 5.0
"""The same while no other VM is awaited, and no trainer has asked."""
_TURN_S = 0.05
_OUTLIVES_S = 3.0
"""After a deadline that was only assumed, a VM that trains on writes a farewell each second."""
_FAREWELLS_MAX = 5
"""Number of newest farewells that are read at each look: the keys of one second have no order."""

_log = structlog.get_logger(__name__)


class PredecessorWatch:
    """Posts PredecessorFound until this VM has claimed a generation.

    Args:
        context: of the run.
        own_starts: returns the ids of the starts of this VM, which await nothing.
        waits: called with the generation at each look while the other VM trains.
        wall: seconds since the epoch, to compare with the times in farewells.
    """

    def __init__(
        self,
        context: RestoreContext,
        own_starts: Callable[[], Collection[str]],
        waits: Callable[[int], None],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._own_starts = own_starts
        self._waits = waits
        self._wall = wall
        self._generation = 0
        self._newest_generation = 0
        self._last: object = None
        """The newest records that were seen."""
        self._changed_mono_s = context.monotonic()
        """When they were seen first."""

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        threading.Thread(target=self._run, name="predecessor", daemon=True).start()

    def _run(self) -> None:
        stop = self._context.stop
        while not stop.wait(_TURN_S):
            other = self._context.state().starts.predecessor
            if other is None:
                return
            if not self._is_due(other):
                continue
            try:
                found = self._look()
            except StoreError:  # no claim succeeds either
                stop.wait(_LOOK_INTERVAL_S)
            except Exception as error:
                _log.exception("predecessor_fault", error=str(error))
                self._context.post(PredecessorDenied(f"{type(error).__name__}: {error}"))
                return
            else:
                self._context.post(found)
                if found.generation:
                    self._waits(found.generation)

    def _is_due(self, other: Predecessor) -> bool:
        """Whether it is time for a look; a claim that is due waits for a new one."""
        if other.due_mono_s is not None and other.looked_mono_s < other.due_mono_s:
            return True
        interval_s = _LOOK_INTERVAL_S if other.generation else _QUIET_INTERVAL_S
        return self._context.monotonic() >= other.looked_mono_s + interval_s

    def _look(self) -> PredecessorFound:
        """How long the VM of the newest generation may still commit.

        Raises:
            CorruptError, StoreError: see :func:`swansong_bucket.runs.catalog.claimed`.
        """
        store, keys = self._context.store, self._context.keys
        looked_mono_s = self._context.monotonic()
        self._generation = catalog.newest_generation(store, keys, above=self._generation - 1)
        claim = catalog.claim_of(store, keys, self._generation) if self._generation > 0 else None
        if claim is None or claim.start in self._own_starts():
            return PredecessorFound(looked_mono_s)
        stopped = self._context.stop.is_set
        found = catalog.farewells_of(store, keys, self._generation, stopped, count=_FAREWELLS_MAX)
        real = [each for each in found if not _is_of_drill(each)]
        last = max(real, key=_place, default=None)
        if last is None or (last.training is not None and last.training.is_over):
            return PredecessorFound(looked_mono_s)
        newest = commit.newest_whole(store, keys, near=self._newest_generation)
        if newest is not None:
            self._newest_generation = newest.ref.generation
        if (last, newest) != self._last:
            self._last, self._changed_mono_s = (last, newest), looked_mono_s
        silent_s = max(self._age_s(last, newest), looked_mono_s - self._changed_mono_s)
        left_s = PREDECESSOR_SILENCE_S - silent_s
        is_leaving = last.deadline_s is not None
        if last.deadline_s is not None:
            ends_wall_s = last.opened_wall_s + last.deadline_s
            if last.is_assumed:
                ends_wall_s = max(ends_wall_s, last.written_wall_s + _OUTLIVES_S)
            left_s = min(left_s, ends_wall_s - self._wall())
        if left_s <= 0:
            return PredecessorFound(looked_mono_s)
        ref = None if newest is None else newest.ref
        return PredecessorFound(looked_mono_s, self._generation, left_s, is_leaving, ref)

    def _age_s(self, last: RecordedEvacuation, newest: catalog.Commit | None) -> float:
        """The age of the newest of these records; 0 if the store returns no ages."""
        age_s = self._wall() - last.written_wall_s
        return age_s if newest is None else min(age_s, newest.age_s or 0.0)


def _place(recorded: RecordedEvacuation) -> tuple[float, ...]:
    """The order of farewells: their own times have whole seconds."""
    entries = len(recorded.timeline) + recorded.left_out
    return recorded.opened_wall_s, recorded.written_wall_s, -recorded.slack_s, entries


def _is_of_drill(recorded: RecordedEvacuation) -> bool:
    return recorded.source == DRILL or is_drill(frozenset({recorded.evacuation_id}))
