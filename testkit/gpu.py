# SPDX-License-Identifier: Apache-2.0
"""The host memory of a state on a GPU, for tests and benchmarks."""

from __future__ import annotations

import torch
from swansong.torch import TrainingState


def prepare(state: TrainingState) -> list[torch.Tensor]:
    """Prepare for the first copy in the background, and return the memory that will be pinned."""
    state.prepare_copy()
    (only,) = state._arenas._idle
    files = [memory for _, memory, _ in only._files.values()]
    return [memory.tensor for memory in files if memory._device is not None]


def is_pinned(memory: list[torch.Tensor]) -> bool:
    return all(each.is_pinned() for each in memory)
