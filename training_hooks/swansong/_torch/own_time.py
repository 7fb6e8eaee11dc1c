# SPDX-License-Identifier: Apache-2.0
"""Measures the part of a step in which a rank of ``DistributedDataParallel`` waits for no other rank."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from swansong._torch.kinds import Hooked, ddp_modules

INTERVAL_S = 1.0
"""Time between two measured steps."""
_SAMPLES = 9
_MARKS = 4


class OwnTime(Hooked):
    """From ``guard.step()`` to the end of the next forward pass: batch, transforms and forward pass.

    The backward pass ends with the slowest rank, so the whole step takes equally long on all ranks.  One step
    in :data:`INTERVAL_S` is measured, on a GPU with events, for which nothing waits.

    Args:
        objects: of the training state, by name.  Without ``DistributedDataParallel``, nothing is measured,
            nor with a ``SyncBatchNorm``, in whose forward pass the ranks wait for each other.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._next_mono_s = 0.0
        self._marks: list[float | torch.cuda.Event] = []
        """Begin and end of the parts of the step that is measured now."""
        self._measured: deque[list[float | torch.cuda.Event]] = deque(maxlen=_SAMPLES)
        self._samples_s: deque[float] = deque(maxlen=_SAMPLES)
        wrapper = next((module for _, module in ddp_modules(objects)), None)
        self._hooks = []
        if wrapper is not None and not any(
            isinstance(module, nn.SyncBatchNorm) for module in wrapper.modules()
        ):
            self._device = next(wrapper.parameters()).device
            # Between the first two hooks the ranks wait for the buffers of rank 0.
            self._hooks = [
                wrapper.register_forward_pre_hook(lambda *_: self._mark(1)),
                wrapper.module.register_forward_pre_hook(lambda *_: self._mark(2)),
                wrapper.module.register_forward_hook(lambda *_: self._mark(3)),
            ]

    def note_boundary(self) -> None:
        """Measure the next step, if the last measured one is old enough."""
        if self._hooks and time.monotonic() >= self._next_mono_s:
            self._next_mono_s = time.monotonic() + INTERVAL_S
            self._marks = []
            self._mark(0)

    def usual_s(self) -> float | None:
        """The median of the last measured steps, in seconds; None before the first.  Waits for no GPU."""
        with contextlib.suppress(
            RuntimeError
        ):  # of a GPU that has failed: the training gets it, too
            while self._measured and _is_complete((marks := self._measured[0])[-1]):
                self._measured.popleft()
                self._samples_s.append(_between_s(*marks[:2]) + _between_s(*marks[2:]))
        return median(self._samples_s) if self._samples_s else None

    def _mark(self, place: int) -> None:
        if len(self._marks) != place:
            return
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.monotonic())
        if len(self._marks) == _MARKS:
            self._measured.append(self._marks)


def _is_complete(mark: float | torch.cuda.Event) -> bool:
    return isinstance(mark, float) or mark.query()


def _between_s(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000)
