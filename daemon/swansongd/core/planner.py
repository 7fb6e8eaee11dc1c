# SPDX-License-Identifier: Apache-2.0
"""The plan of an evacuation, from measurements: does another checkpoint fit before the deadline?

With G seconds left, a checkpoint that takes S seconds to save and B bytes to send at W bytes/s is started if
``S + B / W + reserve`` fits in G.  If it does not fit, and no sealed set fits either, it is attempted anyway:
the VM may live longer than announced, an existing commit never gets worse, and uncommitted training is lost
in either case.  Early shards are sent during the save.  Their share cannot be predicted, so the plan ignores
it.  Unknown values count as zero: without measurements, not trying gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swansong import bounds

from swansongd.model import CheckpointId

BANDWIDTH_SAMPLE_MIN_BYTES = 4 * 2**20
"""A smaller flush measures round trips, not bandwidth."""
BANDWIDTH_MEMORY_S = 1.0
"""After this much flushing, earlier samples weigh a third (1/e).  When the bandwidth drops to a tenth, the
estimate is down to a quarter after two seconds."""
SHOWN_S_MAX = 3600.0
"""A longer estimate only means that the store accepts next to nothing at present."""
_SWITCH_MARGIN = 1.25
"""A set in flight that fits is replaced by a newer one only if the newer one fits with this factor to spare.
Otherwise two sets that both just fit would alternate with every fluctuation of the bandwidth."""

_PRIOR_SPREAD = 0.25
"""Relative spread that is assumed before any was measured."""


class PlanKind(StrEnum):
    """The work of an evacuation."""

    TAKE = "TAKE"
    """Take a new checkpoint, flush and commit it."""
    FLUSH = "FLUSH"
    """Flush and commit sealed sets, without a request to the trainer."""
    COMMIT = "COMMIT"
    """Commit sets that are stored."""
    NONE = "NONE"
    """Nothing to save."""


@dataclass(frozen=True, slots=True)
class Plan:
    kind: PlanKind
    reason: str
    """In words, with the figures."""
    fits: bool = True
    """False: a new checkpoint is attempted although it does not fit by the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Bandwidth, duration and size of saves; None where nothing was measured yet."""

    bandwidth_bytes_per_s: float | None = None
    save_s: float | None = None
    save_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sealed set that is not committed yet."""

    id: CheckpointId
    bytes_left: int
    """Bytes that are not stored yet."""


