# SPDX-License-Identifier: Apache-2.0
"""Tells the daemon, at most once a second, how fast the trainer steps and saves: what it plans with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from swansong.protocol import Message, Progress

INTERVAL_S = 1.0


class Reporter:
    """Lives in the background thread, so that a step need not look at the clock.

    Args:
        send: says something to the daemon, without waiting.
    """

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._last = Progress(step=-1)
        self._last_mono_s = time.monotonic()
        self._last_saving_s = 0.0

    def tick(
        self, step: int, loss: Any, save_s: float | None, save_bytes: int | None, saving_s: float
    ) -> None:
        """Report if there is news and the last report is old enough.

        Args:
            step: last completed one.
            loss: of that step; only a plain number is sent, for to read a tensor waits for the device.
            save_s: how long the last checkpoint took to write.
            save_bytes: its size.
            saving_s: how long all checkpoints together took, which is no time of steps.
        """
        now = time.monotonic()
        elapsed_s = now - self._last_mono_s
        last = self._last
        if elapsed_s < INTERVAL_S or (step, save_s) == (last.step, last.save_s):
            return
        step_s = last.step_s
        if step > last.step >= 0:
            stepping_s = elapsed_s - (saving_s - self._last_saving_s)
            step_s = max(0.0, stepping_s) / (step - last.step)
        number = float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None
        self._last_mono_s, self._last_saving_s = now, saving_s
        self._last = Progress(
            step=step, loss=number, step_s=step_s, save_s=save_s, save_bytes=save_bytes
        )
        self._send(self._last)
