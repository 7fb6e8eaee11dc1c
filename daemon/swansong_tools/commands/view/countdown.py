# SPDX-License-Identifier: Apache-2.0
"""Countdowns to the end of the VM: the time left in large digits, and a bar of the whole notice."""

from __future__ import annotations

from dataclasses import dataclass

from swansongd.observe.status import DaemonStatus

from swansong_tools.units import human_s

_FONT = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71122", "8": "75757", "9": "75717", "h": "44755", "d": "11757",
}  # fmt: skip
"""Five rows of three pixels for each character: one octal digit is one row."""
_COLON = ["▄", "▄", " "]
"""Not in the font: it is one column wide."""
_HALVES = " ▄▀█"
"""By the lower and the upper pixel of a cell."""
ROWS = 3
_HOUR_S, _DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown:
    """The time to a deadline, as of the status."""

    key: str
    """Identity over several statuses."""
    source: str
    title: str
    left_s: float
    is_evacuation: bool = False


def countdowns(status: DaemonStatus) -> list[Countdown]:
    """The open evacuation, then the notices that it does not answer, the nearest deadline first."""
    evacuation, found = status.evacuation, []
    if evacuation is not None:
        found.append(
            Countdown(
                key=evacuation.id,
                source=evacuation.reason.partition(":")[0],
                title=evacuation.reason,
                left_s=evacuation.seconds_left,
                is_evacuation=True,
            )
        )
    notices = []
    for notice in status.notices:
        if not (found and notice.source == found[0].source):
            title = f"{notice.source}, {notice.severity}"
            left_s = notice.seconds_left
            notices.append(Countdown(key=title, source=notice.source, title=title, left_s=left_s))
    return found + sorted(notices, key=lambda notice: notice.left_s)


def clock(seconds_left: float) -> str:
    """The time left as ``1:27``, ``2h05`` or ``3d``; never negative."""
    left = max(0, int(seconds_left))
    if left < _HOUR_S:
        return f"{left // 60}:{left % 60:02}"
    if left < 4 * _DAY_S:
        return f"{left // 3600}h{left % 3600 // 60:02}"
    return f"{min(left // 86400, 999)}d"


def large(text: str) -> list[str]:
    """The text of :func:`clock` in large characters, as lines of equal width."""
    glyphs = [_glyph(character) for character in text]
    return [" ".join(glyph[row] for glyph in glyphs) for row in range(ROWS)]


def _glyph(character: str) -> list[str]:
    if character == ":":
        return _COLON
    pixels = [int(digit) for digit in _FONT[character]] + [0]
    return [
        "".join(_HALVES[2 * (upper >> bit & 1) + (lower >> bit & 1)] for bit in (2, 1, 0))
        for upper, lower in zip(pixels[::2], pixels[1::2], strict=True)
    ]


def bar(seconds_left: float, total_s: float, width: int, *, is_ascii: bool = False) -> str:
    """A bar of the time left; it shrinks to the left."""
    full, empty = "#-" if is_ascii else "█░"
    part = min(1.0, max(0.0, seconds_left / total_s)) if total_s > 0 else 0.0
    filled = round(part * width)
    return full * filled + empty * (width - filled)


def in_words(seconds_left: float) -> str:
    """The time left, or the time since the end, in words."""
    if seconds_left >= 0:
        return f"{human_s(int(seconds_left))} left"
    return f"the deadline passed {human_s(int(-seconds_left))} ago"
