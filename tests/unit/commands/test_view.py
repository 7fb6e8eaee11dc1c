# SPDX-License-Identifier: Apache-2.0
"""The live view of ``swansong status --watch``, and its lines for a log: pure functions of the statuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from swansong.bounds import BoundsError
from swansong_bucket.model import GpuHealth, Health, Verdict
from swansong_tools.commands.view.changes import changes, facts_of
from swansong_tools.commands.view.countdown import bar, clock, countdowns, large
from swansong_tools.commands.view.live import Canvas, Frame, view
from swansong_tools.commands.view.once import print_status
from swansong_tools.commands.view.poller import Poll
from swansong_tools.commands.view.recent import PollHistory, sparkline
from swansong_tools.commands.view.rows import rows
from swansongd.observe.status import (
    DaemonStatus,
    FlushStatus,
    Margin,
    NoticeStatus,
    TrainerStatus,
    from_json,
    to_json,
)

from testkit import status_picture
from testkit.status_picture import NOON_WALL_S, status, statuses

BADGE = {"SAFE": "\x1b[1;7;32m", "PARTIAL": "\x1b[1;7;33m", "LOST": "\x1b[1;7;31m"}
"""Bold, reverse, and green, yellow or red."""


def polled(*seen: DaemonStatus) -> PollHistory:
    """The statuses arrived at intervals of a second."""
    history = PollHistory()
    for at_s, each in enumerate(seen):
        history.take(Poll(float(at_s), NOON_WALL_S + at_s, each))
    return history


def frame_of(*seen: DaemonStatus) -> Frame:
    return Frame(polled(*seen), len(seen) - 1.0, NOON_WALL_S)


def drawn(
    frame: Frame, width: int = 80, height: int = 24, *, is_ascii: bool = False, **options: Any
) -> list[str]:
    """The lines of the view, without trailing blanks; with ``color_system`` they have escape codes."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=height, markup=False, highlight=False,
        _environ={}, **options,
    )  # fmt: skip
    console.print(view(frame, Canvas(width, height, is_ascii=is_ascii)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


# ---------------------------------------------------------------- one look

ON_TIME = Margin(source="aws.spot", grace_s=120.0, spare_s=71.4, fits=True)
TOO_LATE = Margin(source="logind", grace_s=30.0, spare_s=-4.1, fits=False, lost_since_step=7)
NO_TRAINER = Margin(
    source="host", grace_s=25.0, spare_s=25.0, fits=False, problem=f"no trainer{' at all' * 10}"
)


@pytest.mark.parametrize(
    ("margins", "words"),
    [
        pytest.param([ON_TIME], "SAFE is expected, with 71.4 s to spare", id="on time"),
        pytest.param([ON_TIME, TOO_LATE], "not SAFE: logind: 4.1 s short", id="too late"),
        pytest.param([ON_TIME, NO_TRAINER], "not SAFE: no trainer", id="another problem"),
        pytest.param([ON_TIME, replace(ON_TIME, fits=None)], "perhaps not SAFE", id="unknown"),
        pytest.param([], "perhaps not SAFE", id="no source"),
    ],
)
def test_the_first_line_says_whether_a_notice_now_would_be_safe(
    margins: list[Margin], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forecast of the worst kind of notice; no line has more than 80 columns without a terminal."""
    print_status(replace(status(-5.0), margins=tuple(margins)))
    first, *others = capsys.readouterr().out.splitlines()
    assert re.match(rf"notice now +{words}", first)
    assert max(map(len, [first, *others])) <= 80


def test_the_first_line_of_an_evacuation_is_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status(12.0))
    assert capsys.readouterr().out.startswith(
        "evacuation       aws.spot: terminate: TAKE, FLUSHING"
    )


def test_a_verdict_without_a_checkpoint_expects_no_commit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The forecast of an evacuation that is over would be taken for one of the present."""
    seen = status(-5.0)
    last = replace(seen.last_verdict, verdict=Verdict.LOST, expected_s=42.0, took_s=None)
    print_status(replace(seen, verdict=Verdict.LOST, last_verdict=last))
    assert "expected" not in capsys.readouterr().out


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("size", [(80, 24), (60, 12), (132, 60), (20, 5), (1, 1)])
@pytest.mark.parametrize("second", [-5.0, 33.0])
def test_the_view_fits_every_terminal(size: tuple[int, int], second: float) -> None:
    """No line is wider than the terminal, and there are no more lines than rows."""
    width, height = size
    lines = drawn(frame_of(status(second)), width, height)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


def test_a_line_that_is_too_long_ends_with_an_ellipsis() -> None:
    """The reader sees that the terminal has no room for the rest."""
    lines = drawn(frame_of(status(33.0)), 60, 24)
    (margin,) = (line for line in lines if "logind: 4.1 s short" in line)
    assert (cell_len(margin), margin[-1]) == (60, "…")


def test_a_small_terminal_keeps_the_important_lines() -> None:
    """Verdict and countdown come first, then problems; the version of the daemon is the first to go."""
    seen = status(33.0)
    lines = drawn(frame_of(seen), 80, 4)
    assert lines[0].startswith(" EVACUATING")
    assert any("1:27" in line for line in lines)
    assert any("logind: 4.1 s short" in line for line in lines)
    shown = "\n".join(drawn(frame_of(seen), 80, 20))
    assert "last commit" in shown
    assert "daemon " not in shown
    assert "daemon " in "\n".join(drawn(frame_of(seen), 80, 40))


@pytest.mark.parametrize("verdict", list(BADGE))
def test_the_verdict_is_a_word_and_a_colour(verdict: str) -> None:
    """It fills the first line, in bold and reverse also with NO_COLOR."""
    seen = replace(status(33.0), verdict=Verdict(verdict))
    frame = frame_of(seen)
    first, *_ = drawn(frame, color_system="standard", force_terminal=True)
    assert first.startswith(f"{BADGE[verdict]} {verdict} ")
    first, *_ = drawn(frame, color_system="standard", force_terminal=True, no_color=True)
    assert first.startswith(f"\x1b[1;7m {verdict} ")
    assert drawn(frame)[0].startswith(f" {verdict} ")


def test_the_last_verdict_stays_visible_without_a_notice() -> None:
    """Its age distinguishes it from the verdict of an open evacuation."""
    seen = replace(status(-5.0), verdict=Verdict.LOST)
    assert "IDLE  no notice is in force" in drawn(frame_of(seen))[0]
    assert drawn(frame_of(seen))[0].endswith("LOST was the last verdict, 25.8 h ago")


@pytest.mark.fault("OT01")
def test_the_countdown_continues_without_the_daemon() -> None:
    """While the daemon is away, the seconds left are those of its last report less the time since."""
    history = polled(*(each for _, each in statuses()))
    newest_s = history.status_mono_s
    for at_s, reason in ((newest_s + 1.0, "first"), (newest_s + 12.0, "connecting failed\x1b[2J")):
        history.take(Poll(at_s, NOON_WALL_S + at_s, None, reason))
    lines = drawn(Frame(history, newest_s + 12.0, NOON_WALL_S))
    assert lines[0].startswith(" DAEMON NOT RESPONDING since 12:01:04 UTC (11 s)")
    assert any("connecting failed\\x1b[2J" in line for line in lines)
    assert any("75 s left" in line for line in lines)
    never = PollHistory()
    never.take(Poll(0.0, NOON_WALL_S, None, "connecting failed"))
    assert drawn(Frame(never, 0.0, NOON_WALL_S))[0].startswith(" DAEMON NOT RESPONDING")


def test_each_notice_has_a_countdown() -> None:
    """The evacuation is large; a notice that it does not answer has a line of its own."""
    notices = tuple(
        NoticeStatus(source=source, kind="", severity=severity, seconds_left=left_s, identities=())
        for source, severity, left_s in (
            ("aws.spot", "imminent", 87.0),
            ("aws.rebalance", "advisory", 4000.0),
            ("aws.scheduled", "scheduled", 900.0),
        )
    )
    seen = replace(status(33.0), notices=notices)
    titles = [each.title for each in countdowns(seen)]
    assert titles == [
        "aws.spot: terminate", "aws.scheduled, scheduled", "aws.rebalance, advisory",
    ]  # fmt: skip
    shown = "\n".join(drawn(frame_of(seen)))
    assert "15:00" in shown
    assert "1h06" in shown
    seen = replace(seen, evacuation=None)
    assert "aws.spot, imminent" in drawn(frame_of(seen), 80, 8)[2]


def test_the_bar_is_that_of_the_whole_notice() -> None:
    """A command that starts late knows the length of the notice from the margin of its source."""
    late = countdowns(status(90.0))[0]
    assert polled(status(90.0)).total_s(late) == 120.0
    assert bar(30.0, 120.0, 8) == "██░░░░░░"
    assert bar(30.0, 0.0, 2, is_ascii=True) == "--"


@pytest.mark.fault("OT03")
def test_a_terminal_without_unicode_gets_ascii() -> None:
    """Neither blocks nor large digits: each cell is one byte."""
    lines = drawn(frame_of(*(each for _, each in statuses())), is_ascii=True)
    assert all(line.isascii() for line in lines), lines
    assert any(line.startswith(" 1:27") and "####" in line for line in lines)


def test_large_digits_have_equal_lines() -> None:
    """Each character of a clock has a picture."""
    for seconds in (0, 59.9, 61, 3600, 86_399, 4e5, 1e12, -5):
        assert len({len(row) for row in large(clock(seconds))}) == 1
    assert [clock(each) for each in (-3, 87.9, 7500, 4 * 86_400)] == ["0:00", "1:27", "2h05", "4d"]


def test_a_healthy_store_has_the_age_of_its_last_answer() -> None:
    """An idle daemon asks it once a minute: ``ok`` does not mean that it answers now."""
    shown = drawn(frame_of(replace(status(-5.0), store_answer_age_s=40.0)))
    assert any("ok: responds, for 25 h; last answer 40 s ago" in line for line in shown), shown


def test_a_bad_gpu_or_source_has_a_line_of_its_own() -> None:
    """The healthy ones share a line, and a small terminal still shows the others."""
    seen = status(-5.0)
    gpus, sources = list(seen.gpus), list(seen.sources)
    gpus[3] = replace(gpus[3], health=GpuHealth.DYING, reason="Xid 48", for_s=7.0)
    sources[1] = replace(sources[1], health=Health.BLIND, reason="HTTP 500")
    seen = replace(seen, gpus=tuple(gpus), sources=tuple(sources))
    frame = frame_of(seen)
    lines = drawn(frame, 80, 6)
    assert any("GPU             3 H100 dying: Xid 48, for 7 s" in line for line in lines), lines
    assert any("aws.rebalance blind: HTTP 500" in line for line in lines), lines
    shown = "\n".join(drawn(frame))
    assert "GPUs            7 ok" in shown
    assert "3 ok: aws.spot, aws.asg, logind" in shown
    coloured = drawn(frame, color_system="standard", force_terminal=True)
    assert any("\x1b[31m3 H100 dying" in line for line in coloured), coloured


# ---------------------------------------------------------------- sparklines


def test_a_sparkline_goes_from_zero_to_the_greatest_value() -> None:
    """Unknown values are blank, and the newest one is at the right."""
    assert sparkline([None, 0.0, 3.0, 6.0, 7.0], 6) == "  ▁▄▇▇"
    assert sparkline([1.0, 0.0, 2.0], 2) == "▁▇"
    assert sparkline([], 3) == "   "
    assert sparkline([0.0, 0.0], 0) == ""


def test_the_figures_are_rates_of_the_recent_reports() -> None:
    """A new set starts at zero bytes, and a restart of the training is not a negative speed."""

    def seen(step: int, flight: int | None, stored: int) -> DaemonStatus:
        flush = flight and FlushStatus(step=flight, size_bytes=1000, stored_bytes=stored, for_s=1.0)
        trainer = TrainerStatus(pid=1, rank=0, world_size=1, step=step, connected=True)
        return replace(status(-5.0), trainers=(trainer,), flush=flush or None)

    history = polled(
        seen(10, None, 0), seen(12, 11, 0), seen(14, 11, 500), seen(3, 12, 10), seen(4, 12, 30)
    )
    assert history.bytes_per_s == [0.0, None, 500.0, None, 20.0]
    assert history.steps_per_s == [None, 2.0, 2.0, None, None]


# ---------------------------------------------------------------- hostile daemons

LEAVES: Sequence[Any] = (
    None, True, -1, 10**400, 1e308, float("nan"), float("inf"), 1e300, 2**63 - 1, "", "SAFE",
    "\x1b[2J\x1b]0;x\x07", "x" * 3000, "[bold]", "\u202e", "\ud800", "漢字\u0301" * 50, [], {}, [[1]],
    {"a": {}}, [{}], [None, 3],
)  # fmt: skip


@st.composite
def broken_reports(draw: st.DrawFn) -> object:
    """The JSON of a status in which a value has been replaced, at any depth."""
    report = json.loads(json.dumps(to_json(status(33.0))))
    body: Any = [report]
    key: Any = 0
    while isinstance(body[key], dict | list) and body[key] and draw(st.booleans()):
        body = body[key]
        key = draw(st.sampled_from(list(body) if isinstance(body, dict) else range(len(body))))
    whole = body if body[key] is report else [report]
    body[key] = draw(st.sampled_from(LEAVES))
    return whole[0]


@pytest.mark.fault("OT02")
@settings(max_examples=200)
@given(broken_reports())
def test_a_broken_report_is_refused_or_shown(report: object) -> None:
    """The error names the field.  What is accepted has lines that fit, without control characters."""
    try:
        seen, problem = from_json(report), ""
    except BoundsError as error:
        seen, problem = status(33.0), str(error)
    assert not problem or re.match(r"status[\w.\[\]']* (is|has|contains) ", problem), problem
    lines = drawn(frame_of(seen, seen))
    assert len(lines) <= 24
    for line in (*lines, *changes({}, facts_of(seen)), *(row.text for row in rows(seen))):
        assert line.isprintable(), line
    assert max(map(cell_len, lines), default=0) <= 80


# ---------------------------------------------------------------- lines for a log


def test_only_changes_are_lines() -> None:
    """Figures that change at each poll make no line, and the end of a fact makes one."""
    calm, later, notice = status(-5.0), status(-4.0), status(1.0)
    assert list(changes(facts_of(calm), facts_of(later))) == []
    told = list(changes(facts_of(later), facts_of(notice)))
    assert "state: CHECKPOINTING" in told
    assert "verdict: -" in told
    assert "evacuation: aws.spot: terminate: TAKE, 119 s left" in told
    assert "evacuation: none" in list(changes(facts_of(notice), facts_of(calm)))


def test_a_margin_with_a_problem_is_not_told_as_one_of_time() -> None:
    """Without a trainer a notice is not "too late": it leaves 25 s."""
    told = list(changes({}, facts_of(replace(status(-5.0), margins=(NO_TRAINER,)))))
    assert f"margin host: not SAFE: {NO_TRAINER.problem}" in told


def test_a_problem_is_a_line_when_it_begins_and_when_it_ends() -> None:
    """Two stalled ranks are two facts."""
    one, two, *more = status(-5.0).trainers
    stalled = replace(
        status(-5.0),
        trainers=(replace(one, stalled_s=60.0), replace(two, stalled_s=60.0), *more),
    )
    told = list(changes(facts_of(status(-5.0)), facts_of(stalled)))
    assert len(told) == 2
    assert "rank 0 at step" in told[0]
    assert "rank 1 at step" in told[1]
    over = list(changes(facts_of(stalled), facts_of(status(-5.0))))
    assert over == ["problem: none", "problem 2: none"]


# ---------------------------------------------------------------- docs


def test_the_picture_in_the_docs_is_current() -> None:
    """Draw it again with ``python -m testkit.status_picture``; it loads nothing from the network."""
    stored = status_picture.FILE.read_text(encoding="utf-8")
    assert stored == status_picture.picture()
    assert len(stored) < 100_000
    assert "http" not in stored.replace('xmlns="http://www.w3.org/2000/svg"', "")
