# SPDX-License-Identifier: Apache-2.0
"""Watches the VM that this one replaces, for as long as it may still commit (``run.handover``).

That VM records its notice in farewells: the first one when its evacuation opens, another one with each
verdict, and one without a deadline if the notice is withdrawn.  It has ended once a farewell says that it
commits nothing any more, once the deadline has passed, or once it has written no record for a long time.
A VM that never had a notice is not awaited: nothing shows whether it still runs.

:mod:`swansongd.core.starts` claims nothing meanwhile.  The claim alone decides who may commit, so a wrong
clock or a forged farewell costs time, and never a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from heapq import nlargest

import structlog
from swansong_bucket.errors import CorruptError, Permanent, StoreError
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.model import DRILL, PEER_SOURCE, is_drill
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.history import newness
from swansong_bucket.util.threads import lasting_thread

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
_FAREWELLS_MAX = 100
"""Number of the newest farewells of a generation that are read, each once."""
_STARTS_MAX = 8
"""Number of starts of the other VM whose farewells are read: it may train again since its notice."""

_log = structlog.get_logger(__name__)


class PredecessorWatch:
    """Posts PredecessorFound until this VM has claimed a generation.

    Args:
        context: of the run.
        owns: whether a start of this VM holds a claim: it awaits nothing.
        waits: called at each look while the other VM trains, with words for it.
        wall: seconds since the epoch, to compare with the times in farewells.
    """

    def __init__(
        self,
        context: RestoreContext,
        owns: Callable[[ClaimObject], bool],
        waits: Callable[[str], None],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._owns = owns
        self._waits = waits
        self._wall = wall
        self._generation = 0
        self._read: dict[str, RecordedEvacuation | None] = {}
        """Farewells by key; None for a damaged one."""
        self._newest_generation = 0
        self._last: object = None
        """The newest records that were seen."""
        self._changed_mono_s = context.monotonic()
        """When they were seen first."""

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        lasting_thread("predecessor", self._run).start()

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
            except Permanent as error:  # a missing right would block every start
                self._deny(error.line())
                return
            except StoreError:  # no claim succeeds either
                stop.wait(_LOOK_INTERVAL_S)
            except Exception as error:
                _log.exception("predecessor_fault", error=str(error))
                self._deny(f"{type(error).__name__}: {error}")
                return
            else:
                self._context.post(found)
                if found.generation:
                    kind = "has a notice" if found.is_leaving else "trains on after its notice"
                    self._waits(f"the VM of generation {found.generation}, which {kind}")

    def _deny(self, reason: str) -> None:
        self._context.post(PredecessorDenied(reason))

    def _is_due(self, other: Predecessor) -> bool:
        """Whether it is time for a look; a claim that is due waits for a new one."""
        if other.looked_mono_s < other.due_mono_s < math.inf:
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
        if claim is None or self._owns(claim) or self._context.state().start_of(claim.start):
            return PredecessorFound(looked_mono_s)
        last = self._last_farewell(claim)
        has_ended = last is not None and last.is_ended and last.generation == claim.generation
        if last is None or has_ended:
            return PredecessorFound(looked_mono_s)
        newest = commit.newest_whole(store, keys, near=self._newest_generation)
        if newest is not None:
            self._newest_generation = newest.ref.generation
        records = claim, last, newest
        if records != self._last:
            self._last, self._changed_mono_s = records, looked_mono_s
        ages_s = [self._wall() - last.written_wall_s]
        if newest is not None:
            ages_s.append(newest.age_s or 0.0)
        claimed_wall_s = wall.instant_s(claim.identity.get("claimed", ""))
        if claimed_wall_s is not None:
            ages_s.append(self._wall() - claimed_wall_s)
        silent_s = max(min(ages_s), looked_mono_s - self._changed_mono_s)
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

    def _last_farewell(self, claim: ClaimObject) -> RecordedEvacuation | None:
        """The newest farewell of the VM with this claim, which may have started again since."""
        store, keys, vm = self._context.store, self._context.keys, claim.identity.get("vm")
        for generation in range(claim.generation, max(0, claim.generation - _STARTS_MAX), -1):
            if generation < claim.generation:
                earlier = catalog.claim_of(store, keys, generation)
                if vm is None or earlier is None or earlier.identity.get("vm") != vm:
                    return None
            found = [each for each in self._farewells(generation) if not _is_of_drill(each)]
            if found:
                newest = max(found, key=lambda each: each.opened_wall_s)
                # The clock may have been set since: entries tell the order within an evacuation.
                same = (each for each in found if each.evacuation_id == newest.evacuation_id)
                return max(same, key=newness)
        return None

    def _farewells(self, generation: int) -> list[RecordedEvacuation]:
        store, keys = self._context.store, self._context.keys
        names = (info.key for info in store.list(keys.farewell_prefix(generation)))
        found = []
        for key in nlargest(_FAREWELLS_MAX, names):
            if key not in self._read:
                try:
                    place = (keys.run, generation)
                    self._read[key] = catalog.own_record(store, key, place, farewells.decode)
                except (CorruptError, Permanent):
                    self._read[key] = None
            found.append(self._read[key])
        return [each for each in found if each is not None]


def _is_of_drill(recorded: RecordedEvacuation) -> bool:
    """Whether no real notice has joined the drill."""
    is_named = recorded.source == DRILL or is_drill(frozenset({recorded.evacuation_id}))
    return is_named and all(each.source in (DRILL, PEER_SOURCE) for each in recorded.notices)
