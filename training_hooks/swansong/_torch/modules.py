# SPDX-License-Identifier: Apache-2.0
"""The state of a module under names that do not depend on the wrappers around it and in it.

A wrapper adds a component to the names of a module's tensors, such as ``_orig_mod`` or ``module``.  The
canonical names leave these components out.  A checkpoint of a compiled model therefore fits the plain model,
and vice versa.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "lightning.fabric.wrappers._FabricModule": "_original_module",
    "lightning_fabric.wrappers._FabricModule": "_original_module",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning_fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "optimizer",
    "swansong.rank_files.RandomSource": "item",
}
"""By class, the attribute with the wrapped object.  Names of classes, because an import of them is slow."""
_attributes: dict[type, str | None] = {}
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
"""The predecessor of ``fully_shard``."""
FSDP2 = "torch.distributed.fsdp.FSDPModule"
"""Base class of the modules that ``fully_shard`` was applied to."""


def unwrap(item: Any) -> Any:
    """Return the module, the optimizer or the generator inside of all wrappers; other objects unchanged."""
    while attribute := _attribute_of(type(item)):
        item = getattr(item, attribute)
    return item


def state_of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` by canonical names.

    Raises:
        ValueError: two entries have the same canonical name.
    """
    inner = unwrap(module)
    state = inner.state_dict()
    return {canonical: state[key] for canonical, key in _names(inner, state).items()}


def load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that has the names of :func:`state_of_module`.

    Raises:
        KeyError: an entry is missing.
        RuntimeError: the module refuses the state.
    """
    inner = unwrap(module)
    names = _names(inner, inner.state_dict())
    inner.load_state_dict({key: state[canonical] for canonical, key in names.items()})


def contains(module: torch.nn.Module, name: str) -> bool:
    """Whether the module contains one of the class with this full name, without an import of the class."""
    return any(name in _class_names(type(each)) for each in module.modules())


def _names(inner: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a state by their canonical names."""
    names: dict[str, str] = {}
    for key in state:
        other = names.setdefault(_canonical(inner, key), key)
        if other != key:
            raise ValueError(f"{other!r} and {key!r} of the module have the same canonical name")
    return names


def _canonical(module: torch.nn.Module, key: str) -> str:
    """Return the name without the components of wrappers.

    Some wrappers have already removed their component from the names in ``state_dict()``.
    """
    parts: list[str] = []
    current: Any = module
    for part in key.split("."):
        while attribute := _attribute_of(type(current)):
            current = getattr(current, attribute)
            if part == attribute:
                break
        else:
            parts.append(part)
            children = getattr(current, "_modules", {})
            current = children.get(part)
    return ".".join(parts)


def _attribute_of(kind: type) -> str | None:
    if kind not in _attributes:
        _attributes[kind] = next(filter(None, map(_WRAPPERS.get, _class_names(kind))), None)
    return _attributes[kind]


def _class_names(kind: type) -> list[str]:
    return [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
