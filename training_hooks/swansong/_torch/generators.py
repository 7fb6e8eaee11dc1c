# SPDX-License-Identifier: Apache-2.0
"""The random generators that an object has, and their states."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from swansong.state import has_bit_generator

MOST_ITEMS = 64
"""Length of the longest list in which generators are searched; a longer one contains data."""
MOST_OBJECTS = 2000
"""Largest number of objects in which generators are searched."""


def is_generator(item: Any) -> bool:
    """Whether it is a ``torch.Generator``, or a generator of numpy or ``random``."""
    return (
        isinstance(item, torch.Generator | random.Random)
        or has_bit_generator(item)
        or _is_random_state(item)
    )


def state_of_generator(item: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, random.Random):
        return item.getstate()
    return item.get_state(legacy=False) if _is_random_state(item) else item.bit_generator.state


def set_state_of_generator(item: Any, state: Any) -> None:
    """Set a generator to a state that :func:`state_of_generator` returned."""
    if isinstance(item, torch.Generator):
        item.set_state(state)
    elif isinstance(item, random.Random):
        item.setstate(state)
    elif _is_random_state(item):
        item.set_state(state)
    else:
        item.bit_generator.state = state


def find_generators(root: Any) -> dict[str, Any]:
    """Return the generators in the attributes of an object, and in theirs, by path.

    Modules, classes, models and tensors are not searched, and long lists neither.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    pending = [("", root)]
    while pending and len(seen) < MOST_OBJECTS:
        path, item = pending.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_generator(item):
            found[path.lstrip(".")] = item
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
    plain = str | bytes | int | float | type | torch.Tensor | torch.nn.Module
    return item is not None and not isinstance(item, plain) and not _is_module(item)


def _is_module(item: Any) -> bool:
    return isinstance(item, type(sys))


def _is_random_state(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(item, numpy.random.RandomState)
