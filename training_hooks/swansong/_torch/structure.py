# SPDX-License-Identifier: Apache-2.0
"""Properties that a checkpoint presupposes of the objects: their structure, and the modes of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from swansong._torch.modules import state_of_module, unwrap

Structure = dict[str, Any]


def structure_of(objects: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> Structure:
    """Return what must be equal when a checkpoint is saved and when it is loaded, by the name of the object.

    Args:
        objects: of the training state, by name.
        names: the names in the state of each module, if they are known already.
    """
    found: Structure = {}
    for name, item in objects.items():
        if isinstance(item, torch.optim.Optimizer):
            found[name] = tuple(len(group["params"]) for group in item.param_groups)
        elif isinstance(item, torch.nn.Module):
            found[name] = (state_of_module(item) if names is None else names[name]).keys()
    return found


def changes_of(before: Structure, now: Structure) -> list[str]:
    """Return a clause for each object whose structure has changed."""
    texts = []
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if old == new:
            continue
        if isinstance(new, tuple):
            texts.append(
                f"{name} has groups of {_numbers(new)} parameters instead of {_numbers(old)}"
            )
        else:
            gained, lost = sorted(new - old), sorted(old - new)
            parts = [f"has {gained[0]!r}"] * bool(gained) + [f"lacks {lost[0]!r}"] * bool(lost)
            texts.append(f"{name} {' and '.join(parts)}")
    return sorted(texts)


def _numbers(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sizes))


def modes_of(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return, for each module, which parameters require a gradient and which modules train, as bits.

    During an evaluation the second one is left out: a resume does not return into it.
    """
    return {
        name: {kind: "".join("01"[bit] for _, bit in bits) for kind, bits in _modes(item)}
        for name, item in objects.items()
        if isinstance(item, torch.nn.Module)
    }


def differing_modes(
    objects: Mapping[str, Any], saved: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return a clause for each mode of modules that is not that of the checkpoint."""
    texts = []
    for name, item in objects.items():
        for kind, bits in _modes(item) if name in saved else ():
            before, now = saved[name].get(kind, ""), list(bits)
            found = [
                (path, was)
                for (path, bit), was in zip(now, before, strict=False)
                if bit != (was == "1")
            ]
            if found and len(before) == len(now):
                path, was = found[0]
                texts.append(
                    f"{len(found)} of {name} ({path or 'itself'} had {kind}={was == '1'} when it was saved)"
                )
    return texts


def _modes(module: torch.nn.Module) -> Iterator[tuple[str, Iterator[tuple[str, bool]]]]:
    inner = unwrap(module)
    yield "requires_grad", ((path, each.requires_grad) for path, each in inner.named_parameters())
    if inner.training:
        yield "training", ((path, each.training) for path, each in inner.named_modules())
