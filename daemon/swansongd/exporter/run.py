# SPDX-License-Identifier: Apache-2.0
"""The figures of one run.  A further reading costs two listings, and a request for each new object."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from swansongd.bucket import catalog, lives
from swansongd.bucket.keys import RunKeys
from swansongd.exporter import figures
from swansongd.exporter.figures import MirrorLag, RunFigures
from swansongd.exporter.listing import Listing
from swansongd.exporter.records import RunRecords
from swansongd.model import CommitRef
from swansongd.observe import cost
from swansongd.observe import loss as losses
from swansongd.observe.cost import Costs, Prices
from swansongd.observe.loss import Loss
from swansongd.stores.base import ObjectStore


@dataclass(frozen=True, slots=True)
class _Losses:
    """The figures that change only with the objects of the run."""

    interruptions: dict[bool, int]
    lost_gpu_s: dict[str, float]
    loss: Loss | None
    costs: Costs | None


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
        self._keys = keys
        self._prices = prices
        self._records = RunRecords(store, keys, stop=stop, monotonic=monotonic)
        self._losses: tuple[Hashable, _Losses] | None = None

    def read(self, listing: Listing, now_wall_s: float) -> RunFigures:
        """Read the new objects of the listing.

        Raises:
            StoreError: a request to the store failed.
            Stopped: ``stop`` was set.
        """
        self._records.refresh(listing, now_wall_s)
        records = self._records
        whole = records.whole
        counts, sizes_bytes = figures.by_kind(whole)
        evacuated = figures.evacuations(records.farewells, now_wall_s=now_wall_s)
        lost = self._lost(listing)
        created_s = [each.created_wall_s for each in whole if each.created_wall_s is not None]
        return RunFigures(
            run=self._keys.run,
            read_wall_s=now_wall_s,
            generation=records.generation,
            newest=whole[0] if whole else None,
            oldest_created_wall_s=min(created_s, default=None),
            commits=counts,
            commit_bytes=sizes_bytes,
            incomplete=sum(not commit.is_complete for commit in listing.commits),
            pins=listing.pins,
            damaged=records.damaged,
            left_out=records.left_out,
            foreign=listing.foreign,
            evacuations=evacuated,
            interruptions=lost.interruptions,
            lost_gpu_s=lost.lost_gpu_s,
            loss=lost.loss,
            costs=lost.costs,
        )

    def mirror_lag(self, mirror: ObjectStore, generation: int) -> MirrorLag:
        """The distance of the mirror to the store as it was read last.

        Raises:
            CorruptError: the mirror has an object that no swansong wrote.
            StoreError: a request to the mirror failed.
        """
        return figures.mirror_lag(
            self._records.whole, newest_whole(mirror, self._keys, near=generation)
        )

    def _lost(self, listing: Listing) -> _Losses:
        records = self._records
        identity = hash(
            (
                tuple(commit.identity for commit in listing.commits),
                tuple(sorted(listing.claims)),
                tuple(sorted(listing.farewells)),
                tuple(sorted(listing.resumptions)),
                tuple(sorted(records.damaged.items())),
            )
        )
        if self._losses is None or self._losses[0] != identity:
            self._losses = identity, self._computed(listing)
        return self._losses[1]

    def _computed(self, listing: Listing) -> _Losses:
        records = self._records
        interruptions = list(
            figures.recorded_interruptions(records.resumptions, records.claimed_wall_s)
        )
        commits = lives.by_generation(listing.commits)
        traces = {*commits, *records.resumptions, *(each.generation for each in records.farewells)}
        known = sorted(traces.intersection(listing.claims))[-lives.LIVES_MAX :]
        loss = losses.loss(lives.lives_of(records, known, commits))
        same_vm = Counter(each.is_same_vm for each in interruptions)
        return _Losses(
            interruptions={is_same: same_vm[is_same] for is_same in (False, True)},
            lost_gpu_s=figures.lost_gpu_s(interruptions),
            loss=None if loss is None else replace(loss, interruptions=()),
            costs=None if loss is None or self._prices is None else cost.costs(loss, self._prices),
        )


def newest_whole(store: ObjectStore, keys: RunKeys, *, near: int) -> CommitRef | None:
    """The newest commit with the manifests of all nodes, from the listing alone; None without one.

    Raises:
        CorruptError, StoreError: as for :func:`swansongd.bucket.catalog.list_commits`.
    """
    commits = catalog.newest_commits(store, keys, near=near)
    return next((commit.ref for commit in commits if commit.is_complete), None)
