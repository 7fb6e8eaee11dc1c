# SPDX-License-Identifier: Apache-2.0
"""The report for a terminal of 80 columns, with and without colours."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text
from swansong_bucket.loss_records import LOST
from swansong_bucket.model import Verdict

from swansong_tools.commands.terminal import console
from swansong_tools.report.lanes import Lane
from swansong_tools.report.positions import Picture
from swansong_tools.report.run_report import RunReport, Story, comparisons, sentences, summary
from swansong_tools.units import counted, human_bytes, human_span, minute, second

WIDTH = 79
_NAME = 11
_BARS = 32
_NOTE = WIDTH - _NAME - _BARS - 1
_STYLES = {
    "training": ("─", "-", "dim"),
    "grace": ("┄", ".", "yellow"),
    "forecast": ("░", ":", "cyan"),
    "pessimistic": ("·", ".", "cyan"),
    "work": ("█", "#", "blue"),
    "failed": ("▒", "x", "red"),
    "idle": ("┄", ".", "magenta"),
    "resume": ("█", "#", "green"),
}
"""Character, the same without Unicode, and colour of each kind of bar."""
_VERDICTS = {
    Verdict.SAFE: "bold green",
    Verdict.PARTIAL: "bold yellow",
    Verdict.LOST: "bold red",
    Verdict.NO_TRAINING: "bold",
}
_WRAPPER = Console(file=StringIO(), width=WIDTH)
_PARTS = (*LOST, "unknown", "saves")


def show(report: RunReport) -> None:
    """Print the report."""
    out = console()
    for line in lines(report, is_unicode=_is_unicode(out)):
        out.print(line, soft_wrap=True)


def _is_unicode(out: Console) -> bool:
    return out.encoding.lower().startswith("utf")


def lines(report: RunReport, *, is_unicode: bool = True) -> Iterator[Text]:
    """The lines of the report, each of at most :data:`WIDTH` characters."""
    yield from _headline(report)
    for story in report.stories:
        yield Text()
        yield from _story(report, story, is_unicode=is_unicode)
    evacuated = report.history.evacuations
    if not report.stories:
        yield Text("no evacuation is recorded")
    if evacuated.farewells_left_out:
        yield Text(
            f"{counted(evacuated.farewells_left_out, 'older record')} of evacuations not read"
        )
    if evacuated.damaged:
        yield Text(f"{counted(len(evacuated.damaged), 'damaged record')}, such as")
        yield Text(_cut(f"  {evacuated.damaged[0]}", WIDTH))
    yield Text()
    yield from _loss(report)


def _headline(report: RunReport) -> Iterator[Text]:
    loss, commits = report.loss, report.history.commits
    for line in _wrapped(f"run {report.run}, {minute(report.written_wall_s)} UTC"):
        yield Text(line.plain, "bold")
    yield from _wrapped(summary(report))
    newest = commits.newest_whole
    count = len(commits.commits) + commits.left_out
    if newest is not None:
        sent = sum(commit.bytes_sent for commit in commits.commits)
        whole = sum(commit.size_bytes for commit in commits.commits)
        yield _fact(
            "commits",
            f"{count}; newest step {newest.ref.step}, {human_bytes(newest.size_bytes)}; "
            f"sent {human_bytes(sent)} of {human_bytes(whole)}",
        )
        if commits.unusable_since:
            yield _fact("", f"{commits.unusable_since} newer ones are not whole")
    else:
        yield _fact("commits", f"{count}; none is whole" if count else "none")
    if loss is not None:
        last = (
            ""
            if loss.ettr_last_hour is None
            else f"; last hour of training {loss.ettr_last_hour:.2%}"
        )
        ettr = "unknown" if loss.ettr is None else f"{loss.ettr:.2%}"
        yield _fact("ETTR", f"{ettr} of {human_span(loss.wall_s)}{last}")
        number = len(loss.interruptions)
        yield _fact(
            "lost", f"{human_span(loss.lost_gpu_s)} of GPU time, {counted(number, 'interruption')}"
        )
    for name, amount in report.amounts.items():
        yield _fact("cost", f"{amount}  {name}")


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<{_NAME}}", "dim"), _cut(value, WIDTH - _NAME))


def _story(report: RunReport, story: Story, *, is_unicode: bool) -> Iterator[Text]:
    recorded = story.recorded
    vm = f", {report.vm_of(story)}" if report.vm_of(story) else ""
    head = f"{second(recorded.opened_wall_s)} UTC  generation {recorded.generation}{vm}  "
    yield Text.assemble((head, "bold"), (recorded.verdict.value, _VERDICTS[recorded.verdict]))
    for sentence in sentences(story):
        yield from _wrapped(sentence)
    yield from _picture(story.picture, is_unicode=is_unicode)
    for line in comparisons(story):
        plan = f" (plan: {line.plan})" if line.plan else ""
        yield _fact("", f"{line.name}: {line.outcome}{plan}")


def _wrapped(sentence: str, columns: int = WIDTH - 2) -> Iterator[Text]:
    """Lines of a sentence by columns, not by characters: a wide character takes two."""
    for line in Text(sentence).wrap(_WRAPPER, columns):
        line.rstrip()
        yield line


def _picture(picture: Picture, *, is_unicode: bool) -> Iterator[Text]:
    for lane in picture.course.lanes:
        line = Text(set_cell_size(_cut(lane.name, _NAME - 1), _NAME))
        line.append_text(_bars(lane, picture, is_unicode=is_unicode))
        note, *more = _wrapped(lane.note, _NOTE)
        yield line.append(f" {note}", "dim")
        for each in more:
            yield Text(f"{'':<{WIDTH - _NOTE}}{each}", "dim")
    axis = [" "] * _BARS
    for tick in picture.on.ticks():
        start = min(round(tick.at * _BARS), _BARS - len(tick.label))
        if all(cell == " " for cell in axis[max(0, start - 1) : start + len(tick.label)]):
            axis[start : start + len(tick.label)] = tick.label
    left_out = ", ".join(each.name for each in picture.breaks)
    yield Text(_cut(f"{'':<{_NAME}}{''.join(axis)} {left_out}", WIDTH), "dim")


def _bars(lane: Lane, picture: Picture, *, is_unicode: bool) -> Text:
    """The bars of a lane; ``|`` marks the deadline, and ``/`` a break of the time axis."""
    cells = [(" ", "")] * _BARS
    for moment in picture.moments:
        if moment.kind == "deadline":
            cells[_cell(moment.at)] = ("│" if is_unicode else "|", "red")
    for bar in picture.bars(lane):
        symbol, ascii_symbol, style = _STYLES[bar.kind]
        for place in range(_cell(bar.left), max(_cell(bar.left) + 1, round(bar.right * _BARS))):
            cells[place] = (symbol if is_unicode else ascii_symbol, style)
    for each in picture.breaks:
        cells[_cell((each.left + each.right) / 2)] = ("╱" if is_unicode else "/", "dim")
    return Text.assemble(*cells)


def _cell(share: float) -> int:
    return min(_BARS - 1, int(share * _BARS))


def _loss(report: RunReport) -> Iterator[Text]:
    loss = report.loss
    if loss is None:
        yield Text("the run has not trained yet, or its trainers report no steps")
        return
    yield Text("time without progress", "bold")
    longest_s = max(loss.parts_s.values(), default=0.0)
    for part in _PARTS:
        seconds = loss.parts_s.get(part, 0.0)
        if seconds > 0:
            yield _fact(
                part.replace("_", "-"), f"{human_span(seconds):>12}  {_share(seconds, longest_s)}"
            )


def _share(seconds: float, longest_s: float) -> str:
    return "#" * max(1, round(40 * seconds / longest_s))


def _cut(text: str, columns: int) -> str:
    """The text, cut to at most this number of columns: a wide character takes two."""
    return text if cell_len(text) <= columns else f"{set_cell_size(text, columns - 3)}..."
