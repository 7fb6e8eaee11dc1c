# SPDX-License-Identifier: Apache-2.0
"""Tracks the health of the training: whether the losses of the last steps are finite, and as usual."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from swansong._log import log

SPIKE = 20.0
"""Default distance of a limit from the usual losses, in their deviations."""
MIN, MAX = -sys.float_info.max, sys.float_info.max
LIMIT = "loss_limit"
"""In the health of a checkpoint: the highest loss that counted as usual."""
_WINDOW, _LEAST = 64, 16
"""Usual losses that are remembered, and the least that give a limit."""
_STRIDE = 16
"""Steps between two of them, after the first ones."""
_DEVIATION_MIN = 0.05
"""Least deviation, relative to the median."""
_IN_A_ROW = 5
"""Losses above the limit until training counts as unhealthy.

The rule follows ``KillLossSpike`` of LLM Foundry, which stops at the fifth loss in a row that is above twice
the mean of the last hundred.
"""


class LossMonitor:
    """Loss and metrics of the last step.  Only the thread of the training loop judges them.

    A finite loss is usual up to a limit: the median of earlier losses plus ``spike`` times their deviation.
    The median distance from the median is a robust estimate of the deviation.

    Args:
        spike: None: each finite loss is usual.
    """

    def __init__(self, spike: float | None = SPIKE) -> None:
        self.limit = MAX
        self._spike = spike
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Drop the last losses, but not the limit, for a rollback."""
        self.loss: Any = None
        self.metrics: Mapping[str, Any] = {}
        self.judge_at = 0
        """The next step whose loss is to be judged, even if it is a plain number within the limit."""
        self._judged_step = -1
        self._above: list[int] = []
        """The latest steps whose losses are not finite or not usual, at most :data:`_IN_A_ROW`."""
        self.is_healthy = True
        """False after a loss that is not finite, or several above the limit, until one is usual."""

    def judge(self, step: int, loss: float) -> None:
        """Judge the loss of ``step``; a second call for the same step does nothing."""
        if step == self._judged_step:
            return
        self._judged_step = step
        if MIN <= loss <= self.limit:
            self._above, self.is_healthy = [], True
            self._remember(loss)
            self.judge_at = step + (1 if len(self._usual) < _WINDOW else _STRIDE)
            return
        self.judge_at = step + 1
        if len(self._above) < _IN_A_ROW:
            self._above.append(step)
        if self.is_healthy and not math.isfinite(loss):
            self._become_unhealthy(f"the loss of step {step} is not finite")
        elif self.is_healthy and len(self._above) == _IN_A_ROW:
            self._become_unhealthy(
                f"the loss is {loss:.4g} at step {step}, and above its limit of {self.limit:.4g} since step"
                f" {self._above[0]} (if that is intended, pass spike=None to attach())"
            )

    def evaluate(self, step: int) -> dict[str, float]:
        """Judge the loss of ``step``; return loss and metrics as numbers.  Blocks for tensors on a device."""
        found = health_of(self.loss, self.metrics)
        if "loss_is_finite" in found:
            loss = found.get("loss", math.nan)
            self.judge(step, loss)
            if self.limit < MAX:
                found["loss_is_usual"] = float(loss <= self.limit)
                found[LIMIT] = self.limit
        return found

    def suspect_from(self, step: int) -> int:
        """Return the first step whose checkpoint is not trusted, while ``step`` is the last one.

        A loss that is not finite or not usual makes the state before its step suspect, too.
        """
        self.evaluate(step)
        return self._above[0] - 1 if self._above else step

    def resume(self, health: Mapping[str, float]) -> None:
        """Start with the limit of the checkpoint that was loaded: its losses may be unusual already."""
        if self._spike is not None and not self._usual:
            self.limit = health.get(LIMIT, self.limit)

    def _remember(self, loss: float) -> None:
        self._usual.append(loss)
        if self._spike is not None and len(self._usual) >= _LEAST:
            middle = _median(self._usual)
            # 1.4826 makes the median distance of normal numbers their standard deviation.
            deviation = 1.4826 * _median([abs(each - middle) for each in self._usual])
            deviation = max(deviation, _DEVIATION_MIN * abs(middle))
            self.limit = min(middle + self._spike * deviation, MAX) if deviation else MAX

    def _become_unhealthy(self, reason: str) -> None:
        level = logging.INFO if self._has_warned else logging.WARNING
        self.is_healthy, self._has_warned = False, True
        log.log(level, "%s; checkpoints continue, marked unhealthy", reason)


def _median(values: Collection[float]) -> float:
    """The upper median; statistics.median() takes three times as long."""
    return sorted(values)[len(values) // 2]


def health_of(loss: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite ones of loss and metrics, and ``loss_is_finite`` (0 or 1) if the loss is a number."""
    health: dict[str, float] = {}
    for name, value in {**metrics, "loss": loss}.items():
        try:
            # torch warns about float() of a loss with a graph, and the warning may be an error.
            number = float(value.detach() if hasattr(value, "detach") else value)
        except Exception:  # noqa: S112 - a bad metric must not cost a checkpoint
            continue
        if math.isfinite(number):
            health[name] = number
        if name == "loss":
            health["loss_is_finite"] = float(math.isfinite(number))
    return health
