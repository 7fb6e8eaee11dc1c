# SPDX-License-Identifier: Apache-2.0
"""The plan of an evacuation, from measurements: does another checkpoint fit before the deadline?

With G seconds left, a checkpoint is started if its expected time (:func:`forecast`) and the reserve fit in G.
If it does not fit, and no sealed set fits either, it is attempted anyway: the VM may live longer than
announced, an existing commit never gets worse, and uncommitted training is lost in either case.  Unknown
values count as zero: without measurements, not trying gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from swansong import bounds
from swansong_bucket.model import CheckpointId

from swansongd.core import pace
from swansongd.core.pace import Pace

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

_NINE_OF_TEN = 1.28
"""Nine of ten values of a normal distribution lie below its mean plus this number of standard deviations."""
_PRIOR_SPREAD = 0.15
"""Relative standard deviation that is assumed before any was measured."""
_PRIOR_WEIGHT = 2
"""Samples that an assumed value weighs."""
_HIDDEN_VARIANCE = 0.1**2
"""Assumed variance of the shares of the sending time that passes during the save."""


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
    step_s: float | None = None
    """Usual duration of a step; None for a trainer without hooks."""
    last_share: float = 1.0
    """Assumed share of the bytes that become final at the end of the save: the last file of each rank."""
    is_sending: bool = False
    """Bytes are being sent or the store fails: the bandwidth is that of this moment."""
    pace: Pace = pace.UNKNOWN

    @property
    def send_bytes(self) -> int:
        """Expected number of bytes to send: an earlier commit may have some of the bytes of the next set."""
        new_share = 1.0 if self.pace.new_share is None else min(self.pace.new_share.mean, 1.0)
        return round((self.save_bytes or 0) * new_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sealed set that is not committed yet."""

    id: CheckpointId
    order: tuple[int, CheckpointId]
    """Its place among all sets, see :meth:`swansongd.core.state.State.order`."""
    bytes_left: int
    """Bytes that are not stored yet."""
    is_sound: bool = True
    """False if a GPU had failed before the set was sealed: sound sets are stored first."""


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
    is_measured: bool = False
    """Whether save, size and bandwidth are known."""

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

    def needed_s(self, reserve_s: float) -> float:
        """Expected time before the deadline that the request needs, with the reserve of the commit."""
        return self.data_s + max(reserve_s, self.commit_s)

    def chance(self, left_s: float, reserve_s: float) -> float:
        """Probability that a checkpoint with this much time left is committed before the deadline.

        0 if its expected time does not fit: a plan that does not fit is only an attempt.
        """
        spare_s = left_s - self.needed_s(reserve_s)
        if spare_s < 0:
            return 0.0
        deviation_s = self.spread_s / _NINE_OF_TEN
        return 1.0 if deviation_s <= 0 else (1 + math.erf(spare_s / deviation_s / math.sqrt(2))) / 2


def forecast(measured: Measurements) -> Forecast:
    """The expected time of a new checkpoint that is requested now, and its spread.

    Values that were never measured count as zero.  docs/design/evacuation.md has the arithmetic.
    """
    known = measured.pace
    wait_s, wait_var = _wait(measured)
    save_s, save_var = _save(measured)
    all_s, send_var = _send(measured)
    hidden_s, hidden_var, is_by_share = _hidden(measured, save_s, all_s)
    if is_by_share and all_s:
        send_var *= (1 - hidden_s / all_s) ** 2
    commit_s = 0.0 if known.commit_s is None else known.commit_s.mean
    variance = wait_var + save_var + send_var + hidden_var
    if known.commit_s is not None:
        variance += known.commit_s.expected_variance((_PRIOR_SPREAD * commit_s) ** 2)
    assumed_s = hidden_s if known.hidden_share is None else 0.0  # no overlap was seen yet
    expected_s = wait_s + save_s + all_s - hidden_s + commit_s
    if known.error_square is not None:
        error = known.error_square
        variance = (_PRIOR_WEIGHT * variance + error.samples * error.mean * expected_s**2) / (
            _PRIOR_WEIGHT + error.samples
        )
    return Forecast(
        save_s=min(wait_s + save_s, bounds.SECONDS_MAX),
        send_s=min(all_s - hidden_s, bounds.SECONDS_MAX),
        commit_s=commit_s,
        spread_s=_NINE_OF_TEN * math.sqrt(variance) + assumed_s,
        is_measured=measured.save_s is not None and bool(measured.save_bytes) and all_s > 0,
    )


