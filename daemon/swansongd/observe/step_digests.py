# SPDX-License-Identifier: Apache-2.0
"""Keeps the digests of steps that ranks report, and the results of their comparisons.

The digests go into the farewell.  A trainer that resumes asks for the digests of the start that it continues:
:mod:`swansongd.restore.digests_query` answers.  No decision depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from swansong import bounds

from swansongd.core.events import Log
from swansongd.core.state import State
from swansongd.observe.decision_log import DecisionLog
from swansongd.observe.facts import StepsCompared, StepsDigested
from swansongd.observe.observer import Observation

_STARTS_MAX = 2
"""The start that trains, and the one that it continues."""
_LEAST = 4
"""Digests of each rank in a farewell, however many ranks there are."""

Digests = Mapping[int, tuple[str, ...]]
"""By rank, in the order of the steps."""


class RedoneWatch:
    """Keeps the newest digests; an :class:`~swansongd.observe.observer.Observer`.

    Args:
        log: gets one line for each comparison.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._by_start: Mapping[str, Digests] = {}
        """Replaced with each change, so any thread may read it."""
        self.compared: Mapping[int, StepsCompared] = {}
        """By rank: the result of the newest start.  Replaced with each change, so any thread may read it."""
        self._start_id = ""
        """The newest start."""

    def observe(self, observation: Observation) -> None:
        """Take the digests and results of one event."""
        _, after, event, _, now_mono_s = observation
        start_id = "" if after.start is None else after.start.id
        if start_id != self._start_id:
            self._start_id, self.compared = start_id, {}
        match event:
            case StepsDigested(connection, digests):
                self._keep(after, connection, digests)
            case StepsCompared(connection):
                trainer = after.ranks.on(connection)
                if trainer is not None:
                    self.compared = {**self.compared, trainer.rank: event}
                    level = "warning" if event.differs else "info"
                    facts = (("rank", trainer.rank), ("result", event.text))
                    self._log.write(Log(level, "redone_steps", facts), now_mono_s)
            case _:
                pass

    def _keep(self, state: State, connection: int, digests: tuple[str, ...]) -> None:
        trainer = state.ranks.on(connection)
        if trainer is None or not trainer.start_id:
            return
        of_start = dict(self._by_start.get(trainer.start_id, {}))
        kept = (*of_start.get(trainer.rank, ()), *digests)[-bounds.DIGESTS_MAX :]
        of_start[trainer.rank] = kept
        others = {s: d for s, d in self._by_start.items() if s != trainer.start_id}
        newest = {**others, trainer.start_id: of_start}
        self._by_start = dict(list(newest.items())[-_STARTS_MAX:])

    def of_rank(self, start_id: str, rank: int) -> tuple[str, ...]:
        """The digests of one rank of a start that this daemon has seen."""
        return self._by_start.get(start_id, {}).get(rank, ())

    def for_farewell(self, state: State, generation: int) -> Digests:
        """The newest digests of the start of a generation, as many as a farewell may contain."""
        start = state.start
        if start is None or start.generation != generation:
            return {}
        found = self._by_start.get(start.id, {})
        ranks = sorted(found)[: bounds.FAREWELL_DIGESTS_MAX // _LEAST]
        most = max(_LEAST, bounds.FAREWELL_DIGESTS_MAX // max(1, len(ranks)))
        return {rank: found[rank][-most:] for rank in ranks}
