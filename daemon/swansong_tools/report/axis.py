# SPDX-License-Identifier: Apache-2.0
"""A time axis from 0 to 1, on which long stretches without an event are broken.  Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from swansong_tools.units import human_time

BREAKS_MAX = 4
BREAK_WIDTH = 0.06
"""Width of a break on the axis."""
BREAKS_WIDTH_MAX = 0.6
"""Width of all breaks together."""
PADDING = 0.015
"""Width before the first event, and after the last one."""
_TICK_STEPS_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(86400 * days for days in (1, 2, 7, 14, 30, 90, 365, 3650)),
)
_TICK_DISTANCE = 0.21
"""Least distance of two labels: they must not touch on a screen of 360 pixels."""
TICKS_MAX = math.ceil(1 / _TICK_DISTANCE)
TIME_S_MAX = 1e11
"""A time beyond lies at the edge.  Above 2**53 a float no longer differs from the next whole number."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the axis in which positions are proportional to time."""

    from_s: float
    to_s: float
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class Break:
    """A stretch of time that is left out."""

    left: float
    right: float
    length_s: float


@dataclass(frozen=True, slots=True)
class AxisTick:
    at: float
    time_s: float

    @property
    def label(self) -> str:
        return human_time(self.time_s)


@dataclass(frozen=True, slots=True)
class Axis:
    """Segments in their order, with a break between each two of them."""

    segments: tuple[Segment, ...]

    @property
    def breaks(self) -> tuple[Break, ...]:
        return tuple(
            Break(before.right, after.left, after.from_s - before.to_s)
            for before, after in pairwise(self.segments)
        )

    def at(self, time_s: float) -> float:
        """The position of a time, between 0 and 1; times within a break are spread over it."""
        if not self.segments[0].from_s <= time_s <= self.segments[-1].to_s:
            return float(time_s > self.segments[0].from_s)
        ends = [
            end
            for each in self.segments
            for end in ((each.from_s, each.left), (each.to_s, each.right))
        ]
        place = max(1, bisect_left(ends, (time_s, -1.0)))
        (from_s, left), (to_s, right) = ends[place - 1 : place + 1]
        return (
            left if to_s <= from_s else left + (time_s - from_s) / (to_s - from_s) * (right - left)
        )

    def ticks(self) -> tuple[AxisTick, ...]:
        """Round times within the segments, with room for a label each."""
        shown_s = sum(segment.to_s - segment.from_s for segment in self.segments)
        width = sum(segment.right - segment.left for segment in self.segments)
        step_s = _tick_step_s(_TICK_DISTANCE * shown_s / width)
        found: list[AxisTick] = []
        for segment in self.segments:
            for time_s in _round_times(segment, step_s):
                at = self.at(time_s)
                if not found or at - found[-1].at >= _TICK_DISTANCE:
                    found.append(AxisTick(at, time_s))
        return tuple(found)


def axis(times_s: Iterable[float], *, break_width: float = BREAK_WIDTH) -> Axis:
    """The axis that shows these times; a gap that is longer than all the rest becomes a break.

    Times beyond :data:`TIME_S_MAX`, and those that are not a number, do not stretch the axis.
    """
    ordered = sorted({time_s for time_s in times_s if abs(time_s) <= TIME_S_MAX}) or [0.0]
    gaps = [(later - earlier, place) for place, (earlier, later) in enumerate(pairwise(ordered))]
    broken: set[int] = set()
    rest_s = ordered[-1] - ordered[0]
    for length_s, place in sorted(gaps, reverse=True)[:BREAKS_MAX]:
        rest_s -= length_s
        if length_s <= rest_s or rest_s <= 0:
            break
        broken.add(place)
    bounds: list[tuple[float, float]] = []
    from_s = ordered[0]
    for place in sorted(broken):
        bounds.append((from_s, ordered[place]))
        from_s = ordered[place + 1]
    bounds.append((from_s, ordered[-1]))
    return Axis(tuple(_segments(bounds, break_width)))


def _segments(bounds: list[tuple[float, float]], break_width: float) -> Iterator[Segment]:
    """A segment with a single moment gets a little room."""
    shown_s = sum(to_s - from_s for from_s, to_s in bounds)
    breaks = len(bounds) - 1
    break_width = min(break_width, BREAKS_WIDTH_MAX / max(1, breaks))
    room = 1 - 2 * PADDING - break_width * breaks
    share = 0.2 / len(bounds) if len(bounds) > 1 else 0.0
    left = PADDING
    for from_s, to_s in bounds:
        own = (to_s - from_s) / shown_s if shown_s > 0 else 1 / len(bounds)
        width = room * (share + (1 - share * len(bounds)) * own)
        yield Segment(from_s, to_s, left, left + width)
        left += width + break_width


def _tick_step_s(least_s: float) -> float:
    """The shortest round step of at least this length."""
    longest_s = _TICK_STEPS_S[-1]
    if least_s > longest_s:
        return float(longest_s * 10 ** math.ceil(math.log10(least_s / longest_s)))
    return next(step_s for step_s in _TICK_STEPS_S if step_s >= least_s)


def _round_times(segment: Segment, step_s: float) -> Iterator[float]:
    """The multiples of a step within the segment, at most :data:`TICKS_MAX`; its start if there are none."""
    first, last = math.ceil(segment.from_s / step_s), math.floor(segment.to_s / step_s)
    if first > last:
        yield segment.from_s
    for number in range(first, min(last + 1, first + TICKS_MAX)):
        yield number * step_s
