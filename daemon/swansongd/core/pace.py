# SPDX-License-Identifier: Apache-2.0
"""The pace of a run: how long its checkpoints take to save, to send and to commit, as learned from them.

Each quantity is a :class:`Figure`: a mean in which the last four samples weigh most, and the variance around
it.  Manifests carry the means, so that the first plan of the next VM already knows them.  A bucket writer can
forge these numbers.  Each is therefore limited to a range, and the first own sample replaces most of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swansong import bounds

_WEIGHT_MIN = 0.25
"""Weight of a new sample: the mean follows a change within a few checkpoints."""
_SAMPLES_MAX = 8
_PRIOR_SAMPLES = 2
"""Samples that the assumed variance weighs."""

_NEW_SHARE_MIN = 0.5
"""Below this share, the sending time contains mostly the time to compare the other bytes."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity."""

    mean: float
    variance: float = 0.0
    samples: int = 1
    """0: the mean is from an earlier VM, and the first own sample replaces it."""

    def expected_variance(self, prior: float) -> float:
        """The variance of the next sample around the mean.

        Args:
            prior: the assumed variance, which counts as :data:`_PRIOR_SAMPLES` samples.
        """
        known = _PRIOR_SAMPLES + self.samples
        variance = (_PRIOR_SAMPLES * prior + self.samples * self.variance) / known
        return variance * (1 + 1 / known)


def updated(figure: Figure | None, value: float) -> Figure:
    """The figure with one more sample."""
    if figure is None or not figure.samples:
        return Figure(value)
    samples = min(figure.samples + 1, _SAMPLES_MAX)
    weight = max(1 / samples, _WEIGHT_MIN)
    moved = value - figure.mean
    return Figure(
        figure.mean + weight * moved,
        (1 - weight) * (figure.variance + weight * moved * moved),
        samples,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The figures of a run; None for a figure without a sample."""

    size_bytes: Figure | None = None
    """Size of a checkpoint on this VM."""
    save_s: Figure | None = None
    """Save time of the slowest rank, of checkpoints of any kind."""
    urgent_save_s: Figure | None = None
    """Save time of the slowest rank in an evacuation: the files are not flushed to the disk."""
    wait_s: Figure | None = None
    """Time from the request of an evacuation to its sealed set, without the save."""
    send_s_per_byte: Figure | None = None
    """Time to send a whole set, for each byte that was sent."""
    new_share: Figure | None = None
    """Share of the bytes that were sent: an earlier commit has the others."""
    commit_s: Figure | None = None
    """Time to write a manifest and to find it in the listing."""
    hidden_share: Figure | None = None
    """Share of the sending time that passed during the save of an evacuation."""
    hidden_use: Figure | None = None
    """The same time as a share of the save."""
    error_square: Figure | None = None
    """Square of the relative error of a forecast: 0.01 if the checkpoint took 10 % longer than expected."""


_RANGES: dict[str, tuple[float, float]] = {
    "size_bytes": (0, bounds.BYTES_MAX),
    "save_s": (0, 86400.0),
    "urgent_save_s": (0, 86400.0),
    "send_s_per_byte": (1e-13, 1e-3),
    "commit_s": (0, 60.0),
    "hidden_share": (0, 1),
    "hidden_use": (0, 1),
    "error_square": (1e-4, 1),
}
"""The figures that a manifest carries, with the range of each.  The others would mislead another VM: it may
know no earlier commit to refer to, and no sample would replace a forged wait before an evacuation."""

_LASTING = frozenset({"hidden_share", "hidden_use", "error_square"})
"""Only evacuations show these figures, about one on each VM, and their ranges are narrow.  Own samples
therefore shift them, and do not replace them at once."""
_LASTING_SAMPLES = 3


def published(pace: Pace) -> dict[str, float]:
    """The figures of a manifest."""
    is_mostly_new = pace.new_share is None or pace.new_share.mean >= _NEW_SHARE_MIN
    figures = {name: getattr(pace, name) for name in _RANGES}
    return {
        name: float(f"{figure.mean:.6g}")
        for name, figure in figures.items()
        if figure is not None and _is_in_range(name, figure.mean)
        if is_mostly_new or name != "send_s_per_byte"
    }


def inherited(pace: Pace, figures: Mapping[str, float]) -> Pace:
    """The pace with the figures of a manifest, where no own sample exists.

    A figure with an unknown name or out of its range is left out.
    """
    found = {}
    for name in _RANGES:
        own, value = getattr(pace, name), figures.get(name)
        is_own = own is not None and own.samples > 0  # or a lasting figure that was read before
        if is_own or value is None or not _is_in_range(name, value):
            found[name] = own
        else:
            found[name] = Figure(value, samples=_LASTING_SAMPLES if name in _LASTING else 0)
    return replace(pace, **found)


def _is_in_range(name: str, value: float) -> bool:
    low, high = _RANGES[name]
    return low <= value <= high  # false for NaN


UNKNOWN = Pace()
