# SPDX-License-Identifier: Apache-2.0
"""Tells the daemon, at most once a second, how fast the trainer steps and saves: what it plans with.

Also notices pauses in which no request would be heard.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from swansong._checkpoint.saver import SaveCost
from swansong.protocol import Message, Progress

INTERVAL_S = 1.0

log = logging.getLogger("swansong")


class Reporter:
    """Lives in the background thread, so that a step need not look at the clock.

    Args:
        send: says something to the daemon, without waiting.
    """

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._last = Progress(step=-1)
        self._unsent: Progress | None = None
        """A start that could not be reported yet."""
        self._last_polls = 0
        self._last_mono_s = time.monotonic()
        self._last_blocked_s = 0.0

    def tick(self, step: int, loss: Any, cost: SaveCost, polls: int = 0) -> None:
        """Report if there is news, or a poll at least, and the last report is old enough.

        Args:
            step: last completed one.
            loss: of that step; only a plain number is sent, for to read a tensor waits for the device.
            cost: what the last save cost; while the loop was held up, it made no steps.
            polls: how often the loop has polled so far.
        """
        if self._unsent is not None and self._send(self._unsent):
            self._unsent = None
        now = time.monotonic()
        elapsed_s = now - self._last_mono_s
        last = self._last
        known = (last.step, last.save_s, self._last_polls)
        if elapsed_s < INTERVAL_S or (step, cost.save_s, polls) == known:
            return
        step_s = last.step_s
        if step > last.step >= 0 and not last.start_id:
            stepping_s = elapsed_s - (cost.blocked_s - self._last_blocked_s)
            step_s = max(0.0, stepping_s) / (step - last.step)
        number = _plain(loss)
        is_finite = None if number is None else math.isfinite(number)
        self._last_mono_s, self._last_blocked_s = now, cost.blocked_s
        self._last_polls = polls
        self._last = Progress(
            step=step,
            loss=number if is_finite else None,
            loss_is_finite=is_finite,
            step_s=step_s,
            save_s=cost.save_s,
            save_bytes=cost.size_bytes,
            snapshot_s=cost.snapshot_s,
        )
        self._send(self._last)

    def is_behind(self, step: int) -> bool:
        """Whether a later step was reported: the script has loaded an older state by itself."""
        return 0 <= step < self._last.step

    def started(self, step: int, start_id: str) -> None:
        """Report that training starts from ``step``: at once, or as soon as the daemon is connected."""
        self._last = start = Progress(step=step, start_id=start_id)
        self._last_mono_s = time.monotonic()
        self._unsent = None if self._send(start) else start


def _plain(loss: Any) -> float | None:
    """A loss that is a plain number; None for a tensor and other values that may block."""
    if not isinstance(loss, (int, float)):
        return None
    try:
        return float(loss)
    except OverflowError:  # an integer beyond all floats
        return math.inf


class PauseWatch:
    """Warns when the loop neither steps nor polls for longer than a notice leaves it.

    Lives in the background thread; its resolution is that of its calls, a second or so.
    """

    def __init__(self) -> None:
        self._seen = (-1, 0)
        self._since_mono_s = 0.0
        self._has_warned = False

    def tick(self, step: int, polls: int, grace_s: float) -> None:
        """Look at where the loop is.

        Args:
            step: last completed one; before the first nothing can be saved, and nothing is said.
            polls: how often the loop has polled so far.
            grace_s: shortest notice to be expected; 0 when unknown.
        """
        now = time.monotonic()
        if (step, polls) != self._seen or step < 0:
            self._seen, self._since_mono_s = (step, polls), now
        elif 0 < grace_s < now - self._since_mono_s and not self._has_warned:
            self._has_warned = True
            log.warning(
                "neither guard.step() nor guard.poll() was called for %.0f s after step %s, and a notice"
                " may leave only %.0f s: call guard.poll() in evaluation, warm-up and other long pauses",
                now - self._since_mono_s,
                step,
                grace_s,
            )
