# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on what was measured: what still fits before the deadline?

With G seconds left, a checkpoint that takes S seconds to save and B bytes to send at W bytes/s is
started if ``S + B / W + reserve`` fits in G.  If it does not, and no sealed set fits either, it is attempted
all the same: the VM may live longer than announced, a commit that stands never gets worse, and training that
no commit covers is lost either way.  Early shards go out while the save is still under way, but
nobody can know how early, so nothing is taken off for them.  What nobody has measured yet counts as
zero: with no numbers at all there is nothing to be gained by not trying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swansong import bounds

from swansongd.model import CheckpointId

BANDWIDTH_SAMPLE_MIN_BYTES = 4 * 2**20
"""A flush of less than this measures round trips, not bandwidth."""
BANDWIDTH_MEMORY_S = 1.0
"""So much flushing makes what was measured before it count for a third (1/e): a drop to a tenth is
believed, to a quarter of what was, after two seconds."""
SHOWN_S_MAX = 3600.0
"""An estimate above this says only that the store takes next to nothing at present."""
_SWITCH_MARGIN = 1.25
"""A set in flight that fits gives way to a newer one only if that one fits with this much to spare:
two sets that both just fit would otherwise take the wire from each other with every breath of it."""


class PlanKind(StrEnum):
    """What an evacuation does."""

    TAKE = "TAKE"
    """A new checkpoint, flush, commit."""
    FLUSH = "FLUSH"
    """Finish what is sealed, leave the trainer alone."""
    COMMIT = "COMMIT"
    """All is stored, publish it."""
    NONE = "NONE"
    """Nothing to save."""


@dataclass(frozen=True, slots=True)
class Plan:
    kind: PlanKind
    reason: str
    """In words, with the numbers."""
    fits: bool = True
    """False: a new checkpoint is attempted although the time is too short by the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What is known of how fast things go; None where nothing was measured yet."""

    bandwidth_bytes_per_s: float | None = None
    save_s: float | None = None
    save_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sealed set that is not committed yet."""

    id: CheckpointId
    bytes_left: int
    """Not yet stored."""


def seconds_to_store(size_bytes: int, bandwidth_bytes_per_s: float | None) -> float:
    """Expected time to store so many bytes; 0 when the bandwidth is unknown, and never infinite."""
    if not bandwidth_bytes_per_s:
        return 0.0
    return min(size_bytes / bandwidth_bytes_per_s, bounds.SECONDS_MAX)


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
    """What to do with ``left_s`` seconds before the deadline."""
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

    When by the numbers none can be, the one that comes nearest: the numbers may be wrong, and there
    is nothing better to do with the time.  The set ``in_flight`` is left only for one that can be
    completed, and then only if it is newer or the one in flight itself can not.
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

    What was known fades with the time that was spent on learning better, and not with the number of
    measurements, so that it does not matter how often anyone looks, nor that nothing moves at all.
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