def seconds_to_store(size_bytes: int, bandwidth_bytes_per_s: float | None) -> float:
    """Expected time to store this many bytes; 0 when the bandwidth is unknown, and never infinite."""
    if not bandwidth_bytes_per_s:
        return 0.0
    return min(size_bytes / bandwidth_bytes_per_s, bounds.SECONDS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The time of a new checkpoint, from the request to the end of its commit."""

    save_s: float
    """Expected time from the request to the sealed set."""
    send_s: float
    """Expected time from the sealed set to its last stored shard, without the bytes sent during the save."""
    commit_s: float
    """Expected time from the last stored shard to the end of the commit."""
    spread_s: float
    """About nine of ten checkpoints take at most this much longer than expected."""

    @property
    def data_s(self) -> float:
        """Expected time from the request to the last stored shard."""
        return min(self.save_s + self.send_s, bounds.SECONDS_MAX)

    @property
    def expected_s(self) -> float:
        """Expected time from the request to the end of the commit."""
        return min(self.data_s + self.commit_s, bounds.SECONDS_MAX)

    @property
    def pessimistic_s(self) -> float:
        """The time within which about nine of ten checkpoints are committed."""
        return min(self.expected_s + self.spread_s, bounds.SECONDS_MAX)


def forecast(measured: Measurements) -> Forecast:
    """The expected time of a new checkpoint that is requested now, and its spread.

    Values that were never measured count as zero.
    """
    save_s = measured.save_s or 0.0
    send_s = seconds_to_store(measured.save_bytes or 0, measured.bandwidth_bytes_per_s)
    return Forecast(
        save_s=save_s, send_s=send_s, commit_s=0.0, spread_s=_PRIOR_SPREAD * (save_s + send_s)
    )


def take_s(measured: Measurements) -> float:
    """Expected time from a request to the last stored byte of a new checkpoint."""
    return (measured.save_s or 0.0) + seconds_to_store(
        measured.save_bytes or 0, measured.bandwidth_bytes_per_s
    )


def decide(
    *,
    left_s: float,
    reserve_s: float,
    measured: Measurements,
    has_trainer: bool,
    candidates: Sequence[Candidate],
    is_committing: bool,
) -> Plan:
    """The plan for the ``left_s`` seconds before the deadline."""
    needed_s = take_s(measured) + reserve_s
    if has_trainer and needed_s <= left_s:
        return Plan(PlanKind.TAKE, f"needs {needed_s:.1f} s of {left_s:.1f} s, reserve included")
    needs = f"{needed_s:.1f} s" if needed_s <= SHOWN_S_MAX else "over an hour"
    why = (
        f"a new checkpoint needs {needs}, {left_s:.1f} s are left" if has_trainer else "no trainer"
    )
    bandwidth = measured.bandwidth_bytes_per_s
    if is_committing and not candidates:
        return Plan(PlanKind.COMMIT, f"{why}; everything sealed is stored")
    is_known_better = any(fits(c, left_s - reserve_s, bandwidth) for c in candidates)
    if has_trainer and not is_known_better and not is_committing:
        return Plan(PlanKind.TAKE, f"{why}; nothing else fits, so it is attempted", fits=False)
    if candidates:
        return Plan(PlanKind.FLUSH, f"{why}; sealed sets are not committed yet: {len(candidates)}")
    return Plan(PlanKind.NONE, f"{why}; everything sealed is committed")


def fits(candidate: Candidate, left_s: float, bandwidth_bytes_per_s: float | None) -> bool:
    """Whether all of it can be stored in ``left_s`` (reserve excluded)."""
    return seconds_to_store(candidate.bytes_left, bandwidth_bytes_per_s) <= left_s


def choose(
    candidates: Sequence[Candidate],
    *,
    left_s: float,
    bandwidth_bytes_per_s: float | None,
    in_flight: CheckpointId | None = None,
) -> Candidate | None:
    """The set to store next: the newest one that can be completed in ``left_s`` (reserve excluded).

    If none fits, the one with the fewest bytes left: the figures may be wrong, and the time has no better
    use.  The set ``in_flight`` is replaced only by one that fits, and only if that one is newer or the set in
    flight does not fit.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.id, reverse=True)
    fitting = [c for c in newest_first if fits(c, left_s, bandwidth_bytes_per_s)]
    current = next((c for c in newest_first if c.id == in_flight), None)
    if current is None:
        nearest = min(newest_first, key=lambda candidate: candidate.bytes_left, default=None)
        return fitting[0] if fitting else nearest
    if current not in fitting:
        return fitting[0] if fitting else current
    roomy_s = left_s / _SWITCH_MARGIN
    return next(c for c in fitting if c is current or fits(c, roomy_s, bandwidth_bytes_per_s))


def updated_bandwidth(
    known_bytes_per_s: float | None, size_bytes: int, duration_s: float
) -> float | None:
    """The bandwidth after ``duration_s`` more of flushing, in which ``size_bytes`` were sent.

    An exponential moving average over time.  The weight of a sample is its duration, so the result depends
    neither on the sampling interval nor on pauses without progress.
    """
    if duration_s <= 0:
        return known_bytes_per_s
    sample = size_bytes / duration_s
    if math.isinf(sample):  # no time at all has passed
        return known_bytes_per_s
    if known_bytes_per_s is None:
        return sample or None
    faded = math.exp(-duration_s / BANDWIDTH_MEMORY_S)
    return faded * known_bytes_per_s + (1 - faded) * sample
