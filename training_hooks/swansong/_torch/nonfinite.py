# SPDX-License-Identifier: Apache-2.0
"""Names the first module whose output or gradient is NaN or infinite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from swansong._log import log
from swansong._torch.kinds import Hooked, modules_of
from swansong._torch.sharding import local

ENV = "SWANSONG_FIND_NAN"
"""Environment variable that requests the search, which reads each output back from its device."""
_DEPTH_MAX = 4


class NonFiniteSearch(Hooked):
    """Checks the outputs of all modules, and the gradients of these outputs, until one is not finite.

    Args:
        objects: of the state, by name.
        rank: for the message.
        with_gradients: whether gradients count; the infinite ones of a ``GradScaler`` are normal.
    """

    def __init__(self, objects: Mapping[str, Any], rank: int, *, with_gradients: bool) -> None:
        self._rank, self._with_gradients = rank, with_gradients
        self._hooks = [
            module.register_forward_hook(self._checker(".".join(filter(None, (name, inner)))))
            for name, item in modules_of(objects).items()
            for inner, module in item.named_modules()
        ]

    def _checker(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._hooks:  # a removed hook may be called once more
                return
            kind = type(module).__name__
            if not _is_finite(output):
                bad = [key for key, each in module.named_parameters() if not _is_finite(each)]
                if bad:
                    self._found(f"parameters of {name} ({kind}) are", ": " + ", ".join(bad[:5]))
                elif not _is_finite(inputs):
                    self._found(f"the input of {name} ({kind}) is", ", after another operation")
                else:
                    self._found(f"the output of {name} ({kind}) is", ", and its input is finite")
            elif self._with_gradients:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda gradient: check_gradient(kind, gradient))

        def check_gradient(kind: str, gradient: torch.Tensor) -> None:
            if self._hooks and not _is_finite(gradient):
                self._found(f"the gradient of the output of {name} ({kind}) is", "")

        return check

    def _found(self, what: str, detail: str) -> None:
        self.end()
        log.error("rank %s: %s not finite in this step%s", self._rank, what, detail)


def requested_search(objects: Mapping[str, Any], rank: int) -> NonFiniteSearch | None:
    """Begin the search if the environment requests it."""
    if os.environ.get(ENV, "") in ("", "0"):
        return None
    return NonFiniteSearch(objects, rank, with_gradients="scaler" not in objects)


def _is_finite(value: Any) -> bool:
    return all(
        # The other ranks need not arrive here, so nothing is reduced over them.
        bool(torch.isfinite(local(tensor)).all())
        for tensor in _tensors(value)
        if tensor.is_floating_point() or tensor.is_complex()
    )


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors in nested containers, such as the output of a model of transformers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH_MAX and isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, depth + 1)
