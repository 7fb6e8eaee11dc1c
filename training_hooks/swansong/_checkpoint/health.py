# SPDX-License-Identifier: Apache-2.0
"""Whether the training is in good health: the loss of each step, and since when it is not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from swansong._checkpoint.staging import health_of

log = logging.getLogger("swansong")


class LossMonitor:
    """What the training loop says of its last step; only its own thread comes here to judge."""

    def __init__(self) -> None:
        self.loss: Any = None
        self.metrics: Mapping[str, Any] = {}
        self.unhealthy_since: int | None = None
        """First step whose loss was not finite, while none has been since."""
        self._has_warned = False

    def judge(self, step: int, *, is_finite: bool) -> None:
        """So is the loss of ``step``."""
        if is_finite:
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = step
            level = logging.INFO if self._has_warned else logging.WARNING
            self._has_warned = True
            log.log(
                level, "the loss of step %s is not finite; checkpoints go on, marked as such", step
            )

    def look(self, step: int) -> dict[str, float]:
        """Loss and metrics of ``step`` as numbers, judged; a tensor is waited for."""
        found = health_of(self.loss, self.metrics)
        if "loss_is_finite" in found:
            self.judge(step, is_finite=found["loss_is_finite"] == 1.0)
        return found

    def suspect_from(self, step: int) -> int:
        """First step whose checkpoint is not to be trusted, while ``step`` is the last one.

        The step whose loss was the first that is not finite began with a state that is suspect.
        """
        is_healthy = self.look(step).get("loss_is_finite") != 0.0
        return step if is_healthy else (self.unhealthy_since or step) - 1

    def forget(self) -> None:
        """Training goes back to before all that was said."""
        self.loss, self.metrics, self.unhealthy_since = None, {}, None
