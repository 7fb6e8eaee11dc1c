# SPDX-License-Identifier: Apache-2.0
"""The figures of one run.  A further reading costs two listings, and a request for each new object."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

import structlog
from swansong_bucket.errors import CorruptError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs.commit import newest_whole_commit
from swansong_bucket.runs.lives import lives_of
from swansong_bucket.runs.run import RecordedCommit, Run
from swansong_bucket.stores.base import ObjectStore

from swansong_tools.economics import cost
from swansong_tools.economics import loss as losses
from swansong_tools.economics.cost import Prices
from swansong_tools.exporter import figures
from swansong_tools.exporter.figures import MirrorLag, RunFigures, RunLosses

RECORDS_MAX = 20_000
"""Limit of the remembered objects of one kind."""

_log = structlog.get_logger(__name__)


class RunReader:
    """Reads one run, and remembers the facts of its objects.

    Args:
        prices: for the cost of the loss; None: no cost.
        stop: ends the reading.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        prices: Prices | None,
        *,
        stop: threading.Event,
        monotonic: Callable[[], float],
    ) -> None:
        self.run = Run(
            store,
            keys,
            records_max=RECORDS_MAX,
            on_damaged=self._log_damaged,
            stop=stop,
            monotonic=monotonic,
        )
        self._prices = prices
        self._losses: tuple[Hashable, RunLosses] | None = None

    def read(self, now_wall_s: float) -> RunFigures:
        """Read the new objects of the listing.

        Raises:
            StoreError: a request to the store failed.
            Stopped: ``stop`` was set.
        """
        run = self.run
        run.read_commits(commit for commit in run.commits if commit.is_complete)
        run.farewells.read(run.farewells.infos)
        run.resumptions.read(run.resumptions.infos)
        whole = self._whole()
        counts, sizes_bytes = figures.by_kind(whole)
        evacuated = figures.evacuations(run.farewells.facts, now_wall_s=now_wall_s)
        lost = self._lost()  # reads claims: before the damaged objects are counted
        created_s = [each.created_wall_s for each in whole if each.created_wall_s is not None]
        return RunFigures(
            run=run.keys.run,
            read_wall_s=now_wall_s,
            generation=run.generation,
            newest=whole[0] if whole else None,
            oldest_created_wall_s=min(created_s, default=None),
            commits=counts,
            commit_bytes=sizes_bytes,
            incomplete=sum(not commit.is_complete for commit in run.commits),
            pins=run.pins,
            damaged=run.damaged,
            left_out=run.left_out,
            foreign=run.foreign,
            evacuations=evacuated,
            losses=lost,
        )

    def mirror_lag(self, mirror: ObjectStore, generation: int) -> MirrorLag:
        """The distance of the mirror to the store as it was read last.

        Raises:
            CorruptError: the mirror has an object that no swansong wrote.
            StoreError: a request to the mirror failed.
        """
        mirrored = newest_whole_commit(mirror, self.run.keys, near=generation)
        return figures.mirror_lag(self._whole(), mirrored)

    def _whole(self) -> list[RecordedCommit]:
        """The whole commits, newest first."""
        return [each for each in self.run.recorded(self.run.commits) if each.is_whole]

    def _lost(self) -> RunLosses:
        run = self.run
        identity = hash(
            (
                tuple(commit.identity for commit in run.commits),
                tuple(run.claims.infos),
                tuple(run.farewells.infos),
                tuple(run.resumptions.infos),
                tuple(run.damaged.items()),
            )
        )
        if self._losses is None or self._losses[0] != identity:
            self._losses = identity, self._computed()
        return self._losses[1]

    def _computed(self) -> RunLosses:
        run = self.run
        recorded = {each.generation: each for each in run.resumptions.facts}
        interruptions = list(figures.recorded_interruptions(recorded, run.claims.get))
        loss = losses.loss(lives_of(run).lives)
        prices, costs = self._prices, dict[tuple[str, str], float | None]()
        if loss is not None and prices is not None:
            amounts = cost.costs(loss, prices).items()
            costs = {(part, prices.currency): amount for part, amount in amounts}
        same_vm = Counter(each.is_same_vm for each in interruptions)
        return RunLosses(
            interruptions={is_same: same_vm[is_same] for is_same in (False, True)},
            lost_gpu_s=losses.lost_gpu_s(interruptions),
            loss=None if loss is None else replace(loss, interruptions=()),
            costs=costs,
        )

    def _log_damaged(self, key: str, error: CorruptError) -> None:
        """Name the object, at each attempt to read it."""
        _log.warning(
            "damaged_object",
            store=self.run.store.url,
            run=self.run.keys.run,
            key=key,
            reason=error.line(),
        )
