# SPDX-License-Identifier: Apache-2.0
"""The expected loss of a run: training time that saves and interruptions cost in a day.

Pure.  docs/operations/loss.md has the model.  The times of a checkpoint are the daemon's own forecast.
All times are of each GPU: all GPUs of a job stand still together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from swansong import bounds
from swansong_bucket.loss_records import PARTS
from swansongd.core import cadence, planner
from swansongd.core.arrival import ENDED_BY_VERDICT
from swansongd.core.followup import LATENCY_S, cost_of
from swansongd.core.pace import Figure
from swansongd.core.planner import Forecast, Measurements
from swansongd.core.schedule import lead_s

from swansong_tools.economics.cost import unpaid_gpu_s
from swansong_tools.economics.loss import Loss

DAY_S = 86400.0
_BISECTIONS = 60
_NEVER_S = 10 * 365 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionKind:
    """Interruptions with the same notice."""

    source: str
    """Empty without a usable notice."""
    grace_s: float = 0.0
    """Time between the notice and the end of the VM; 0 without a usable notice."""
    per_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The figures of a run, measured or assumed."""

    gpus: int
    nodes: int = 1
    """VMs of the job."""
    measured: Measurements
    """Figures of the checkpoints of one VM."""
    save_cost_s: float
    """Training stands still for this long for each checkpoint."""
    interval_s: float
    """Training time between two periodic checkpoints."""
    stall_s: float
    """Training stands still for this long for all checkpoints of an evacuation."""
    down_s: Mapping[str, float]
    """From the last step on one VM to the first new step on the next, by part."""
    doubled_s: float = 0.0
    """For each interruption, the next VM is paid for this long while the old one still trains."""
    kinds: tuple[InterruptionKind, ...]
    reserve_s: float
    follow_ups: bool = True
    background_bytes_per_s: float | None = None
    """Limit of the rate of periodic checkpoints."""

    @property
    def forecast(self) -> Forecast:
        """The forecast of the checkpoint of an evacuation."""
        return planner.forecast(self.measured)

    @property
    def per_day(self) -> float:
        """Interruptions of a day."""
        return sum(kind.per_day for kind in self.kinds)

    @property
    def uncovered_per_day(self) -> float:
        """Interruptions of a day that lose the training since the last periodic checkpoint."""
        made = self.forecast
        return sum(kind.per_day * (1 - self.chance(kind, made)) for kind in self.kinds)

    def chance(self, kind: InterruptionKind, made: Forecast | None = None) -> float:
        """Probability that the evacuation for such a notice commits a new checkpoint."""
        return (made or self.forecast).chance(kind.grace_s, self.reserve_s)

    @property
    def lag_s(self) -> float:
        """Time from the state of a periodic checkpoint to its commit."""
        send_s = planner.flush_s(self.measured)
        if self.background_bytes_per_s:
            limited_s = planner.seconds_to_store(
                self.measured.send_bytes, self.background_bytes_per_s
            )
            send_s = max(send_s, limited_s)
        return (self.measured.save_s or 0.0) + send_s + self.forecast.commit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Training time that a day loses."""

    saves_s: float
    """Training stands still for periodic checkpoints."""
    stall_s: float
    """Training stands still for checkpoints of evacuations."""
    redone_s: float
    """Training that is done twice."""
    down_s: float

    @property
    def total_s(self) -> float:
        """At most a day."""
        return min(self.saves_s + self.stall_s + self.redone_s + self.down_s, DAY_S)

    @property
    def is_hopeless(self) -> bool:
        """Whether a day loses all of its training."""
        return self.total_s >= DAY_S

    @property
    def ettr(self) -> float:
        """Expected effective-training-time ratio."""
        return 1 - self.total_s / DAY_S


def expected(job: Job) -> Expected:
    """The expected loss of a day."""
    made = job.forecast
    lost_s = job.interval_s / 2 + job.lag_s
    down_s, stall_s = _down_and_stall_s(job)
    redone_s = 0.0
    for kind in job.kinds:
        chance = job.chance(kind, made)
        kept_s = covered_redone_s(job, kind) if chance else 0.0
        redone_s += kind.per_day * (chance * kept_s + (1 - chance) * (lost_s + kind.grace_s))
    return Expected(
        saves_s=saves_per_day(job) * job.save_cost_s,
        stall_s=stall_s,
        redone_s=redone_s,
        down_s=down_s,
    )


def saves_per_day(job: Job) -> float:
    """Periodic checkpoints of a day."""
    up_s = max(0.0, DAY_S - sum(_down_and_stall_s(job)))
    period_s = job.interval_s + job.save_cost_s
    return up_s / period_s if period_s > 0 else 0.0


def _down_and_stall_s(job: Job) -> tuple[float, float]:
    noticed_per_day = sum(kind.per_day for kind in job.kinds if kind.grace_s > 0)
    return job.per_day * sum(job.down_s.values()), job.stall_s * noticed_per_day


def observed(loss: Loss) -> Expected:
    """The loss of a run as it was, per day."""
    per_day = DAY_S / loss.wall_s if loss.wall_s > 0 else 0.0
    parts_s = loss.parts_s
    down_s = sum(parts_s[name] for name in (*PARTS, "unknown"))
    return Expected(
        saves_s=parts_s["saves"] * per_day,
        stall_s=parts_s["stall"] * per_day,
        redone_s=parts_s["redone"] * per_day,
        down_s=down_s * per_day,
    )


def observed_gpu_s(loss: Loss) -> float:
    """GPU seconds that a day of the run lost, saves included; each GPU counts while the job has it."""
    return sum(loss.parts_gpu_s.values()) / loss.wall_s * DAY_S if loss.wall_s > 0 else 0.0


def paid_gpu_s(loss: Loss) -> float:
    """The part of it for which VMs existed."""
    unpaid_per_day = unpaid_gpu_s(loss) / loss.wall_s * DAY_S if loss.wall_s > 0 else 0.0
    return max(0.0, observed_gpu_s(loss) - unpaid_per_day)


def bandwidth_bytes_per_s(job: Job) -> float | None:
    """Rate at which a whole set is sent; None while it is not measured."""
    send_s = planner.flush_s(job.measured)
    return job.measured.send_bytes / send_s if send_s > 0 else None


def covered_redone_s(job: Job, kind: InterruptionKind) -> float:
    """Training after the newest committed state, if the evacuation commits in time.

    With follow-ups it is the lead of the last one.  A source that waits for the verdict ends the VM with it.
    """
    if kind.source in ENDED_BY_VERDICT:
        redone_s = job.forecast.expected_s
    elif job.follow_ups:
        cost = cost_of(
            job.measured,
            stall_s=job.save_cost_s,
            wait_s=(job.measured.step_s or 0.0) + LATENCY_S,
        )
        redone_s = lead_s(cost, reserve_s=job.reserve_s)
    else:
        redone_s = kind.grace_s
    return min(redone_s, kind.grace_s)


# ---------------------------------------------------------------- the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval between periodic checkpoints that costs the least, with its terms."""

    mtbf_s: float
    """Mean time between interruptions that no evacuation covers."""
    young_s: float
    daly_s: float
    best_s: float
    """Daly's, at least a minute and the time to store a checkpoint: the rule of the daemon."""

    @property
    def has_losses(self) -> bool:
        """Whether any uncovered interruption is expected; without one, the interval does not matter."""
        return self.mtbf_s < _NEVER_S


