# SPDX-License-Identifier: Apache-2.0
"""Progress of a command on standard error: amount, rate and time left.

On a terminal this is a bar, and in a journal a line every few seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any, Self

from swansong_tools.commands.common import is_screen, note
from swansong_tools.units import human_bytes, human_s

_LINE_S = 5.0
"""Time between two lines without a terminal; shorter work prints no line."""
_RATE_S = 30.0
"""A rate is measured over this time, so that it follows the link."""
_SAMPLE_S = 0.5


class ProgressDisplay:
    """Shows the progress of one piece of work; call it with the amount done and the total, from any thread.

    Args:
        what: the work, for example ``restore``.
        unit: noun of the things that are counted; empty: bytes.
        is_quiet: show nothing, for ``--quiet`` and for programs that read JSON.
    """

    def __init__(self, what: str, unit: str = "", *, is_quiet: bool = False) -> None:
        self.detail = ""
        """Further words, which the caller may change at any time."""
        self._what = what
        self._unit = unit
        self._is_quiet = is_quiet
        self._lock = threading.RLock()
        self._done = self._total = 0
        self._rate = _Rate()
        self._line_mono_s = time.monotonic()
        self._has_lines = False
        self._bar: Any = None
        if not is_quiet and is_screen(sys.stderr):
            from swansong_tools.commands.terminal import bar  # noqa: PLC0415 - slow to import

            self._bar = bar(self.text)
            self._task = self._bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        now_mono_s = time.monotonic()
        with self._lock:
            # Another commit, whose bytes begin at zero.
            is_next = total != self._total or self._done >= self._total > done
            self._rate.add(done if is_next else done - self._done, now_mono_s)
            self._done, self._total = done, total
            if self._bar is not None:
                self._bar.start()  # not earlier: a terminal can show one bar at a time
                self._bar.update(self._task, completed=done, total=total)
                if done >= total:
                    self._bar.stop()
            elif now_mono_s >= self._line_mono_s + _LINE_S:
                self._line(now_mono_s)

    def begin(self, total: int) -> None:
        """Begin the next part of the work, with this total."""
        with self._lock:
            self._done, self._total = 0, total

    def add(self, amount: int) -> None:
        """Count what was done of this part."""
        with self._lock:
            self(self._done + amount, self._total)

    def text(self) -> str:
        """Share, amount, rate, time left and details."""
        with self._lock:
            done, total = self._done, self._total
            per_s = self._rate.per_s(time.monotonic())
        amounts = f"{self._amount(done)} of {self._amount(total)}{self._unit and f' {self._unit}'}"
        pieces = [f"{100 * done // total if total else 100} %", amounts]
        if per_s:
            pieces += [f"{self._amount(per_s)}/s", f"{human_s(round((total - done) / per_s))} left"]
        return ", ".join((*pieces, self.detail) if self.detail else pieces)

    def _amount(self, amount: float) -> str:
        if not self._unit:
            return human_bytes(amount)
        return f"{amount:.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.3g}"

    def _line(self, now_mono_s: float) -> None:
        if not self._is_quiet:
            note(f"{self._what}: {self.text()}")
        self._line_mono_s, self._has_lines = now_mono_s, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_lines and error is None:
            self._line(time.monotonic())


class _Rate:
    """The amount per second, over the last :data:`_RATE_S`."""

    def __init__(self) -> None:
        self._amount = 0
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, amount: int, now_mono_s: float) -> None:
        """Count what was done until now; negative if it has to be done again."""
        self._amount += amount
        if not self._samples or now_mono_s >= self._samples[-1][0] + _SAMPLE_S:
            self._samples.append((now_mono_s, self._amount))
        while len(self._samples) > 1 and self._samples[1][0] < now_mono_s - _RATE_S:
            self._samples.popleft()

    def per_s(self, now_mono_s: float) -> float | None:
        """None while it is unknown, or if nothing moves."""
        if not self._samples:
            return None
        since_mono_s, before = self._samples[0]
        elapsed_s = now_mono_s - since_mono_s
        moved = self._amount - before
        return moved / elapsed_s if elapsed_s >= _SAMPLE_S and moved > 0 else None
