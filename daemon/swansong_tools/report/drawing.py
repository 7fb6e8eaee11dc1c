# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report with the heights of their rows, for the template of the page.  Pure.

Horizontal positions remain shares of the width, so that a picture fits every screen while its texts keep
their size.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swansong_bucket.loss_records import LOST
from swansong_bucket.runs.run import RecordedCommit

from swansong_tools.economics.loss import Interruption, Window
from swansong_tools.report.axis import Break, axis
from swansong_tools.report.lanes import Lane
from swansong_tools.report.positions import Picture, PlacedBar
from swansong_tools.units import minute

LABEL_PIXELS = 17
LANE_PIXELS = 36
HEADING_PIXELS = 26
RATES_PIXELS = 64
CHART_PIXELS = 120
NOTE_CHARACTERS = 39
"""Characters in one line above the bars of a lane: the width of a phone with 345 pixels."""
COMMITS_MAX = 200
"""Commits in one picture: more would be narrower than a pixel."""
STACKS_MAX = 20
"""Interruptions in the picture of the loss."""
LOSS_PARTS = (*LOST, "unknown")


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A lane, or a heading above lanes, and its top edge."""

    top: int
    heading: str = ""
    lane: Lane | None = None
    note_lines: tuple[str, ...] = ("",)
    """The note of the lane; its first line follows the name."""

    @property
    def bars_top(self) -> int:
        return self.top + 17 + (len(self.note_lines) - 1) * LABEL_PIXELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """The picture of an evacuation."""

    picture: Picture
    height: int
    lanes_top: int
    rates_top: int
    """Top of the bandwidth; only if there are rates."""
    axis_top: int
    rows: tuple[PlacedRow, ...]

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Top and bottom of vertical lines: through all bars, and through no text."""
        lanes = tuple((row.bars_top - 3, row.bars_top + 16) for row in self.rows if row.lane)
        return (*lanes, (self.rates_top, self.axis_top)) if self.picture.rates else lanes


def gantt(picture: Picture) -> Gantt:
    """The picture of an evacuation, from top to bottom: moments, lanes, bandwidth, axis."""
    course = picture.course
    label_rows = 1 + max((moment.row for moment in picture.moments), default=0)
    y = lanes_top = label_rows * LABEL_PIXELS + 4
    rows: list[PlacedRow] = []
    for heading, lanes in (
        (
            "A VM that had no notice itself" if course.is_of_peer else "The VM with the notice",
            course.old_vm,
        ),
        ("Until training resumes", course.next_vm),
    ):
        if not lanes:
            continue
        rows.append(PlacedRow(y, heading=heading))
        y += HEADING_PIXELS
        for lane in lanes:
            note_lines = _note_lines(lane)
            rows.append(PlacedRow(y, lane=lane, note_lines=note_lines))
            y += LANE_PIXELS + (len(note_lines) - 1) * LABEL_PIXELS
    rates_top = y + HEADING_PIXELS
    axis_top = rates_top + RATES_PIXELS if picture.rates else y
    break_rows = 1 + max((each.row for each in picture.breaks), default=-1)
    return Gantt(
        picture=picture,
        height=axis_top + (1 + break_rows) * LABEL_PIXELS + 8,
        lanes_top=lanes_top,
        rates_top=rates_top,
        axis_top=axis_top,
        rows=tuple(rows),
    )


def _note_lines(lane: Lane) -> tuple[str, ...]:
    """The note in lines that fit a phone: SVG does not wrap text."""
    lines = textwrap.wrap(lane.note, NOTE_CHARACTERS, initial_indent=" " * len(lane.name))
    return tuple(line.strip() for line in lines) or ("",)


# ---------------------------------------------------------------- commits, ETTR and loss


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a chart, from its foot; heights are shares of the highest one."""

    left: float
    width: float
    height: float
    light_height: float = 0.0
    """The part of it at the top that is drawn lighter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    columns: tuple[Column, ...]
    breaks: tuple[Break, ...] = ()
    line: tuple[tuple[float, float], ...] = ()
    """Positions of a line, from left to right and from the foot."""
    highest: int = 0
    """Bytes of the highest column of the commits."""
    begun_wall_s: float = 0.0
    until_wall_s: float = 0.0


def commit_chart(commits: Sequence[RecordedCommit]) -> Chart | None:
    """The sizes of the newest commits over time, the referenced bytes on top; None without any."""
    dated = [
        (commit.created_wall_s, commit) for commit in commits if commit.created_wall_s is not None
    ][-COMMITS_MAX:]
    highest = max((commit.size_bytes for _, commit in dated), default=0)
    if not highest:
        return None
    on = axis((at_s for at_s, _ in dated), break_width=0.04)
    width = max(0.004, min(0.03, 0.6 / len(dated)))
    columns = tuple(
        Column(
            left=min(on.at(at_s), 1 - width),
            width=width,
            height=commit.size_bytes / highest,
            light_height=commit.bytes_referenced / highest,
        )
        for at_s, commit in dated
    )
    return Chart(
        columns=columns,
        breaks=on.breaks,
        highest=highest,
        begun_wall_s=min(at_s for at_s, _ in dated),
        until_wall_s=max(at_s for at_s, _ in dated),
    )


def ettr_chart(windows: Sequence[Window]) -> Chart | None:
    """The productive share of each window, and that of the run so far; None for less than two windows."""
    if len(windows) < 2:
        return None
    begun_s = windows[0].from_wall_s
    whole_s = sum(window.length_s for window in windows)
    columns, line = [], []
    productive_s = past_s = 0.0
    for window in windows:
        left, width = (window.from_wall_s - begun_s) / whole_s, window.length_s / whole_s
        columns.append(Column(left, max(0.001, 0.92 * width), window.ettr))
        productive_s += window.productive_s
        past_s += window.length_s
        line.append((min(1.0, left + width / 2), productive_s / past_s))
    return Chart(columns=tuple(columns), line=tuple(line))


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts of a loss, side by side; the largest loss fills the width."""

    name: str
    lost_s: float
    bars: tuple[PlacedBar, ...]


def loss_stacks(interruptions: Sequence[Interruption]) -> tuple[Stack, ...]:
    """Each of the newest interruptions, newest first."""
    newest = interruptions[-STACKS_MAX:]
    largest_s = max((each.lost_s for each in newest), default=0.0)
    return tuple(_stacked(each, largest_s) for each in reversed(newest))


def loss_parts(each: Interruption) -> dict[str, float | None]:
    """All parts of the loss of an interruption, in seconds; None: unknown."""
    own = {"stall": each.stall_s, "redone": each.redone_s, **each.parts_s}
    return {name: own[name] for name in LOSS_PARTS if name in own}


def _stacked(each: Interruption, largest_s: float) -> Stack:
    bars, left = [], 0.0
    for name, seconds in loss_parts(each).items():
        if seconds and largest_s > 0:
            right = min(1.0, left + seconds / largest_s)
            bars.append(PlacedBar(name, left, right))
            left = right
    kind = "Restart" if each.is_same_vm else "Preemption"
    return Stack(f"{kind} at {minute(each.ended_wall_s)}", each.lost_s, tuple(bars))


def loss_sums(interruptions: Sequence[Interruption]) -> dict[str, float]:
    """The parts of all interruptions together, in seconds."""
    sums: Counter[str] = Counter()
    for each in interruptions:
        sums.update({name: seconds or 0.0 for name, seconds in loss_parts(each).items()})
    return dict(sums)
