# SPDX-License-Identifier: Apache-2.0
"""Positions of a picture: everything lies between 0 and 1, and no two bars of a lane overlap.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swansong_tools.report.axis import Axis, axis
from swansong_tools.report.lanes import Course, Lane, Moment, Rate
from swansong_tools.units import human_span

BAR_WIDTH_MIN = 0.006
"""A shorter bar would not be visible on a narrow screen."""
RATE_WIDTH_MIN = 0.008
"""Narrower columns of the bandwidth are joined."""
BREAK_WIDTHS = (0.06, 0.12, 0.2, 0.3, 0.4)
"""Widths of a break that are tried."""
_NARROW_PIXELS = 320
_CHARACTER_PIXELS = 7.5


@dataclass(frozen=True, slots=True)
class PlacedBar:
    kind: str
    left: float
    right: float

    @property
    def width(self) -> float:
        return self.right - self.left


@dataclass(frozen=True, slots=True)
class PlacedMoment:
    kind: str
    name: str
    at: float
    row: int
    """Row of the label, from the top."""
    is_left: bool
    """The label lies to the left of the line."""


@dataclass(frozen=True, slots=True)
class PlacedBreak:
    """A stretch of time that is left out, and its label below the axis."""

    left: float
    right: float
    name: str
    row: int

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    @property
    def width(self) -> float:
        return self.right - self.left


@dataclass(frozen=True, slots=True)
class PlacedRate:
    left: float
    right: float
    height: float
    """Share of the highest bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A :class:`Course` with positions."""

    course: Course
    on: Axis
    moments: tuple[PlacedMoment, ...]
    breaks: tuple[PlacedBreak, ...]
    rates: tuple[PlacedRate, ...]
    peak_bytes_per_s: float

    def bars(self, lane: Lane) -> Iterator[PlacedBar]:
        """The bars of a lane from left to right; one that has no room left is omitted."""
        cursor = 0.0
        for bar in sorted(
            lane.bars, key=lambda each: -1e18 if each.from_s is None else each.from_s
        ):
            left = max(cursor, 0.0 if bar.from_s is None else self.on.at(bar.from_s))
            right = 1.0 if bar.to_s is None else self.on.at(bar.to_s)
            right = min(1.0, max(right, left + BAR_WIDTH_MIN))
            if right > left:
                yield PlacedBar(bar.kind, left, right)
                cursor = right


def picture(course: Course) -> Picture:
    """The positions of everything in the course of an evacuation."""
    on = _axis(course)
    rates = tuple(_merged(on, course.rates))
    peak = max((rate.bytes_per_s for rate in rates), default=0.0)
    return Picture(
        course=course,
        on=on,
        moments=tuple(_moments(on, course.moments)),
        breaks=tuple(_breaks(on)),
        rates=tuple(
            PlacedRate(on.at(rate.from_s), on.at(rate.to_s), rate.bytes_per_s / peak)
            for rate in rates
            if rate.bytes_per_s > 0
        ),
        peak_bytes_per_s=peak,
    )


def _axis(course: Course) -> Axis:
    """The axis with the narrowest breaks on which the longest part of the resumption looks longest."""
    stretches = [
        (bar.from_s, bar.to_s)
        for lane in course.next_vm
        for bar in lane.bars
        if bar.from_s is not None and bar.to_s is not None
    ]
    longest = max(stretches, key=lambda each: each[1] - each[0], default=(0.0, 0.0))
    times_s = tuple(course.times_s())
    for break_width in BREAK_WIDTHS:
        on = axis(times_s, break_width=break_width)
        widths = [on.at(to_s) - on.at(from_s) for from_s, to_s in (*stretches, longest)]
        if widths[-1] >= max(widths):
            break
    return on


def _merged(on: Axis, rates: Sequence[Rate]) -> Iterator[Rate]:
    """Rates over stretches that are wide enough to be seen; a stretch without bytes stays apart."""
    begun: Rate | None = None
    for rate in rates:
        is_idle = rate.bytes_per_s <= 0
        if begun is not None and (
            is_idle or on.at(begun.to_s) - on.at(begun.from_s) >= RATE_WIDTH_MIN
        ):
            yield begun
            begun = None
        if is_idle:
            continue
        begun = rate if begun is None else begun.joined(rate)
    if begun is not None:
        yield begun


def _moments(on: Axis, moments: Sequence[Moment]) -> Iterator[PlacedMoment]:
    """Labels that would touch on a narrow screen get different rows."""
    rows = _Rows()
    for moment in sorted(moments, key=lambda each: each.at_s):
        at, width = on.at(moment.at_s), _width(moment.name)
        is_left = at + width > 1
        row = rows.place(at - width if is_left else at, width)
        yield PlacedMoment(moment.kind, moment.name, at, row, is_left)


def _breaks(on: Axis) -> Iterator[PlacedBreak]:
    rows = _Rows()
    for each in on.breaks:
        name = f"{human_span(each.length_s)} left out"
        width = _width(name)
        label_left = min(max(0.0, (each.left + each.right - width) / 2), 1 - width)
        yield PlacedBreak(each.left, each.right, name, rows.place(label_left, width))


def _width(text: str) -> float:
    """Width of a label on a narrow screen."""
    return min(1.0, (len(text) + 1) * _CHARACTER_PIXELS / _NARROW_PIXELS)


class _Rows:
    """Rows of labels that do not overlap."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def place(self, left: float, width: float) -> int:
        """The first row with room for a label; labels come from left to right."""
        row = next((row for row, end in enumerate(self._ends) if end <= left), len(self._ends))
        self._ends[row : row + 1] = [left + width]
        return row
