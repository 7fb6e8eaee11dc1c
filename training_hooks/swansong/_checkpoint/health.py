# SPDX-License-Identifier: Apache-2.0
"""Tracks the health of the training: the loss of each step, and since which step it has not been finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("swansong")


class LossMonitor:
    """Loss and metrics of the last step.  Only the thread of the training loop judges them."""

    def __init__(self) -> None:
        self.loss: Any = None
        self.metrics: Mapping[str, Any] = {}
        self.unhealthy_since: int | None = None
        """First of the latest steps whose loss is not finite; None if the last loss is finite."""
        self._has_warned = False

    def judge(self, step: int, *, is_finite: bool) -> None:
        """Record whether the loss of ``step`` is finite."""
        if is_finite:
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = step
            level = logging.INFO if self._has_warned else logging.WARNING
            self._has_warned = True
            log.log(
                level,
                "the loss of step %s is not finite; checkpoints continue, marked unhealthy",
                step,
            )

    def evaluate(self, step: int) -> dict[str, float]:
        """Judge the loss of ``step``; return loss and metrics as numbers.  Blocks for tensors on a device."""
        found = health_of(self.loss, self.metrics)
        if "loss_is_finite" in found:
            self.judge(step, is_finite=found["loss_is_finite"] == 1.0)
        return found

    def suspect_from(self, step: int) -> int:
        """Return the first step whose checkpoint is not trusted, while ``step`` is the last one.

        A loss that is not finite makes the state before its step suspect, too.
        """
        is_healthy = self.evaluate(step).get("loss_is_finite") != 0.0
        return step if is_healthy else (self.unhealthy_since or step) - 1

    def reset(self) -> None:
        """Drop all that is known, for a rollback."""
        self.loss, self.metrics, self.unhealthy_since = None, {}, None


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
