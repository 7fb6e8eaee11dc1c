# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on what was measured: what still fits before the deadline?

With G seconds left, a checkpoint that takes S seconds to save and B bytes to send at W bytes/s is
started only if ``S + B / W + reserve`` fits in G.  What nobody has measured yet counts as zero: with
no numbers at all there is nothing to be gained by not trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swansongd.model import CheckpointId

BANDWIDTH_SAMPLE_MIN_BYTES = 4 * 2**20
"""Below this a transfer measures round trips, not bandwidth."""
_WEIGHT_OF_NEWEST = 0.5


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
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
    """Expected time to store so many bytes; 0 when the bandwidth is unknown."""
    return size_bytes / bandwidth_bytes_per_s if bandwidth_bytes_per_s else 0.0


def take_s(measured: Measured) -> float:
    """Expected time from a request to the last stored byte of a new checkpoint."""
    return (measured.save_s or 0.0) + seconds_to_store(
        measured.save_bytes or 0, measured.bandwidth_bytes_per_s
    )


def decide(
    *,
    left_s: float,
    reserve_s: float,
    measured: Measured,
    has_trainer: bool,
    candidates: Sequence[Candidate],
    is_committing: bool,
) -> Plan:
    """What to do with ``left_s`` seconds before the deadline."""
    needed_s = take_s(measured) + reserve_s
    if has_trainer and needed_s <= left_s:
        return Plan(PlanKind.TAKE, f"needs {needed_s:.1f} s of {left_s:.1f} s, reserve included")
    why = (
        f"a new checkpoint needs {needed_s:.1f} s, {left_s:.1f} s are left"
        if has_trainer
        else "no trainer"
    )
    if candidates:
        return Plan(PlanKind.FLUSH, f"{why}; sealed sets are not committed yet: {len(candidates)}")
    if is_committing:
        return Plan(PlanKind.COMMIT, f"{why}; everything sealed is stored")
    return Plan(PlanKind.NONE, f"{why}; everything sealed is committed")


def choose(
    candidates: Sequence[Candidate], *, left_s: float, bandwidth_bytes_per_s: float | None
) -> CheckpointId | None:
    """The set to store next: the newest one that can be completed in ``left_s`` (reserve excluded).

    When by the numbers none can be, the one that comes nearest: the numbers may be wrong, and there
    is nothing better to do with the time.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.id, reverse=True)
    for candidate in newest_first:
        if seconds_to_store(candidate.bytes_left, bandwidth_bytes_per_s) <= left_s:
            return candidate.id
    return (
        min(newest_first, key=lambda candidate: candidate.bytes_left).id if newest_first else None
    )


def updated_bandwidth(
    known_bytes_per_s: float | None, size_bytes: int, duration_s: float
) -> float | None:
    """The bandwidth after one more measured transfer; older ones count half as much each time."""
    if size_bytes < BANDWIDTH_SAMPLE_MIN_BYTES or duration_s <= 0:
        return known_bytes_per_s
    sample = size_bytes / duration_s
    if known_bytes_per_s is None:
        return sample
    return _WEIGHT_OF_NEWEST * sample + (1 - _WEIGHT_OF_NEWEST) * known_bytes_per_s