def _wait(measured: Measurements) -> tuple[float, float]:
    """Time from the request to the start of the save: the rest of the step, and the messages."""
    if measured.step_s is None:
        return 0.0, 0.0
    step_s = min(measured.step_s, bounds.SECONDS_MAX)
    prior_s, prior_var = step_s / 2, step_s**2 / 12
    figure = measured.pace.wait_s
    if figure is None:
        return prior_s, prior_var
    known = _PRIOR_WEIGHT + figure.samples
    wait_s = (_PRIOR_WEIGHT * prior_s + figure.samples * figure.mean) / known
    return max(0.0, wait_s), figure.expected_variance(prior_var)


def _save(measured: Measurements) -> tuple[float, float]:
    """Save time of the slowest rank, and its variance."""
    save_s = min(measured.save_s or 0.0, bounds.SECONDS_MAX)  # a larger one has no square
    urgent = measured.pace.urgent_save_s
    if urgent is not None and urgent.samples:
        save_s = urgent.mean
    elif urgent is not None:  # an evacuation of an earlier VM
        save_s = urgent.mean if measured.save_s is None else min(save_s, urgent.mean)
    prior = (_PRIOR_SPREAD * save_s) ** 2
    figure = urgent if urgent is not None and urgent.samples else measured.pace.save_s
    return save_s, prior if figure is None else figure.expected_variance(prior)


def _send(measured: Measurements) -> tuple[float, float]:
    """Time to send the whole set after it is sealed, and its variance."""
    size_bytes, figure = measured.send_bytes, measured.pace.send_s_per_byte
    now_s = seconds_to_store(size_bytes, measured.bandwidth_bytes_per_s)
    if figure is None or not (figure.samples or measured.bandwidth_bytes_per_s is None):
        return now_s, (_PRIOR_SPREAD * now_s) ** 2
    usual_s = min(size_bytes * figure.mean, bounds.SECONDS_MAX)
    variance = size_bytes**2 * figure.expected_variance((_PRIOR_SPREAD * figure.mean) ** 2)
    return (max(usual_s, now_s) if measured.is_sending else usual_s), variance


def _hidden(measured: Measurements, save_s: float, send_s: float) -> tuple[float, float, bool]:
    """Sending time during the save, its variance, and whether the files limit it, not the link."""
    share, use = measured.pace.hidden_share, measured.pace.hidden_use
    if share is None or use is None:
        early = 1.0 - measured.last_share
        hidden_s = early * min(send_s, save_s)
        return hidden_s, 0.0, send_s <= save_s
    by_share_s, by_use_s = min(share.mean, 1.0) * send_s, min(use.mean, 1.0) * save_s
    hidden_s = min(by_share_s, by_use_s)
    figure, whole_s = (share, send_s) if by_share_s <= by_use_s else (use, save_s)
    variance = whole_s**2 * figure.expected_variance(_HIDDEN_VARIANCE)
    return hidden_s, min(hidden_s**2, variance), by_share_s <= by_use_s


def send_s(measured: Measurements, size_bytes: int) -> float:
    """Expected time to send these bytes of the next set."""
    known = replace(measured.pace, new_share=None)
    return _send(replace(measured, save_bytes=size_bytes, pace=known))[0]


def flush_s(measured: Measurements) -> float:
    """Expected time to send a whole set after it is sealed."""
    return _send(measured)[0]


def decide(
    *,
    left_s: float,
    reserve_s: float,
    measured: Measurements,
    has_trainer: bool,
    candidates: Sequence[Candidate],
    is_committing: bool,
    why_not: str = "no trainer",
) -> Plan:
    """The plan for the ``left_s`` seconds before the deadline.

    Args:
        why_not: the reason without ``has_trainer``.
    """
    expected = forecast(measured)
    needed_s = expected.needed_s(reserve_s)
    if has_trainer and needed_s <= left_s:
        return Plan(PlanKind.TAKE, f"needs {needed_s:.1f} s of {left_s:.1f} s, reserve included")
    needs = f"{needed_s:.1f} s" if needed_s <= SHOWN_S_MAX else "over an hour"
    why = f"a new checkpoint needs {needs}, {left_s:.1f} s are left" if has_trainer else why_not
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
    """The set to store next: the newest sound one that can be completed in ``left_s`` (reserve excluded).

    If none fits, the one with the fewest bytes left: the figures may be wrong, and the time has no better
    use.  The set ``in_flight`` is replaced only by one that fits, and only if that one is newer or the set in
    flight does not fit.
    """
    best_first = sorted(candidates, key=lambda each: (each.is_sound, each.order), reverse=True)
    fitting = [c for c in best_first if fits(c, left_s, bandwidth_bytes_per_s)]
    current = next((c for c in best_first if c.id == in_flight), None)
    if current is None:
        nearest = min(best_first, key=lambda candidate: candidate.bytes_left, default=None)
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
