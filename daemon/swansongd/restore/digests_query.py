# SPDX-License-Identifier: Apache-2.0
"""Answers a trainer that asks for the digests of the start that it continues.

The daemon knows them if that start was on this VM.  Otherwise they are in the farewells of the generation
from which this daemon has restored; no other generation is read, whatever a trainer asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from swansong.protocol import Redone, RedoneQuery
from swansong_bucket.errors import SwansongError
from swansong_bucket.runs import catalog
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.util.threads import Worker

from swansongd.observe.step_digests import Digests, RedoneWatch
from swansongd.restore.context import RestoreContext
from swansongd.trainers.admission import Reply

BUDGET_S = 30.0
"""Longest time of a read: the comparison is over if the trainer has passed the steps."""
_QUERIES_MAX = 256

_log = structlog.get_logger(__name__)


class RedoneAnswers:
    """Answers queries in one thread; farewells are read once for each restored generation.

    Args:
        context: of the run.
        watch: the digests that this daemon has seen.
        restored: returns the generation of the newest restored checkpoint; -1 without one.
    """

    def __init__(
        self, context: RestoreContext, watch: RedoneWatch, restored: Callable[[], int]
    ) -> None:
        self._context = context
        self._watch = watch
        self._restored = restored
        self._worker = Worker("redone", tasks_max=_QUERIES_MAX)
        self._read: tuple[int, Digests] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def ask(self, query: RedoneQuery, reply: Reply) -> None:
        """Queue a query; if the queue is full, the trainer compares nothing."""
        self._worker.submit(lambda: self._answer(query, reply))

    def _answer(self, query: RedoneQuery, reply: Reply) -> None:
        digests = self._watch.of_rank(query.parent, query.rank)
        if not digests and query.generation >= 0 and query.generation == self._restored():
            digests = self._of_farewells(query.generation).get(query.rank, ())
        reply(Redone(query.parent, list(digests)))

    def _of_farewells(self, generation: int) -> Digests:
        if self._read is not None and self._read[0] == generation:
            return self._read[1]
        context = self._context
        store = Retrying(context.store, budget_s=BUDGET_S, stop=context.stop)
        found: dict[int, tuple[str, ...]] = {}
        try:
            said = catalog.farewells_of(store, context.keys, generation)
        except SwansongError as error:
            _log.info("redone_steps_unknown", generation=generation, reason=error.line())
            return found
        for farewell in sorted(said, key=lambda each: each.written_wall_s):
            found.update(farewell.digests)
        self._read = generation, found
        return found
