# SPDX-License-Identifier: Apache-2.0
"""Detects that the state is no longer that of the last ``guard.step()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from swansong._torch.change_counts import steps_of
from swansong._torch.kinds import modules_of, of_kind, optimizers_of
from swansong._torch.loader import ResumableLoader
from swansong._torch.sharding import is_sharded

MOST_PARAMETERS = 8
"""Number of parameters of each module that are compared: a look at each step takes about 2 us."""


class StepBoundary:
    """Compares parameters, loaders and optimizers with their state at the last ``guard.step()``.

    Between two boundaries a step is in progress: its batch is drawn, its gradient is incomplete, or the
    weights have changed already.  Averaged weights that are swapped in for an evaluation also count.

    The comparison sees the steps of optimizers of the state, but not parameters that a compiled function
    changes.

    Args:
        objects: of the training state, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.completed_steps: Callable[[], int] = lambda: 0
        """Returns the number of reported steps: without a daemon, none of them is noted."""
        self._loaders = of_kind(objects, ResumableLoader).values()
        self._optimizers = optimizers_of(objects).values()
        self._parameters = [
            parameter
            for module in modules_of(objects).values()
            for parameter in _some([each for each in module.parameters() if _counts_changes(each)])
        ]
        self._noted: list[int] | None = None

    def note(self) -> None:
        """Remember the present state as that of a boundary."""
        self._noted = self._look()

    def is_here(self) -> bool:
        """Whether nothing has changed since the last :meth:`note`."""
        if self._noted is None:
            return not self.completed_steps()
        return self._noted == self._look()

    def _look(self) -> list[int]:
        found = [self.completed_steps(), *(loader.drawn for loader in self._loaders)]
        found += map(steps_of, self._optimizers)
        for each in self._parameters:
            found += (each._version, each.data_ptr())  # noqa: SLF001 - torch documents no other counter
        return found


def _some(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters from all parts of a module."""
    return parameters[:: -(-len(parameters) // MOST_PARAMETERS) or 1]


def _counts_changes(parameter: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(parameter):
        return False
    return parameter.requires_grad and not is_sharded(parameter) and not parameter.is_inference()