def best_interval(job: Job) -> Interval:
    """The interval by the rule of the daemon, for the uncovered interruptions of this job."""
    mtbf_s = min(DAY_S / max(job.uncovered_per_day, 1e-9), bounds.SECONDS_MAX)
    return Interval(
        mtbf_s=mtbf_s,
        young_s=cadence.young_s(job.save_cost_s, mtbf_s),
        daly_s=cadence.optimum_interval_s(job.save_cost_s, mtbf_s),
        best_s=cadence.interval_s(
            save_cost_s=job.save_cost_s,
            store_s=planner.forecast(job.measured).data_s,
            mtbf_s=mtbf_s,
        ),
    )


# ---------------------------------------------------------------- other figures


def scaled(
    measured: Measurements, *, save: float = 1.0, size: float = 1.0, send: float = 1.0
) -> Measurements:
    """The measurements with other times.

    Args:
        save: factor of the save time.
        size: factor of the bytes.
        send: factor of the time to send a byte.
    """
    pace = measured.pace
    bandwidth = measured.bandwidth_bytes_per_s
    return replace(
        measured,
        bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / send,
        save_s=None if measured.save_s is None else measured.save_s * save,
        save_bytes=None if measured.save_bytes is None else round(measured.save_bytes * size),
        pace=replace(
            pace,
            save_s=_times(pace.save_s, save),
            urgent_save_s=_times(pace.urgent_save_s, save),
            send_s_per_byte=_times(pace.send_s_per_byte, send),
        ),
    )


def _times(figure: Figure | None, factor: float) -> Figure | None:
    if figure is None:
        return None
    return replace(figure, mean=figure.mean * factor, variance=figure.variance * factor**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMargin:
    """The margin of a grace period, as ``swansong status`` shows it."""

    source: str
    grace_s: float
    needed_s: float
    """In nine of ten cases, with the reserve."""
    chance: float

    @property
    def spare_s(self) -> float:
        return self.grace_s - self.needed_s


def margin(job: Job, source: str, grace_s: float) -> ExpectedMargin:
    """The margin of this notice."""
    made = job.forecast
    return ExpectedMargin(
        source=source,
        grace_s=grace_s,
        needed_s=made.needed_s(job.reserve_s) + made.spread_s,
        chance=made.chance(grace_s, job.reserve_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Changes that make a checkpoint fit into a grace period, each by itself; None if none suffices."""

    size_factor: float | None
    """The state may have at most this share of its bytes."""
    send_factor: float | None
    """A byte may take at most this share of its time."""


def fit(job: Job, grace_s: float) -> Fit:
    """Changes that make a checkpoint fit in nine of ten cases."""

    def spare_s(measured: Measurements) -> float:
        return margin(replace(job, measured=measured), "", grace_s).spare_s

    return Fit(
        size_factor=_largest(lambda x: spare_s(scaled(job.measured, save=x, size=x))),
        send_factor=_largest(lambda x: spare_s(scaled(job.measured, send=x))),
    )


def _largest(spare_s: Callable[[float], float]) -> float | None:
    """The largest factor up to 1 with time to spare, which a smaller factor increases."""
    low, high = 0.0, 1.0
    if spare_s(1e-6) < 0:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if spare_s(max(middle, 1e-6)) >= 0 else (low, middle)
    return low
