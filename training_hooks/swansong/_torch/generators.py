# SPDX-License-Identifier: Apache-2.0
"""The random generators that an object has."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from swansong.rank_files import RandomSource

MOST_ITEMS = 64
"""Length of the longest list in which generators are searched; a longer one contains data."""
MOST_OBJECTS = 2000
"""Largest number of objects in which generators are searched."""


def find_generators(root: Any) -> dict[str, RandomSource]:
    """Return the generators in the attributes of an object, and in theirs, by path.

    Modules, classes, models and tensors are not searched, and long lists neither.
    """
    found: dict[str, RandomSource] = {}
    seen: set[int] = set()
    pending = [("", root)]
    while pending and len(seen) < MOST_OBJECTS:
        path, item = pending.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if (source := RandomSource.of(item)) is not None:
            found[path.lstrip(".")] = source
        else:
            pending += [(path + name, part) for name, part in _parts(item) if _is_searched(part)]
    return found


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, list | tuple | dict):
        if len(item) <= MOST_ITEMS:
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            yield from ((f"[{key!r}]", part) for key, part in pairs)
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, MethodType):
        yield ".__self__", item.__self__
    elif isinstance(item, FunctionType):
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                continue
    else:
        yield from ((f".{name}", part) for name, part in getattr(item, "__dict__", {}).items())


def _is_searched(item: Any) -> bool:
    plain = str | bytes | int | float | type | ModuleType | torch.Tensor | torch.nn.Module
    return item is not None and not isinstance(item, plain)
