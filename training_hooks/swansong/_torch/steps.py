# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of optimizers, because torch's counter of changes does not see those of fused ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Count the steps that the optimizer begins from now on; a second call does nothing."""
    if optimizer not in _begun:
        _begun[optimizer] = 0
        optimizer.register_step_pre_hook(_count)


def steps_begun(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps since :func:`count_steps`."""
    return _begun[optimizer]


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _begun[optimizer] += 1
