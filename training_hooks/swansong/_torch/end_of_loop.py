# SPDX-License-Identifier: Apache-2.0
"""The state at the end of the loop over an epoch, for checkpoints from the work that follows the loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from swansong._log import log
from swansong._torch.change_counts import steps_of, version
from swansong._torch.kinds import of_kind, optimizers_of
from swansong._torch.loader import ResumableLoader
from swansong._torch.objects import params_of

MOST_BYTES = 2**20
"""Size of the largest object that is copied at the end of each loop."""


class _Copy(NamedTuple):
    """The states after the last batch of an epoch."""

    number: int
    states: dict[str, Any]
    versions: dict[str, int]
    """Number of changes of each module and optimizer."""


class EndOfLoop:
    """Copies the small states after the last batch of each epoch.

    A resumed run repeats the work at the end of the epoch: validation, ``scheduler.step()``, the best metric.
    So a checkpoint from that work contains the states from before it.  Weights and tensors of optimizers are
    not copied: that work does not change them, or a warning is logged.

    Args:
        objects: by name, all objects of the state, and its dictionary of plain values.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._numbers = itertools.count()
        self._loaders = of_kind(objects, ResumableLoader).values()
        for loader in self._loaders:
            loader.copy_states = self._copy

    def states(self) -> dict[str, Any]:
        """Return the states to save instead of the current ones, by object; of an optimizer its groups."""
        copies = [loader.copied_at_end for loader in self._loaders if loader.repeats_end]
        if not copies:
            return {}
        newest = max(copies, key=lambda each: each.number)
        versions = self._versions_now()
        changed = {name for name, count in versions.items() if count != newest.versions[name]}
        for name in sorted(changed):
            if isinstance(self._objects[name], torch.nn.Module):
                log.warning(
                    "%s was changed after the last batch of the epoch, and a resume from this checkpoint"
                    " repeats the end of the epoch: call loader.end_epoch() after the change",
                    name,
                )
        # An optimizer whose weights changed, such as a schedule-free one, has groups that belong to them.
        return {name: state for name, state in newest.states.items() if name not in changed}

    def _copy(self) -> _Copy:
        states: dict[str, Any] = {}
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module | ResumableLoader):
                continue
            try:
                if isinstance(item, torch.optim.Optimizer):
                    state = {
                        key: part
                        for key, part in item.state_dict().items()
                        if key == "param_groups"
                    }
                else:
                    state = item if isinstance(item, dict) else item.state_dict()
                if _size(state) <= MOST_BYTES:
                    states[name] = copy.deepcopy(state)
            except Exception as error:
                log.warning("%s cannot be copied at the end of the epoch: %s", name, error)
        return _Copy(next(self._numbers), states, self._versions_now())

    def _versions_now(self) -> dict[str, int]:
        """Return, for each module and optimizer, the number of changes of its weights and buffers."""
        versions = {}
        steps = dict[int, int]()
        """By parameter, the steps of its optimizer."""
        for optimizer in optimizers_of(self._objects).values():
            steps |= dict.fromkeys(map(id, params_of(optimizer)), steps_of(optimizer))
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module):
                tensors = [*item.parameters(), *item.buffers()]
            elif isinstance(item, torch.optim.Optimizer):
                tensors = params_of(item)
            else:
                continue
            versions[name] = sum(version(each) + steps.get(id(each), 0) for each in tensors)
        return versions


def _size(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_size(item) for item in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_size(item) for item in tree)
    return int(getattr(tree, "nbytes", 0))
