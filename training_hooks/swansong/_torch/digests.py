# SPDX-License-Identifier: Apache-2.0
"""Digests of what a step has used and changed: batches, options of the optimizers, and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swansong._checkpoint.redone import Part, digest
from swansong._torch.kinds import modules_of, of_kind, optimizers_of
from swansong._torch.loader import ResumableLoader
from swansong._torch.sharding import local

NAMED_MAX = 2
"""Objects of a kind that have a digest each; more have one in common."""
_READ = ("cpu", "cuda")
"""Types of devices whose sums are read; a read from another one could block the answers to the daemon."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_step(objects: Mapping[str, Any]) -> dict[str, Part]:
    """Return the digests of the last batches and of the optimizers' options.

    Args:
        objects: of the training state, by name.
    """
    loaders = of_kind(objects, ResumableLoader)
    batches = {name: loader.digest() for name, loader in loaders.items()}
    options = {name: _options(each) for name, each in optimizers_of(objects).items()}
    return {**_named("batch", batches), **_named("rates", options)}


def of_weights(objects: Mapping[str, Any]) -> dict[str, Part]:
    """Return the digests of the parameters of all modules; a flipped bit changes them.

    The sums are computed on the device of each parameter, and read by the thread that needs them.

    Args:
        objects: of the training state, by name.
    """
    weights = {name: _weights(module) for name, module in modules_of(objects).items()}
    return _named("weights", weights)


def _named(kind: str, found: Mapping[str, Part]) -> dict[str, Part]:
    if len(found) <= NAMED_MAX:
        return {f"{kind}.{name}": part for name, part in found.items()}

    def together() -> str | None:
        values = [part() if callable(part) else part for part in found.values()]
        return digest(*(value.encode() for value in values if value is not None))

    return {kind: together}


def _options(optimizer: torch.optim.Optimizer) -> Part:
    plain: list[bytes] = []
    on_devices: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for name in sorted(group.keys() - {"params"}):
            option = group[name]
            if isinstance(option, torch.Tensor):
                on_devices.append(option.detach().clone())
            elif isinstance(option, bool | int | float | tuple | list):
                plain.append(f"{name}={option!r}".encode())
    if not on_devices:
        return digest(*plain)
    return lambda: digest(*plain, *(repr(each.tolist()).encode() for each in on_devices))


def _weights(module: torch.nn.Module) -> Part:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        tensor = local(parameter.detach())
        if tensor.numel() and tensor.layout is torch.strided and tensor.device.type in _READ:
            by_device.setdefault(tensor.device, []).append(sum_of_bits(tensor))
    stacked = [torch.stack(sums) for sums in by_device.values()]
    return lambda: digest(*(repr(sums.tolist()).encode() for sums in stacked))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements as integers, modulo 2**64: it has no rounding and no order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    bits = tensor.view(_INTEGERS[size])
    each = 8 // size
    if each == 1 or not tensor.is_contiguous():
        return bits.sum(dtype=torch.int64)
    # Eight bytes at a time are several times faster; a view of them begins at a multiple of eight bytes.
    bits = bits.reshape(-1)
    begin = min(-bits.storage_offset() % each, bits.numel())
    end = begin + (bits.numel() - begin) // each * each
    total = bits[begin:end].view(torch.int64).sum()
    if begin or end < bits.numel():
        total = total + bits[:begin].sum(dtype=torch.int64) + bits[end:].sum(dtype=torch.int64)
    return total
