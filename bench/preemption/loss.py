# SPDX-License-Identifier: Apache-2.0
"""The loss of one preemption, from the steps that a witness saw, and the bound that Swansong promises."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GAP_STEPS = 3.0
"""A gap between two steps counts as a stall above this multiple of the usual step."""
START_S = 5.0
"""Part of the bound for the start of the daemon and of the trainer, with all its imports."""

Steps = Sequence[tuple[int, float]]
"""Number and monotonic instant of each completed step."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Seconds of training that a preemption cost, without the named pause."""

    step_s: float
    """Usual time of a step on the first VM."""
    stall_s: float
    """From the notice to the power cut: time beyond the usual step in which no step was completed."""
    redone_s: float
    """Training time of the steps after the restored one."""
    down_s: float
    """From the power cut to the first new step, without that step and without the pause."""
    last_step: int
    restored_step: int

    @property
    def total_s(self) -> float:
        return self.stall_s + self.redone_s + self.down_s


def split(
    before: Steps, after: Steps, *, restored: int, noticed: float, cut: float, pause_s: float
) -> Loss:
    """The loss of a preemption.

    Args:
        before: steps of the first VM.
        after: steps of the second VM.
        restored: step that the second VM resumed from.
        noticed: monotonic instant of the notice.
        cut: monotonic instant of the power cut.
        pause_s: time from the power cut to the start of the second VM.
    """
    instants = [at for _, at in before]
    gaps = [late - early for early, late in itertools.pairwise(instants)]
    step_s = statistics.median(gaps)
    # The last gap ends with the power: a trainer that stopped early stands still until then.
    edges = [at for at in instants if at >= noticed] + [cut]
    first = max((at for at in instants if at < noticed), default=noticed)
    stall_s = sum(
        late - max(early, noticed) - step_s
        for early, late in itertools.pairwise([first, *edges])
        if late - early > GAP_STEPS * step_s
    )
    last_step = before[-1][0]
    return Loss(
        step_s=step_s,
        stall_s=max(0.0, stall_s),
        redone_s=max(0, last_step - restored) * step_s,
        down_s=after[0][1] - cut - pause_s - step_s,
        last_step=last_step,
        restored_step=restored,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The values of the bound, as the daemon measured them in the same run."""

    save_s: float
    size_bytes: int
    send_bytes_s: float
    fetch_bytes_s: float
    reserve_s: float

    def bound_parts(self, step_s: float) -> dict[str, float]:
        """The terms of the bound, in seconds: S + B/W + reserve + one step + B/R + the time to start."""
        return {
            "save": self.save_s,
            "send": self.size_bytes / self.send_bytes_s,
            "reserve": self.reserve_s,
            "step": step_s,
            "fetch": self.size_bytes / self.fetch_bytes_s,
            "start": START_S,
        }
