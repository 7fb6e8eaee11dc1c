# SPDX-License-Identifier: Apache-2.0
"""The picture of the live view: lines that fit a terminal, the important ones first.

Pure.  A line that is too long is cut, and the lines that a small terminal has no room for are left out by
their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text
from swansong_bucket.model import Verdict
from swansong_bucket.util.printable import escaped
from swansongd.observe.status import DaemonStatus, VerdictStatus

from swansong_tools.commands.view import countdown
from swansong_tools.commands.view.countdown import Countdown, countdowns
from swansong_tools.commands.view.once import listings
from swansong_tools.commands.view.poller import Poll
from swansong_tools.commands.view.recent import PollHistory, sparkline
from swansong_tools.commands.view.rows import Row, newer_generation, phrases_of, progress_of, rows
from swansong_tools.units import human_bytes, human_s

_LABEL = 16
"""Width of the labels."""
_LARGE_ROWS, _LARGE_COLUMNS = 16, 60
"""A smaller terminal has a countdown of one line."""
_CHART_MAX = 40
_NEAR_S = 15.0
"""The countdown turns red."""
_VERDICTS = {
    Verdict.SAFE: "green",
    Verdict.PARTIAL: "yellow",
    Verdict.LOST: "red",
    Verdict.NO_TRAINING: "white",
}
_IN_HEAD = {"run", "state", "verdict", "evacuation"}
"""Labels of rows that the first lines show already."""

Chart = Callable[[int, bool], tuple[str, str]]
"""Draws a chart of a width, with ASCII alone or not; returns also the words for its newest value."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that one frame shows."""

    history: PollHistory
    now_mono_s: float
    now_wall_s: float

    @property
    def late_s(self) -> float:
        """Age of the status: countdowns continue without the daemon."""
        return max(0.0, self.now_mono_s - self.history.status_mono_s)


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that are shown together, or not at all."""

    rank: int
    lines: Sequence[RenderableType]
    height: int


@dataclass(frozen=True, slots=True)
class Canvas:
    """The terminal."""

    width: int
    height: int
    is_ascii: bool = False

    @property
    def has_room(self) -> bool:
        """Whether the nearest countdown may be large."""
        is_large = self.height >= _LARGE_ROWS and self.width >= _LARGE_COLUMNS
        return is_large and not self.is_ascii

    def line(self, *pieces: str | Text | tuple[str, str], style: str = "") -> Text:
        """One line, cut to the width."""
        text = Text.assemble(*pieces, style=style, no_wrap=True)
        text.truncate(self.width, overflow="crop" if self.is_ascii else "ellipsis")
        return text

    def banner(self, text: str, style: str) -> Text:
        """One line with a background over the whole width."""
        line = self.line(text)
        line.pad_right(self.width - line.cell_len)
        line.stylize(style)
        return line


def view(frame: Frame, canvas: Canvas) -> Group:
    """The picture: at most ``canvas.height`` lines of at most ``canvas.width`` columns."""
    blocks = [*_head(frame, canvas), *_facts(frame, canvas)]
    return Group(*(line for block in _fitting(blocks, canvas.height) for line in block.lines))


def _fitting(blocks: Sequence[Block], height: int) -> list[Block]:
    chosen, left = set(), height
    for place in sorted(range(len(blocks)), key=lambda each: blocks[each].rank):
        if blocks[place].height <= left:
            chosen.add(place)
            left -= blocks[place].height
    return [block for place, block in enumerate(blocks) if place in chosen]


def _block(rank: int, *lines: Text) -> Block:
    return Block(rank, lines, len(lines))


# ---------------------------------------------------------------- head


def _head(frame: Frame, canvas: Canvas) -> Iterator[Block]:
    status, away = frame.history.status, frame.history.away
    if away is not None:
        yield _block(0, canvas.banner(_away(frame, away), "bold reverse magenta"))
        yield _block(9, canvas.line(" ", escaped(away.reason), style="magenta"))
    if status is None:
        return
    yield _block(1, _verdict(status, canvas))
    yield _block(4, _title(status, frame.now_wall_s, canvas))
    open_ones = countdowns(status)
    for place, each in enumerate(open_ones):
        if place == 0 and canvas.has_room:
            yield _large(each, status, frame, canvas)
        else:
            yield _small(each, status, frame, canvas, rank=2 if place == 0 else 6)
    if not open_ones:
        yield _block(75, Text(""))


def _title(status: DaemonStatus, now_wall_s: float, canvas: Canvas) -> Text:
    generation = status.generation
    claimed = "no generation yet" if generation is None else f"generation {generation}"
    left, right = f" {status.run}, {claimed}", f"{_clock(now_wall_s)} UTC  Ctrl-C ends "
    gap = canvas.width - len(left) - len(right)
    if gap < 1:
        return canvas.line((left, "bold"))
    return canvas.line((left, "bold"), " " * gap, (right, "dim"))


def _clock(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%H:%M:%S")


def _away(frame: Frame, away: Poll) -> str:
    text = f" DAEMON NOT RESPONDING since {_clock(away.at_wall_s)} UTC"
    text += f" ({human_s(round(frame.now_mono_s - away.at_mono_s))})"
    return f"{text}; this is its last report" if frame.history.status else text


def _verdict(status: DaemonStatus, canvas: Canvas) -> Text:
    """The first line: the verdict of the open evacuation, else the state and the last verdict."""
    state, verdict, last = status.state, status.verdict, status.last_verdict
    style = f"bold reverse {_VERDICTS[verdict] if verdict else 'cyan'}"
    if status.newer_generation is not None:
        return canvas.banner(f" {state}{newer_generation(status)}", "bold reverse red")
    if status.evacuation is not None:
        if verdict:
            return canvas.banner(f" {verdict}  {_outcome(last)}", style)
        plan = progress_of(status.evacuation)
        return canvas.banner(f" EVACUATING  no verdict yet: {plan}", style)
    if status.notices:
        return canvas.banner(f" {state}  a notice is in force", "bold reverse cyan")
    line = canvas.line(f" {state}  no notice is in force ", style="bold")
    told = (
        f" {verdict} was the last verdict, {human_s(last.age_s)} ago " if verdict and last else ""
    )
    line.pad_right(max(0, canvas.width - line.cell_len - len(told)))
    return canvas.line(line, (told, style))


def _outcome(last: VerdictStatus | None) -> str:
    if last is None or last.step is None:
        return "the run has no commit"
    return f"generation {last.generation} step {last.step} is committed"


def _large(each: Countdown, status: DaemonStatus, frame: Frame, canvas: Canvas) -> Block:
    """The time left in large digits, beside the title, the plan and the bar."""
    left_s = each.left_s - frame.late_s
    digits = countdown.large(countdown.clock(left_s))
    style = _urgency(each, left_s, status)
    room = canvas.width - len(digits[0]) - 5
    told = f" {countdown.in_words(left_s)}"
    bar = countdown.bar(left_s, frame.history.total_s(each), max(0, room - len(told)))
    beside = ((each.title, "bold"), (_plan(each, status), ""), (f"{bar}{told}", style))
    lines = (
        canvas.line("  ", (row, f"bold {style}"), "   ", text)
        for row, text in zip(digits, beside, strict=True)
    )
    return _block(2, Text(""), *lines, Text(""))


def _small(
    each: Countdown, status: DaemonStatus, frame: Frame, canvas: Canvas, *, rank: int
) -> Block:
    """A countdown in one line."""
    left_s = each.left_s - frame.late_s
    width = min(_CHART_MAX, max(0, canvas.width - 50))
    bar = countdown.bar(left_s, frame.history.total_s(each), width, is_ascii=canvas.is_ascii)
    style = _urgency(each, left_s, status)
    head = f" {countdown.clock(left_s):<{_LABEL}}"
    text = f"{each.title}: {_plan(each, status)}".removesuffix(": ")
    return _block(rank, canvas.line((head, f"bold {style}"), (bar, style), f" {text}"))


def _plan(each: Countdown, status: DaemonStatus) -> str:
    evacuation = status.evacuation
    if not each.is_evacuation or evacuation is None:
        return ""
    return "; ".join((progress_of(evacuation), *phrases_of(evacuation)))


def _urgency(each: Countdown, left_s: float, status: DaemonStatus) -> str:
    if not each.is_evacuation:
        return "cyan"
    if status.verdict is not None:
        return _VERDICTS[status.verdict]
    return "red" if left_s < _NEAR_S else "yellow"


# ---------------------------------------------------------------- facts


def _facts(frame: Frame, canvas: Canvas) -> Iterator[Block]:
    status = frame.history.status
    if status is None:
        return
    charts = _charts(status, frame.history)
    faded = "dim" if frame.history.away else ""
    for row in rows(status, is_brief=True):
        if row.label not in _IN_HEAD:
            yield _block(row.rank, _line(row, charts.get(row.label), canvas, faded))
    for listing in listings(status):
        yield Block(90, (Text(""), listing), listing.row_count + 2)


def _line(row: Row, chart: Chart | None, canvas: Canvas, faded: str) -> Text:
    label, style = (f" {row.label:<{_LABEL}}", "bold"), row.style or faded
    if chart is None:
        return canvas.line(label, row.text, style=style)
    drawn, newest = chart(min(_CHART_MAX, max(0, canvas.width - 66)), canvas.is_ascii)
    text = f"{newest}, {row.text}" if newest else row.text
    return canvas.line(label, (drawn, "cyan"), f"  {text}", style=style)


def _charts(status: DaemonStatus, history: PollHistory) -> dict[str, Chart]:
    """By the label of the row."""
    flush = status.flush
    return {
        "replication lag": _sparkline(history.lag_s),
        "training": _sparkline(history.steps_per_s, lambda rate: f"{rate:.3g} steps/s"),
        "bandwidth": _sparkline(history.bytes_per_s, lambda rate: f"{human_bytes(rate)}/s now"),
        "flush": _bar(flush.stored_bytes, flush.size_bytes) if flush else _bar(0, 0),
    }


def _sparkline(
    values: Sequence[float | None], words: Callable[[float], str] | None = None
) -> Chart:
    newest = values[-1] if values else None
    text = "" if words is None or newest is None else words(newest)
    return lambda width, is_ascii: (sparkline(values, width, is_ascii=is_ascii), text)


def _bar(done: float, total: float) -> Chart:
    return lambda width, is_ascii: (countdown.bar(done, total, width, is_ascii=is_ascii), "")
