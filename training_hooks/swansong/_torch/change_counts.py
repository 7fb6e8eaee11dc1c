# SPDX-License-Identifier: Apache-2.0
"""Numbers that change when an object of the training state changes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from swansong._torch.parts import Parts

_COUNTERS = ("last_epoch", "_step_count", "num_updates", "optimization_step")
_COUNTING_TENSORS = ("_scale", "_growth_tracker", "n_averaged")
_hooks: list[RemovableHandle] = []
"""The hook of all optimizers: some classes have no hooks of each optimizer."""
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def version(value: Any) -> int:
    """Return the number of changes in place; 0 for another object and for a tensor that counts none."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return int(value._version)  # noqa: SLF001 - torch documents no other counter


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that the optimizer has begun since the first call for any optimizer.

    torch's counter of changes does not see the steps of fused optimizers.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_count_step))
    return _steps.get(optimizer, 0)


def stepped_optimizers() -> list[torch.optim.Optimizer]:
    """Return all optimizers that :func:`steps_of` counts."""
    return list(_steps)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1


def count_of(item: Any) -> Any:
    """Return a value that changes when an object of a known kind is stepped; None if that raises an error."""
    try:
        return _count(item)
    except Exception:  # an object of the script may raise anything, and training must not suffer
        return None


def shows_changes(item: Any) -> bool:
    """Whether :func:`count_of` shows all changes: of a scheduler, a scaler or an average."""
    names = {*_COUNTERS, *_COUNTING_TENSORS, "scheduler"}
    is_known = isinstance(item, Parts) or not names.isdisjoint(getattr(item, "__dict__", {}))
    return is_known and count_of(item) is not None


def _count(item: Any) -> Any:
    if isinstance(item, torch.optim.Optimizer):
        return steps_of(item)
    if isinstance(item, torch.nn.Module):
        return sum(map(version, item.parameters())) + version(getattr(item, "n_averaged", None))
    # getattr() of a metric of ignite accepts any name, and formats the stack for each.
    attributes = getattr(item, "__dict__", {})
    parts = item.parts if isinstance(item, Parts) else [attributes.get("scheduler")]
    return (
        [value for name in _COUNTERS if type(value := attributes.get(name)) is int],
        [version(attributes.get(name)) for name in _COUNTING_TENSORS],
        [_count(part) for part in parts if part is not None and part is not item],
    )
