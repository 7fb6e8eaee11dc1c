# SPDX-License-Identifier: Apache-2.0
"""The cost of a day of a run: fault tolerance, interruptions, and spot against on-demand.

Pure.  docs/operations/loss.md has the model.  An amount is None where its price is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from swansong_tools.economics.cost import Prices, of_gpus, of_requests, of_storage, saved
from swansong_tools.economics.expected import DAY_S, Job, expected, saves_per_day


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """The objects in the store: the cost of fault tolerance besides the lost GPU time."""

    stored_bytes: float
    writes_per_save: float
    reads_per_restore: float
    size_bytes: int
    """Size of the checkpoint to which these figures belong; for another size they change with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Amounts of a day."""

    prices: Prices
    upkeep: Upkeep
    stall_gpu_s: float
    """Training stands still for periodic checkpoints."""
    stall: float | None
    stored_bytes: float
    storage: float | None
    writes: float
    reads: float
    requests: float | None
    interruptions: float | None
    """GPU time that interruptions lose; the time without a VM costs nothing."""
    interruptions_gpu_s: float
    spot: float | None
    """All GPU time at the spot price."""
    on_demand: float | None
    """The productive GPU time at the on-demand price."""
    days: float | None
    """Expected duration of the whole run; None if its number of steps is unknown or it never ends."""

    @property
    def saved(self) -> float | None:
        """The savings of spot against on-demand, less storage and requests where their prices are known."""
        return saved(self.on_demand, self.spot, self.storage, self.requests)

    @property
    def lost_gpus(self) -> float | None:
        """The cost of all GPU time that does not train: stall and interruptions."""
        if self.stall is None or self.interruptions is None:
            return None
        return self.stall + self.interruptions

    @property
    def lost(self) -> float | None:
        """The same with storage and requests where their prices are known."""
        if self.lost_gpus is None:
            return None
        return self.lost_gpus + (self.storage or 0.0) + (self.requests or 0.0)

    def of(self, job: Job) -> Bill:
        """The bill of a day of the job with a change."""
        return bill(job, self.upkeep, self.prices)

    def saved_by(self, job: Job) -> float | None:
        """The money that a change of the job saves in a day; negative if the change costs more."""
        after = self.of(job)
        return None if self.lost is None or after.lost is None else self.lost - after.lost

    def of_gpu_s(self, gpu_s: float) -> float | None:
        """Cost of this GPU time at the spot price."""
        return of_gpus(gpu_s, self.prices.spot)


def bill(job: Job, upkeep: Upkeep, prices: Prices, *, steps: int | None = None) -> Bill:
    """The cost of a day.

    Args:
        steps: of the whole run.
    """
    found = expected(job)
    unpaid_s = min(DAY_S, job.per_day * job.down_s.get("cloud", 0.0))
    unpaid_gpu_s = (unpaid_s - job.per_day * job.doubled_s) * job.gpus / job.nodes
    lost_gpu_s = (found.total_s - found.saves_s) * job.gpus
    interruptions_gpu_s = max(0.0, lost_gpu_s - unpaid_gpu_s)
    evacuations = 2 * sum(kind.per_day for kind in job.kinds if kind.grace_s > 0)
    share = (job.measured.save_bytes or 0) / upkeep.size_bytes if upkeep.size_bytes else 1.0
    stored_bytes = upkeep.stored_bytes * share
    writes = (saves_per_day(job) + evacuations) * upkeep.writes_per_save * share
    reads = job.per_day * upkeep.reads_per_restore * share
    stall_gpu_s = found.saves_s * job.gpus
    step_s = job.measured.step_s
    days = None
    if steps is not None and step_s is not None and found.ettr > 0:
        days = steps * step_s / DAY_S / found.ettr
    return Bill(
        prices=prices,
        upkeep=upkeep,
        stall_gpu_s=stall_gpu_s,
        stall=of_gpus(stall_gpu_s, prices.spot),
        stored_bytes=stored_bytes,
        storage=of_storage(prices, stored_bytes, DAY_S),
        writes=writes,
        reads=reads,
        requests=of_requests(prices, writes, reads),
        interruptions=of_gpus(interruptions_gpu_s, prices.spot),
        interruptions_gpu_s=interruptions_gpu_s,
        spot=of_gpus(DAY_S * job.gpus - unpaid_gpu_s, prices.spot),
        on_demand=of_gpus(DAY_S * found.ettr * job.gpus, prices.on_demand),
        days=days,
    )
