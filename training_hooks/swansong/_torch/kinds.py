# SPDX-License-Identifier: Apache-2.0
"""Finds the objects of one kind in a training state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class Hooked:
    """Base of objects with hooks in the modules or optimizers of a training state."""

    _hooks: list[RemovableHandle]

    def end(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def of_kind(objects: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """Return the objects of this type, by name."""
    return {name: item for name, item in objects.items() if isinstance(item, kind)}


def modules_of(objects: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Return the modules, by name."""
    return of_kind(objects, torch.nn.Module)


def optimizers_of(objects: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers, by name."""
    return of_kind(objects, torch.optim.Optimizer)


def ddp_modules(objects: Mapping[str, Any]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield each ``DistributedDataParallel`` in the modules, with the name of the object."""
    for name, item in modules_of(objects).items():
        for module in item.modules():
            if isinstance(module, DistributedDataParallel):
                yield name, module


def gpus_of(objects: Mapping[str, Any]) -> set[torch.device]:
    """Return the CUDA devices of the parameters."""
    modules = modules_of(objects).values()
    return {each.device for module in modules for each in module.parameters() if each.is_cuda}
