# SPDX-License-Identifier: Apache-2.0
"""Reports to the daemon, at most once a second, how fast the trainer steps and saves.

Also warns about pauses in which no request could be served.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from swansong._checkpoint.saver import SaveCost
from swansong._checkpoint.training_health import LossMonitor
from swansong._log import log
from swansong._ranks.start import TrainingStart
from swansong.protocol import Message, Progress

INTERVAL_S = 1.0


class Reporter:
    """Measures the time of a step.  It runs in the background thread, so that a step reads no clock.

    Args:
        send: sends a message to the daemon, without blocking.
        start: that this rank belongs to.
        health: loss of the last step.  Only a plain number is sent: reading a tensor blocks on its device.
        cost: of the last save.  The time for which saves blocked the loop does not count as step time.
        own_s: returns the time of the part of a step in which this rank waits for no other.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        start: TrainingStart,
        health: LossMonitor,
        cost: SaveCost,
        own_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._send = send
        self._start = start
        self._health, self._cost, self._own_s = health, cost, own_s
        self._last = Progress(step=-1)
        self._unsent_step: int | None = None
        """First step of a start of the training that was not sent yet."""
        self.lock = threading.Lock()
        """Held while a start is reported: a tick must not report a step of the start before as one of it."""
        self.started_at = -1
        """Step from which the training started."""
        self.awaits_step = True
        """Whether no new step was reported since the training started."""
        self._last_polls = 0
        self._last_mono_s = time.monotonic()
        self._last_blocked_s = 0.0

    def tick(self, step: int, polls: int = 0) -> None:
        """Report after a step, a save or a poll, if the last report is at least :data:`INTERVAL_S` old.

        The first new step after a start is reported without this wait.

        Args:
            step: last completed step.
            polls: number of polls so far.
        """
        self._send_start()
        now = time.monotonic()
        elapsed_s = now - self._last_mono_s
        last, cost = self._last, self._cost
        known = (last.step, last.save_s, self._last_polls)
        is_first = self.awaits_step and step > last.step >= 0
        if (elapsed_s < INTERVAL_S and not is_first) or (step, cost.save_s, polls) == known:
            return
        step_s = last.step_s
        if step > last.step >= 0 and not self.awaits_step:
            stepping_s = elapsed_s - (cost.blocked_s - self._last_blocked_s)
            step_s = max(0.0, stepping_s) / (step - last.step)
        number = _plain(self._health.loss)
        is_finite = None if number is None else math.isfinite(number)
        self._last_mono_s, self._last_blocked_s = now, cost.blocked_s
        self._last_polls = polls
        self._last = Progress(
            step=step,
            loss=number if is_finite else None,
            loss_is_finite=is_finite,
            loss_is_usual=None if number is None else self._health.is_healthy,
            step_s=step_s,
            own_s=self._own_s(),
            save_s=cost.save_s,
            save_bytes=cost.size_bytes,
            snapshot_s=cost.snapshot_s,
        )
        self.awaits_step = self.awaits_step and step <= last.step
        self._send(self._last)

    def ended(self, step: int) -> None:
        """Report the last step: no further report follows."""
        is_unsent = self._unsent_step is not None
        self._send_start()
        if is_unsent or step > self._last.step:
            self._send(Progress(step=step))

    def started(self, step: int) -> None:
        """Report that training starts from ``step``.

        Now, or as soon as the daemon is connected and the id of the start is known.
        """
        self._last = Progress(step=step)
        self._last_mono_s = time.monotonic()
        self._unsent_step = self.started_at = step
        self.awaits_step = True
        self._send_start()

    def _send_start(self) -> None:
        if self._unsent_step is not None:
            report = self._start.report(self._unsent_step)
            if report is not None and self._send(report):
                self._unsent_step = None


def _plain(loss: Any) -> float | None:
    """Return a loss that is a plain number; None for a tensor or another value that may block."""
    if not isinstance(loss, (int, float)):
        return None
    try:
        return float(loss)
    except OverflowError:  # an integer beyond all floats
        return math.inf


class PauseWatch:
    """Warns when the loop neither steps nor polls for longer than the grace period.

    It runs in the background thread, with a resolution of about a second.
    """

    def __init__(self) -> None:
        self._seen = (-1, 0)
        self._since_mono_s = 0.0
        self._has_warned = False

    def tick(self, step: int, polls: int, grace_s: float) -> None:
        """Check the progress of the loop.

        Args:
            step: last completed step; -1 before the first, when nothing can be saved.
            polls: number of polls so far.
            grace_s: shortest grace period to expect, in seconds; 0 if unknown.
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
